#!/usr/bin/env bash
# Makes the environment $1 of a pair of vLLM and torch ($2, such as 0.32.0-2.11.0): torch of its own; vLLM of its own,
# unless the first environment $3 has that version; everything else is borrowed from $3.
# Set by the Makefile: LOGS and WHEELS (folders), TORCH_ARGS (pip's arguments for torch).
set -euo pipefail

venv=$1
pair=$2
first=$3
here=$(dirname "$0")

if [[ ! $pair =~ ^([0-9]+\.[0-9]+\.[0-9]+)-([0-9]+\.[0-9]+\.[0-9]+)$ ]]; then
    echo "error: PAIR=$pair is no pair; expected a version of vLLM and one of torch, such as 0.32.0-2.11.0" >&2
    exit 2
fi
vllm=${BASH_REMATCH[1]}
torch=${BASH_REMATCH[2]}
python=$venv/bin/python
constraints=$venv/constraints.txt

step() { # title, command
    bash "$here/step.sh" "$LOGS/window-$pair-$((++steps)).log" "[$pair $steps/4] $1" "${@:2}"
}
steps=0

version_of() { # the version of distribution $2 that interpreter $1 finds, without a label such as +cpu
    "$1" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]).split("+")[0])' "$2"
}

install() {
    "$python" -m pip install --disable-pip-version-check --no-compile --constraint "$constraints" "$@"
}

# What differs from the first environment but for torch: vLLM, and what its other version asks for.
install_vllm() {
    if [[ $(version_of "$first/bin/python" vllm) == "$vllm" ]]; then
        echo "vLLM $vllm is borrowed from $first"
        return
    fi
    local tag wheels
    tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    wheels=$WHEELS/vllm-$vllm-$tag
    if ! compgen -G "$wheels/*.whl" >/dev/null; then
        VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$vllm "$first/bin/python" -m pip wheel \
            --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm --wheel-dir "$wheels.partial" \
            "vllm==$vllm"
        rm -rf "$wheels"
        mv "$wheels.partial" "$wheels"
    fi
    install --no-deps "$wheels"/*.whl
}

# pip sees borrowed packages, and installs only what vLLM asks for in another version.
install_unmet() {
    "$python" "$here/requirements_of.py" vllm --unmet >"$venv/unmet.txt"
    cat "$venv/unmet.txt"
    [[ ! -s $venv/unmet.txt ]] || install --requirement "$venv/unmet.txt"
}

check() {
    "$python" - "$vllm" "$torch" <<'PYTHON'
import sys
from importlib.metadata import version

import torch

found = version("vllm").split("+")[0], torch.__version__.split("+")[0]
print("vLLM %s with torch %s" % found)
if found != tuple(sys.argv[1:]):
    sys.exit("error: found vLLM %s with torch %s, expected %s with %s" % (*found, *sys.argv[1:]))
PYTHON
}

make_venv() {
    "$first/bin/python" -m venv --clear "$venv"
    { grep -v '^torch==' "$here/../requirements/constraints.txt"; echo "torch==$torch"; } >"$constraints"
}

install_torch() {
    # shellcheck disable=SC2086  # several arguments
    install $TORCH_ARGS "torch==$torch"
}

borrow() {
    # the first environment's torchvision is compiled for its torch
    "$python" "$here/borrow_packages.py" "$first" torchvision
}

complete() {
    install_unmet
    check
}

export -f install version_of make_venv install_torch install_vllm install_unmet check borrow complete
export here venv first python constraints vllm torch

step "virtual environment and torch $torch" bash -euo pipefail -c 'make_venv && install_torch'
step "vLLM $vllm" bash -euo pipefail -c install_vllm
step "everything else from $first" bash -euo pipefail -c borrow
step "what vLLM $vllm asks for in other versions" bash -euo pipefail -c complete
