#!/usr/bin/env bash
# mokctl doctor where mokd runs, where it does not, and where something is wrong: each is named, with a remedy, and the
# exit code tells. usage: doctor.sh BUILD_DIR
set -euo pipefail
build=$1
dir=$(mktemp -d /tmp/mok-doctor-XXXXXX)
chmod 755 "$dir"
mokd=
stop() { [ -z "$mokd" ] || { kill "$mokd" && wait "$mokd"; } 2>/dev/null || true; mokd=; }
cleanup() {
    stop
    rm -rf "$dir"
}
trap cleanup EXIT
fail() { echo "FAILED: $*"; cat "$dir/said" 2>/dev/null; exit 1; }
export MOK_SOCKET=$dir/mokd.sock
cat >"$dir/mokd.conf" <<CONF
[daemon]
socket = $dir/mokd.sock
[device host0]
CONF

doctor() { # code wanted, then arguments
    local want=$1 code=0
    shift
    "$build/client/mokctl" doctor --config "$dir/mokd.conf" "$@" >"$dir/said" 2>&1 || code=$?
    [ "$code" = "$want" ] || fail "exit code $code, not $want: doctor $*"
}
says() { grep -qE -- "$1" "$dir/said" || fail "does not say: $1"; }
verdict() { # of a check, in JSON
    jq -r --arg check "$1" '[.checks[] | select(.check == $check)][0].verdict' "$dir/said"
}

without_mokd_it_names_the_socket_and_looks_at_the_rest() {
    doctor 1
    says "^FAIL +socket +$dir/mokd.sock: No such file"
    says '-> systemctl start mokd'
    says '^(ok|warn) +processor'
    says '^ok +config'
}

# What is said of GPUs is of the file where no mokd answers, whatever this machine and this build have.
without_mokd_the_devices_are_those_of_the_file() {
    printf '[device host0]\n[device g]\nmemory = 1G\nkind = cuda\n' >"$dir/gpu.conf"
    doctor 1 --config "$dir/gpu.conf"
    ! grep -qE 'none is needed|no GPU$' "$dir/said" || fail "sees no device of kind cuda"
    $has_driver || says '^FAIL +driver'
    doctor 1
    $has_driver || says '^- +driver +no NVIDIA driver and no device of kind cuda: none is needed'
    mkfifo "$dir/pipe"
    doctor 1 --config "$dir/pipe"
    says "^FAIL +config +$dir/pipe: is no regular file"
}

start() {
    "$build/daemon/mokd/mokd" --config "$dir/mokd.conf" >"$dir/log" 2>&1 7<&- 8<&- 9<&- &
    mokd=$!
    for _ in $(seq 400); do
        [ "$("$build/client/mokctl" devices --json 2>/dev/null | jq -r '.devices[0].state')" = up ] && return
        sleep 0.05
    done
    cat "$dir/log"
    fail "mokd does not start"
}

a_well_node_has_no_failure() {
    doctor 0 --json
    [ "$(jq .failures "$dir/said")" = 0 ] || fail "failures"
    local check
    for check in socket versions devices memory descriptors memlock peers directory config processor kernel pages unit \
        driver mps fabric; do
        [ "$(verdict $check)" != null ] || fail "no word of $check"
    done
    [ "$(verdict versions)" = ok ] && [ "$(verdict devices)" = ok ] || fail "versions or devices"
    "$build/client/mokctl" doctor >"$dir/said" || true # mokd says which file it reads
    says "^ok +config +$dir/mokd.conf is without error"
}

with_mokd_the_devices_are_its_own() {
    "$build/client/mokctl" doctor --config "$dir/gpu.conf" >"$dir/said" || true
    says "^- +mps +(no GPU|mokd has no GPU: none is needed)\$"
}

errors() { "$build/client/mokctl" status --json | jq .errors; }
to_be_examined_is_no_error_of_mokd() {
    doctor 0
    [ "$(errors)" = 0 ] || fail "mokctl doctor was counted as $(errors) errors"
    says '^- +peers +this node is in no rack'
    ! "$build/client/mokctl" rack >"$dir/said" 2>&1 || fail "mokctl rack has a rack"
    says 'this mokd is in no rack'
    [ "$(errors)" = 0 ] || fail "mokctl rack was counted as $(errors) errors"
}

what_mokd_refuses_is_counted() {
    local want
    for want in '1 error' '2 errors'; do
        ! "$build/client/mokctl" layer --explain 77 >"$dir/said" 2>&1 || fail "there is a layer 77"
        "$build/client/mokctl" status >"$dir/said"
        says "operations, $want\$"
    done
}

