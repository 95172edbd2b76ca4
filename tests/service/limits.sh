#!/usr/bin/env bash
# mokd in control groups that leave it few tasks or little memory, which is what TasksMax= and MemoryMax= of a unit are:
# it says what is missing, hands out no more than there is, and never just ends.
# usage: limits.sh BUILD_DIR
set -euo pipefail
build=$1
tmp=$(mktemp -d)
name=mok-test-$$
declare -A group=()
pid=

clean() {
    [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null || true
    wait 2>/dev/null || true
    for g in "${group[@]}"; do
        until_true 5 rmdir "$g" || true
    done
    rm -rf "$tmp"
}
# until_true SECONDS COMMAND...
until_true() {
    local tries=$(($1 * 20))
    shift
    for _ in $(seq "$tries"); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.05
    done
    return 1
}
fail() { echo "FAILED: $*"; cat "$tmp/log"; exit 1; }
trap clean EXIT

# A control group of ours, in either version of the hierarchy.
for controller in pids memory; do
    if [ -d /sys/fs/cgroup/$controller ]; then
        group[$controller]=/sys/fs/cgroup/$controller/$name
    elif grep -qw $controller /sys/fs/cgroup/cgroup.subtree_control 2>/dev/null; then
        group[$controller]=/sys/fs/cgroup/$name
    else
        echo "skipped: no control groups of $controller here"
        exit 77
    fi
    mkdir -p "${group[$controller]}" 2>/dev/null || { group=(); echo "skipped: no control group can be made"; exit 77; }
done
limit() { # TASKS BYTES
    echo "$1" >"${group[pids]}/pids.max" &&
        if [ -f "${group[memory]}/memory.max" ]; then
            echo "$2" >"${group[memory]}/memory.max"
        else
            echo "$2" >"${group[memory]}/memory.limit_in_bytes"
        fi
}
start() { # TASKS BYTES DEVICE_LINES
    limit "$1" "$2" || fail "no limit can be set"
    printf '[daemon]\nsocket = %s\n[device host0]\n%s\n' "$tmp/m.sock" "$3" >"$tmp/conf"
    (
        for g in "${group[@]}"; do echo "$BASHPID" >"$g/cgroup.procs"; done
        exec "$build/daemon/mokd/mokd" --config "$tmp/conf" --runtime-dir "$tmp"
    ) >"$tmp/log" 2>&1 &
    pid=$!
}
stop() {
    local code=0
    kill -TERM "$pid"
    wait "$pid" || code=$?
    pid=
    [ $code -eq 0 ] || fail "ended with exit code $code"
}
said() { grep -qE -- "$1" "$tmp/log"; }
mokctl() { "$build/client/mokctl" --socket "$tmp/m.sock" "$@"; }
devices_say() { mokctl devices | grep -E -- "$1" >/dev/null; }

start 9 256M ""
code=0
wait "$pid" || code=$?
pid=
[ $code -eq 1 ] || fail "too few tasks for mokd: exit code $code"
said 'needs 16 threads .* can have [0-9]+ .*TasksMax' || fail "nobody says that tasks are missing"

start 18 256M ""
until_true 20 devices_say 'could not start: .*(thread|unavailable)' ||
    fail "nobody says that tasks are missing for the device"
devices_say 'host0' || fail "mokd is gone"
stop

start 64 256M ""
until_true 20 devices_say 'up +128.0 MiB' || fail "the device does not have half of what there is: $(mokctl devices)"
! said 'promise more memory' || fail "warned without a reason"
MOK_SOCKET=$tmp/m.sock "$build/client/examples/two_ranks" >"$tmp/out" 2>&1 && fail "two ranks on one device"
grep -q device "$tmp/out" || fail "two_ranks is not told that there is one device: $(cat "$tmp/out")"
stop

start 64 256M "memory = 1G"
until_true 20 devices_say 'up +1.0 GiB' || fail "what was asked for counts: $(mokctl devices)"
said 'devices promise more memory than there is.*promised=1073741824 bound=268435456.*MemoryMax' ||
    fail "nobody warns that the memory is not there"
stop
echo "done"
