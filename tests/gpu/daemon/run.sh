#!/usr/bin/env bash
# The tests on a GPU. Where a machine has a GPU but no compiler or libraries of ours, a packed build runs there:
#   tests/gpu/daemon/run.sh pack BUILD FOLDER  puts programs, libraries and this script into FOLDER (needs no GPU)
#   FOLDER/run.sh test [--mps] [FILTER]          runs them there; --mps: once more under an MPS control daemon of its own
#   FOLDER/run.sh bench [OPTIONS...]             mok-bench layer --engine cuda OPTIONS...
# Changes no setting of the GPU. Exit code 0 only if every test passed; 77 where there is no GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/carried.sh"

programs=(daemon/mokd/mokd daemon/worker/mok-worker client/mokctl tests/gpu/daemon/gpu_daemon
    tests/gpu/daemon/gpu_daemon_backward tests/gpu/daemon/gpu_stream tests/gpu/daemon/gpu_rack tests/gpu/daemon/gpu_death
    tests/gpu/daemon/gpu_own_mps tests/gpu/daemon/gpu_yield tests/bench/mok-bench client/examples/train_moe_lm)

pack() {
    local build=$1 folder=$2 program library
    rm -rf "$folder/build" && mkdir -p "$folder/build/lib"
    for program in "${programs[@]}"; do
        mkdir -p "$folder/build/$(dirname "$program")"
        strip -o "$folder/build/$program" "$build/$program"
        # What every machine has stays behind, the driver's above all.
        ldd "$build/$program" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }'
    done | sort -u | grep -vE '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libcuda|ld-linux[^/]*)\.so' |
        while read -r library; do
            strip -o "$folder/build/lib/$(basename "$library")" "$library" 2>/dev/null ||
                cp -L "$library" "$folder/build/lib/"
        done
    cp "$here/run.sh" "$here/carried.sh" "$here"/{train,trace}.py "$folder/"
    tar -C "$folder" -cJf "$folder/build.tar.xz" build
    rm -rf "$folder/build"
    du -sh "$folder/build.tar.xz"
}

run_test() {
    local name=$1 code=0
    case $name in
    *.py) timeout 240 python3 "$here/$name" || code=$? ;;
    *) timeout 240 "$MOK_BUILD_DIR/tests/gpu/daemon/$name" || code=$? ;;
    esac
    if [[ $code == 77 && $name == gpu_own_mps ]]; then
        echo "== $name: skipped"
        return
    fi
    [[ $code == 77 ]] && exit 77
    if [[ $code == 0 ]]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    echo "== $name${MOK_TEST_MPS_PIPE:+ under MPS}: exit code $code"
}

run_tests() {
    local mps=no
    [[ ${1-} == --mps ]] && mps=yes && shift
    [[ -n ${1-} ]] && export CMOCKA_TEST_FILTER=$1
    passed=0 failed=0
    run_test gpu_daemon
    run_test gpu_daemon_backward
    run_test gpu_stream
    run_test gpu_rack
    run_test gpu_death
    run_test gpu_own_mps
    run_test train.py
    run_test trace.py
    if [[ $mps == yes ]]; then
        mps_start
        run_test gpu_daemon
        run_test gpu_daemon_backward
        run_test gpu_stream
        run_test gpu_rack
        run_test gpu_death
        run_test train.py
        run_test trace.py
        mps_stop
    fi
    echo "$passed passed, $failed failed"
    [[ $failed == 0 ]]
}

case ${1-} in
pack) pack "$2" "$3" ;;
test) shift; carried_unpack "$here"; run_tests "$@" ;;
bench) shift; carried_unpack "$here"; "$MOK_BUILD_DIR/tests/bench/mok-bench" layer --engine cuda "$@" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