what_is_wrong_is_named_with_a_remedy() {
    "$build/client/mokctl" drain host0 >/dev/null
    doctor 0
    says '^warn +device +host0 is being drained'
    says '-> mokctl undrain'
    "$build/client/mokctl" undrain host0 >/dev/null

    echo 'speed = 1' >>"$dir/mokd.conf"
    chmod 777 "$dir"
    doctor 1
    says "^FAIL +config +$dir/mokd.conf:4: \\[device host0\\] speed = 1: unknown key"
    says "^FAIL +directory +everyone may put another socket"
    chmod 755 "$dir"
    sed -i '$d' "$dir/mokd.conf"
    chmod o+w "$dir/mokd.conf"
    doctor 1
    says '^FAIL +config +everyone may change'
    chmod o-w "$dir/mokd.conf"
    local path
    for path in "$dir/none.conf" /etc/mok/mokd.conf; do # the last --config counts; named, a file must be there
        [ ! -e "$path" ] || continue
        doctor 1 --config "$path"
        says "^FAIL +config +$path: No such file"
    done

    [ "$(id -u)" = 0 ] || return 0
    chmod 600 "$dir/mokd.sock"
    local code=0
    setpriv --reuid 4242 --clear-groups "$build/client/mokctl" doctor >"$dir/said" 2>&1 || code=$?
    [ "$code" = 1 ] || fail "exit code $code"
    says 'is not open to uid 4242'
    says '-> usermod -aG root USER'
    chmod 666 "$dir/mokd.sock"
}

a_mokd_that_does_not_answer_is_waited_for_two_seconds() {
    local begin=$SECONDS
    kill -STOP "$mokd"
    doctor 1
    kill -CONT "$mokd"
    says "^FAIL +socket +$dir/mokd.sock: mokd does not answer"
    says '^(ok|warn) +processor'
    [ $((SECONDS - begin)) -lt 8 ] || fail "took $((SECONDS - begin)) s"
}

a_low_limit_of_mokd_is_a_failure() {
    stop
    (ulimit -n 256 && exec "$build/daemon/mokd/mokd" --config "$dir/mokd.conf" >"$dir/log" 2>&1) &
    mokd=$!
    for _ in $(seq 400); do "$build/client/mokctl" status >/dev/null 2>&1 && break; sleep 0.05; done
    doctor 1
    says '^FAIL +descriptors +mokd may have 256 descriptors'
    says '-> LimitNOFILE='
}

# A driver that waits for a fabric for ever costs two seconds, and what is missing is said: by mokctl, and by mokd of a
# worker that waits in it.
report_6_a_fabric_that_is_not_up_is_named_and_waited_for_two_seconds_alone() {
    local begin end bad=warn
    if $has_cuda; then
        bad=FAIL
        stop
        printf '#!/bin/sh\nexec sleep 3600\n' >"$dir/waits"
        chmod 755 "$dir/waits"
        printf '[daemon]\nsocket = %s\nworker = %s\n[device gpu0]\nkind = cuda\nmemory = 1G\n' "$dir/mokd.sock" "$dir/waits" \
            >"$dir/mokd.conf"
        "$build/daemon/mokd/mokd" --config "$dir/mokd.conf" >"$dir/log" 2>&1 &
        mokd=$!
        for _ in $(seq 400); do "$build/client/mokctl" status >/dev/null 2>&1 && break; sleep 0.05; done
    fi
    begin=$(date +%s)
    LD_LIBRARY_PATH=$build/tests/support/stuck doctor 1
    end=$(date +%s)
    says "^$bad +driver +CUDA does not initialise within 2000 ms: the fabric of the GPUs is most likely not up"
    says '-> systemctl status nvidia-fabricmanager'
    [ $((end - begin)) -lt 30 ] || fail "took $((end - begin)) s"
    ! pgrep -f "doctor --config $dir" >/dev/null || fail "something is left"
    $has_cuda || return 0
    for _ in $(seq 200); do
        "$build/client/mokctl" devices >"$dir/said"
        grep -q 'gpu0: its worker has not answered' "$dir/said" && break
        sleep 0.05
    done
    says '^gpu0: its worker has not answered in [0-9.]+ s: CUDA is slow, or the fabric of the GPUs is not up'
}

# ------------------------------------------------------------------ MPS: control daemons and workers are played

start_with_gpus() { # LINES of [daemon], of gpu0, of gpu1
    stop
    printf '[daemon]\nsocket = %s\nworker = %s\n%s\n' "$dir/mokd.sock" "$build/tests/unit/daemon/fake-worker" "$1" \
        >"$dir/mokd.conf"
    printf '[device gpu0]\nkind = cuda\nmemory = 1G\n%s\n[device gpu1]\nkind = cuda\ncuda = 1\nmemory = 1G\n%s\n' "$2" "$3" \
        >>"$dir/mokd.conf"
    start
}
look() { "$build/client/mokctl" doctor --config "$dir/mokd.conf" >"$dir/said" 2>&1 || true; }
lines_of_mps() { [ "$(grep -cE '^[a-zA-Z-]+ +mps ' "$dir/said")" = "$1" ] || fail "not $1 lines of MPS"; }
under() { # INDEX DIRECTORY: what that worker was really given
    local pid
    pid=$("$build/client/mokctl" devices --json | jq ".devices[$1].worker_pid")
    tr '\0' '\n' <"/proc/$pid/environ" | grep -qx "CUDA_MPS_PIPE_DIRECTORY=$2" || fail "worker $1 is not under $2"
}

