#!/usr/bin/env bash
# Prints pip's arguments for torch: the index of CPU builds where this machine has no NVIDIA driver, else nothing.
# PyPI's build for Linux brings some 3.5 GB of CUDA libraries. $1: a Python, to look with; $2: another index.
#
# An index of the user's own, and a machine that does not reach PyTorch's within ten seconds, keep plain pip.
set -euo pipefail

python=${1:-python3}
index=${2:-https://download.pytorch.org/whl/cpu}

has_nvidia_driver() {
    [[ -e /proc/driver/nvidia/version ]] || nvidia-smi >/dev/null 2>&1
}

has_own_index() {
    "$python" -m pip config list 2>/dev/null | grep -q "[.]index-url="
}

is_reached() {
    timeout 10 "$python" - "$index/torch/" <<'PYTHON' >/dev/null 2>&1
import sys
import urllib.request

urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
}

if has_nvidia_driver || has_own_index; then
    exit 0
elif is_reached; then
    echo "--index-url $index"
else
    echo "torch: $index is not reached, so pip takes torch from where it is configured to; PyPI's build adds 3.5 GB of CUDA libraries" >&2
fi
