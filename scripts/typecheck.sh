#!/usr/bin/env bash
# Runs mypy over the packages as they are installed, scripts and tests/conformance; mypy follows folders, so it is shown a
# tree of links ($1) of the installed shape. $2: interpreter.
set -euo pipefail

tree=$1
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(realpath --no-symlinks "$2")

bash "$root/scripts/link_tree.sh" "$tree"
ln -s "$root/scripts" "$root/tests" "$root/benchmarks" "$tree"
cd "$tree"
exec "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" \
    -p vllm_gaudi_ucm -p vllm_gaudi_ucm_tools -p scripts -p tests.conformance