mps_is_looked_for_where_each_worker_has_it() {
    start_with_gpus "" "" ""
    look
    says "^- +mps +mokd's GPUs are shared in turns"
    lines_of_mps 1

    # One control daemon for all.
    mkdir "$dir/all" "$dir/a" "$dir/b"
    mkfifo "$dir/all/control" "$dir/a/control" "$dir/b/control"
    exec 7<>"$dir/all/control" 8<>"$dir/a/control" 9<>"$dir/b/control"
    start_with_gpus "sharing = mps"$'\n'"mps_pipe = $dir/all" "" ""
    exec 8<&- 9<&-
    look
    under 0 "$dir/all"
    says "^ok +mps +an MPS control daemon answers in $dir/all, for gpu0, gpu1"
    lines_of_mps 1

    # One a GPU, and that of one GPU is gone.
    exec 8<>"$dir/a/control" 9<>"$dir/b/control"
    start_with_gpus "sharing = mps" "mps_pipe = $dir/a" "mps_pipe = $dir/b"
    exec 7<&- 9<&-
    look
    under 0 "$dir/a"
    under 1 "$dir/b"
    says "^ok +mps +an MPS control daemon answers in $dir/a, for gpu0\$"
    says "^FAIL +mps +the workers of gpu1 want MPS in $dir/b, and nobody answers there"
    says '-> systemctl start mok-mps@GPU'
    lines_of_mps 2
    if [ "$(id -u)" = 0 ]; then
        chmod 700 "$dir/a"
        setpriv --reuid 4242 --clear-groups "$build/client/mokctl" doctor >"$dir/said" 2>&1 || true
        says "^- +mps +$dir/a is not for uid 4242 to look into"
        says '-> mokctl doctor as root'
    fi
    exec 8<&-

    # mokd's own; that of GPU 1 does not start.
    cat >"$dir/nvidia-cuda-mps-control" <<'SH'
#!/bin/sh
dir=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    [ "$CUDA_VISIBLE_DEVICES" = 0 ] || exit 3
    mkfifo "$dir/control" && exec 3<>"$dir/control"
    trap 'rm -f "$dir/control"; exit 0' TERM
    while :; do sleep 0.05; done
fi
exit 0
SH
    chmod 755 "$dir/nvidia-cuda-mps-control"
    PATH=$dir:$PATH start_with_gpus "sharing = mps"$'\n'"mps = own"$'\n'"mps_pipe = $dir/own" "" ""
    look
    under 0 "$dir/own/gpu0"
    says "^ok +mps +an MPS control daemon answers in $dir/own/gpu0, for gpu0"
    says "^FAIL +mps +the workers of gpu1 want MPS in $dir/own/gpu1, and nobody answers there"
    says '-> journalctl -u mokd says why'
    lines_of_mps 2
}

report_27_a_limit_of_locked_memory_is_named_by_mokd_and_by_doctor() {
    ulimit -S -l 64
    start_with_gpus "" "" ""
    [ "$(grep -c 'limit=65536.*remedy="LimitMEMLOCK=infinity' "$dir/log")" = 1 ] || fail "mokd says: $(cat "$dir/log")"
    look
    says '^FAIL +memlock +mokd and its workers may lock 65536 bytes'
    says '-> LimitMEMLOCK=infinity'
    ulimit -l unlimited 2>/dev/null || return 0
    start_with_gpus "" "" ""
    ! grep -q LimitMEMLOCK "$dir/log" || fail "mokd warns without a reason"
    look
    says '^ok +memlock +not limited'
}

printf '[device g]\nkind = cuda\nmemory = 1G\n' >"$dir/gpu.conf"
has_cuda=false
! "$build/daemon/mokd/mokd" --check-config --config "$dir/gpu.conf" >/dev/null 2>&1 || has_cuda=true
has_driver=false
[ ! -e /proc/driver/nvidia/version ] && ! ldconfig -p | grep -q libcuda.so.1 || has_driver=true
without_mokd_it_names_the_socket_and_looks_at_the_rest
without_mokd_the_devices_are_those_of_the_file
start
a_well_node_has_no_failure
with_mokd_the_devices_are_its_own
to_be_examined_is_no_error_of_mokd
what_mokd_refuses_is_counted
what_is_wrong_is_named_with_a_remedy
a_mokd_that_does_not_answer_is_waited_for_two_seconds
a_low_limit_of_mokd_is_a_failure
report_6_a_fabric_that_is_not_up_is_named_and_waited_for_two_seconds_alone
if $has_cuda; then
    mps_is_looked_for_where_each_worker_has_it
    report_27_a_limit_of_locked_memory_is_named_by_mokd_and_by_doctor
fi
echo OK
