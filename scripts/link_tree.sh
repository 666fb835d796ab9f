#!/usr/bin/env bash
# Makes $1 a tree of links in which the packages have the shape that they have once installed: `ops/` and `graphs/`
# inside, and the tools next to it.
set -euo pipefail

tree=$1
root=$(cd "$(dirname "$0")/.." && pwd)

rm -rf "$tree"
mkdir -p "$tree/vllm_gaudi_ucm"
for entry in "$root"/vllm_gaudi_ucm/* "$root/ops" "$root/graphs"; do
    ln -s "$entry" "$tree/vllm_gaudi_ucm/$(basename "$entry")"
done
ln -s "$root/tools/vllm_gaudi_ucm_tools" "$tree/vllm_gaudi_ucm_tools"
