#!/usr/bin/env bash
# Runs mypy over the package as it is installed. `ops/` and `graphs/` stand beside `vllm_gaudi_ucm/` in the repository but
# inside it once installed; mypy follows folders, so it is shown a tree of links ($1) of the installed shape. $2: interpreter.
set -euo pipefail

tree=$1
root=$(cd "$(dirname "$0")/.." && pwd)
python=$2

rm -rf "$tree"
mkdir -p "$tree/vllm_gaudi_ucm"
for entry in "$root"/vllm_gaudi_ucm/* "$root/ops" "$root/graphs"; do
    ln -s "$entry" "$tree/vllm_gaudi_ucm/$(basename "$entry")"
done
cd "$tree"
exec "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p vllm_gaudi_ucm
