#!/usr/bin/env bash
# Creates the virtual environment $1 with the interpreter $2 (empty: the first of python3.11, python3.12, python3 that
# runs and is Python 3.11 or 3.12). An environment that works is kept.
set -euo pipefail

target=$1
wanted=${2:-}

supported() { # does interpreter $1 run (a version manager's shim may not), and is it 3.11 or 3.12?
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

pick() {
    local candidate
    if [[ -n $wanted ]]; then
        command -v "$wanted" >/dev/null || fail "PYTHON=$wanted does not exist; expected an interpreter of Python 3.11 or 3.12."
        supported "$wanted" || fail "PYTHON=$wanted is $("$wanted" --version 2>&1 | head -n 1 || true); expected Python 3.11 or 3.12."
        printf '%s' "$wanted"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if supported "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "found no Python 3.11 or 3.12 (tried python3.11, python3.12, python3)." \
        "Install one, or name it: make PYTHON=/path/to/python3.11 <target>"
}

if supported "$target/bin/python" && "$target/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "keeping $target ($("$target/bin/python" --version))"
    exit 0
fi

python=$(pick)
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module; on Debian and Ubuntu it is the package python3-venv."
echo "creating $target with $("$python" --version)"
"$python" -m venv --clear "$target"
