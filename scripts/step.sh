#!/usr/bin/env bash
# Runs a command as one step of a set-up: prints the title $2 and, when it has ended, how long it took. What the command
# prints goes to the file $1; if it fails, the last lines of that file follow, and its name.
# usage: step.sh LOG TITLE COMMAND...
set -uo pipefail

log=$1
title=$2
shift 2
last_lines=15

mkdir -p "$(dirname "$log")"
printf '%s\n' "\$ $*" >"$log"
printf '%s ... ' "$title"

# On a terminal the seconds and the newest line of the log follow the title until the command ends.
shown=
show_progress() {
    while sleep 1; do
        printf '\r\033[K%s ... %d s  %.*s' "$title" "$SECONDS" $((${COLUMNS:-100} - ${#title} - 14)) \
            "$(tail -c 400 "$log" | tr '\r' '\n' | grep -v '^ *$' | tail -n 1 | tr -cd '[:print:]')"
    done
}
if [[ -t 1 ]]; then
    COLUMNS=$(tput cols 2>/dev/null || echo 100)
    show_progress &
    shown=$!
    trap 'kill "$shown" 2>/dev/null' EXIT
fi

status=0
"$@" >>"$log" 2>&1 </dev/null || status=$?

if [[ -n $shown ]]; then
    kill "$shown" 2>/dev/null
    wait "$shown" 2>/dev/null
    printf '\r\033[K%s ... ' "$title"
fi
if ((status == 0)); then
    printf '%d s\n' "$SECONDS"
    exit 0
fi
printf 'failed after %d s\n' "$SECONDS"
{
    echo "error: this step ended with status $status: $*"
    echo "The last lines of its output:"
    tail -n "$last_lines" "$log" | sed 's/^/    /'
    echo "All of it is in $log. Mend the cause and repeat the same command: steps that succeeded are not repeated."
} >&2
exit "$status"
