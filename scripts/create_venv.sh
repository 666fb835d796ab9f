#!/usr/bin/env bash
# Creates the virtual environment $1 with the interpreter $2 (empty: see pick_python.sh). An environment that works is
# kept.
set -euo pipefail

target=$1
wanted=${2:-}
pick="$(dirname "$0")/pick_python.sh"

if bash "$pick" "$target/bin/python" >/dev/null 2>&1 && "$target/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "keeping $target ($("$target/bin/python" --version))"
    exit 0
fi

python=$(bash "$pick" "$wanted")
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "error: $python has no venv module; on Debian and Ubuntu it is the package python3-venv." >&2
    exit 1
fi
echo "creating $target with $("$python" --version), $python"
"$python" -m venv --clear "$target"
