#!/usr/bin/env bash
# Puts redis-server on PATH for the tests of the redis store, where this user may install Debian packages. Elsewhere it
# says what to do, and these tests are skipped. Installing starts no server: the tests start their own, on loopback.
set -euo pipefail

if command -v redis-server >/dev/null; then
    echo "keeping $(command -v redis-server)"
elif [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing the package redis-server"
    # A package may start its service when it is installed; this is Debian's way to forbid that.
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        trap 'rm -f "$policy"' EXIT
    fi
    { DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends redis-server ||
        { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends redis-server; }; } ||
        echo "redis-server could not be installed; the tests of the redis store are skipped" >&2
else
    echo "redis-server is not on PATH and cannot be installed by this user; without it the tests of the redis store are" >&2
    echo "skipped. On Debian and Ubuntu: apt-get install redis-server" >&2
fi
