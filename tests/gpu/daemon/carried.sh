# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts that run programs on a GPU machine: a build that was carried there, and an MPS control daemon of
# their own. Changes no setting of the GPU.

# Takes DIRECTORY/build.tar.xz apart, once; sets what programs of a build need.
carried_unpack() { # directory
    export MOK_BUILD_DIR=${MOK_GPU_DIR:-/tmp/mok-gpu}/build
    if [[ ! -d $MOK_BUILD_DIR ]]; then
        mkdir -p "$(dirname "$MOK_BUILD_DIR")"
        tar -C "$(dirname "$MOK_BUILD_DIR")" -xJf "$1/build.tar.xz"
    fi
    carried_use "$MOK_BUILD_DIR"
}

carried_use() { # build directory
    export MOK_BUILD_DIR=$1 OPENBLAS_NUM_THREADS=1
    if [[ -d $1/lib ]]; then
        export LD_LIBRARY_PATH=$1/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
}

# From here on mokd and its clients run under MPS. Its folder is short, since socket addresses are.
mps_start() {
    mps_folder=$(mktemp -d /tmp/mok-mps-XXXXXX)
    mkdir "$mps_folder/pipe" "$mps_folder/log"
    CUDA_MPS_PIPE_DIRECTORY=$mps_folder/pipe CUDA_MPS_LOG_DIRECTORY=$mps_folder/log nvidia-cuda-mps-control -d || return
    export MOK_TEST_MPS_PIPE=$mps_folder/pipe # libmok finds it by itself
}

mps_stop() {
    [[ -n ${MOK_TEST_MPS_PIPE-} ]] || return 0
    echo quit | CUDA_MPS_PIPE_DIRECTORY=$MOK_TEST_MPS_PIPE timeout 20 nvidia-cuda-mps-control || true
    unset MOK_TEST_MPS_PIPE
    rm -rf "$mps_folder"
}
