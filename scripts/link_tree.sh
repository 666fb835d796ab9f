#!/usr/bin/env bash
# Makes $1 a tree of links in which the package has the shape that it has once installed: `ops/` and `graphs/` inside.
set -euo pipefail

tree=$1
root=$(cd "$(dirname "$0")/.." && pwd)

rm -rf "$tree"
mkdir -p "$tree/vllm_gaudi_ucm"
for entry in "$root"/vllm_gaudi_ucm/* "$root/ops" "$root/graphs"; do
    ln -s "$entry" "$tree/vllm_gaudi_ucm/$(basename "$entry")"
done
