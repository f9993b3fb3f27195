#!/usr/bin/env bash
# Runs a command with an empty /dev/shm of its own, as large as the machine's, so that nothing of other jobs is seen or
# touched; without permission for that, with the machine's. Fails if segments or locks are left behind.
set -euo pipefail
if [ -z "${SHM_APART:-}" ] && unshare --mount true 2>/dev/null; then
    size=$(df --block-size=1 --output=size /dev/shm | tail -1)
    export SHM_APART=yes
    exec unshare --mount bash -c 'mount -t tmpfs -o "size=${0// /}" tmpfs /dev/shm && exec bash "$@"' "$size" "$0" "$@"
fi
unset SHM_APART

names() { find /dev/shm -maxdepth 1 -name 'ftp-*' | sort; }
before=$(names)
code=0
"$@" || code=$?
left=$(comm -13 <(printf '%s\n' "$before") <(names))
if [ -n "$left" ]; then
    printf 'FAILED: left behind in /dev/shm:\n%s\n' "$left"
    code=1
fi
exit "$code"
