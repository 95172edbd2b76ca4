#!/usr/bin/env bash
# The tests on a GPU. Where a machine has a GPU but no compiler or libraries of ours, a packed build runs there:
#   tests/gpu/daemon/run.sh pack BUILD FOLDER  puts programs, libraries and this script into FOLDER (needs no GPU)
#   FOLDER/run.sh test [--mps] [FILTER]          runs them there; --mps: once more under an MPS control daemon of its own
#   FOLDER/run.sh bench [OPTIONS...]             mok-bench layer --engine cuda OPTIONS...
# Changes no setting of the GPU. Exit code 0 only if every test passed; 77 where there is no GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

programs=(daemon/mokd/mokd daemon/worker/mok-worker client/mokctl tests/gpu/daemon/gpu_daemon
    tests/gpu/daemon/gpu_daemon_backward tests/gpu/daemon/gpu_stream tests/gpu/daemon/gpu_death
    tests/gpu/daemon/gpu_own_mps
    tests/bench/mok-bench)

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
    cp "$0" "$folder/run.sh"
    tar -C "$folder" -cJf "$folder/build.tar.xz" build
    rm -rf "$folder/build"
    du -sh "$folder/build.tar.xz"
}

unpack() {
    export MOK_BUILD_DIR=${MOK_GPU_DIR:-/tmp/mok-gpu}/build
    if [[ ! -d $MOK_BUILD_DIR ]]; then
        mkdir -p "$(dirname "$MOK_BUILD_DIR")"
        tar -C "$(dirname "$MOK_BUILD_DIR")" -xJf "$here/build.tar.xz"
    fi
    export LD_LIBRARY_PATH=$MOK_BUILD_DIR/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} OPENBLAS_NUM_THREADS=1
}

mps_start() {
    export CUDA_MPS_PIPE_DIRECTORY=$MOK_BUILD_DIR/mps CUDA_MPS_LOG_DIRECTORY=$MOK_BUILD_DIR/mps-log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    nvidia-cuda-mps-control -d
    export MOK_TEST_MPS_PIPE=$CUDA_MPS_PIPE_DIRECTORY
    unset CUDA_MPS_PIPE_DIRECTORY # libmok is to find it by itself
}

mps_stop() {
    echo quit | CUDA_MPS_PIPE_DIRECTORY=$MOK_TEST_MPS_PIPE timeout 20 nvidia-cuda-mps-control || true
    unset MOK_TEST_MPS_PIPE
}

run_test() {
    local name=$1 code=0
    timeout 240 "$MOK_BUILD_DIR/tests/gpu/daemon/$name" || code=$?
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
    run_test gpu_death
    run_test gpu_own_mps
    if [[ $mps == yes ]]; then
        mps_start
        run_test gpu_daemon
        run_test gpu_daemon_backward
        run_test gpu_stream
        run_test gpu_death
        mps_stop
    fi
    echo "$passed passed, $failed failed"
    [[ $failed == 0 ]]
}

case ${1-} in
pack) pack "$2" "$3" ;;
test) shift; unpack; run_tests "$@" ;;
bench) shift; unpack; "$MOK_BUILD_DIR/tests/bench/mok-bench" layer --engine cuda "$@" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
