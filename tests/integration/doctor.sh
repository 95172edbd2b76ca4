#!/usr/bin/env bash
# mokctl doctor where mokd runs, where it does not, and where something is wrong: each is named, with a remedy, and the
# exit code tells. usage: doctor.sh BUILD_DIR
set -euo pipefail
build=$1
dir=$(mktemp -d /tmp/mok-doctor-XXXXXX)
chmod 755 "$dir"
mokd=
cleanup() {
    [ -n "$mokd" ] && kill "$mokd" 2>/dev/null && wait "$mokd" 2>/dev/null
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

start() {
    "$build/daemon/mokd/mokd" --config "$dir/mokd.conf" >"$dir/log" 2>&1 &
    mokd=$!
    for _ in $(seq 400); do
        [ "$("$build/client/mokctl" devices --json 2>/dev/null | jq -r '.devices[0].state')" = up ] && return
        sleep 0.05
    done
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

    [ "$(id -u)" = 0 ] || return 0
    chmod 600 "$dir/mokd.sock"
    local code=0
    setpriv --reuid 4242 --clear-groups "$build/client/mokctl" doctor >"$dir/said" 2>&1 || code=$?
    [ "$code" = 1 ] || fail "exit code $code"
    says 'is not open to uid 4242'
    says '-> usermod -aG root USER'
    chmod 666 "$dir/mokd.sock"
}

a_low_limit_of_mokd_is_a_failure() {
    kill "$mokd" && wait "$mokd" || true
    (ulimit -n 256 && exec "$build/daemon/mokd/mokd" --config "$dir/mokd.conf" >"$dir/log" 2>&1) &
    mokd=$!
    for _ in $(seq 400); do "$build/client/mokctl" status >/dev/null 2>&1 && break; sleep 0.05; done
    doctor 1
    says '^FAIL +descriptors +mokd may have 256 descriptors'
    says '-> LimitNOFILE='
}

# A driver that waits for a fabric for ever costs two seconds, and what is missing is said.
report_6_a_fabric_that_is_not_up_is_named_and_waited_for_two_seconds_alone() {
    local begin end
    begin=$(date +%s)
    LD_LIBRARY_PATH=$build/tests/support/stuck doctor 1
    end=$(date +%s)
    says '^warn +driver +CUDA does not initialise within 2000 ms: the fabric of the GPUs is most likely not up'
    says '-> systemctl status nvidia-fabricmanager'
    [ $((end - begin)) -lt 30 ] || fail "took $((end - begin)) s"
    ! pgrep -f "doctor --config $dir" >/dev/null || fail "something is left"
}

without_mokd_it_names_the_socket_and_looks_at_the_rest
start
a_well_node_has_no_failure
what_is_wrong_is_named_with_a_remedy
a_low_limit_of_mokd_is_a_failure
report_6_a_fabric_that_is_not_up_is_named_and_waited_for_two_seconds_alone
echo OK
