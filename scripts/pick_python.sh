#!/usr/bin/env bash
# Prints the interpreter that environments are made with: $1, or the first of python3.11, python3.12, python3 that runs
# and is Python 3.11 or 3.12.
#
# Builds of one version differ: one without the compiler's profile-guided optimisation, as version managers make them,
# takes 1.4 times as long for the same program, and the host's part of a step is Python. So an interpreter further down
# PATH is taken where it has the same version and is clearly faster.
set -euo pipefail

wanted=${1:-}

supported() { # does interpreter $1 run (a version manager's shim may not), and is it 3.11 or 3.12?
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

first() {
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "found no Python 3.11 or 3.12 (tried python3.11, python3.12, python3)." \
        "Install one, or name it: make PYTHON=/path/to/python3.11 <target>"
}

pace() { # microseconds of CPU time that interpreter $1 takes for a fixed piece of work: the least of some
    "$1" - <<'PYTHON'
import time


class Counter:
    def __init__(self) -> None:
        self.counts = {}

    def add(self, key: int, count: int = 1) -> None:
        self.counts[key] = self.counts.get(key, 0) + count


def work() -> float:
    begin, counter = time.process_time(), Counter()
    for number in range(50_000):
        counter.add(number % 100, count=len(str(number)))
    return time.process_time() - begin


print(round(1e6 * min(work() for _ in range(7))))
PYTHON
}

builds() { # the interpreters on PATH of the version of $1 that have a venv module: that of $1 first, each build once
    local version name real known=
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    { echo "$1"; type -ap "python$version"; } | while read -r name; do
        real=$("$name" -c 'import ensurepip, os, sys, venv; print(os.path.realpath(sys.executable))' 2>/dev/null) || continue
        [[ $known == *"|$real|"* ]] || echo "$name"
        known+="|$real|"
    done
}

fastest() { # of these interpreters the first, unless another one takes at least a sixth less than it: that is not chance
    local -A least=()
    local name found best=$1
    for _ in 1 2 3 4 5; do # in turns: a busy machine is as busy for all of them
        for name in "$@"; do
            found=$(pace "$name")
            if ((found < ${least[$name]:-found + 1})); then least[$name]=$found; fi
        done
    done
    for name in "$@"; do
        if ((least[$name] * 6 <= least[$1] * 5 && least[$name] < least[$best])); then best=$name; fi
    done
    if [[ $best != "$1" ]]; then
        echo "$best takes $((100 * least[$best] / least[$1])) % of the time of $1 (PYTHON= chooses another)" >&2
    fi
    printf '%s\n' "$best"
}

if [[ -n $wanted ]]; then
    command -v "$wanted" >/dev/null || fail "PYTHON=$wanted does not exist; expected an interpreter of Python 3.11 or 3.12."
    supported "$wanted" || fail "PYTHON=$wanted is $("$wanted" --version 2>&1 | head -n 1 || true); expected Python 3.11 or 3.12."
    printf '%s\n' "$wanted"
    exit 0
fi

python=$(first)
mapfile -t found < <(builds "$python")
if ((${#found[@]} > 1)); then
    fastest "${found[@]}"
else
    printf '%s\n' "${found[0]:-$python}" # create_venv.sh says what it lacks
fi
