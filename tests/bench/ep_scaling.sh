#!/usr/bin/env bash
# Expert parallelism over the GPUs of one host, everything in one call of under ten minutes: correctness over N GPUs,
# mok-bench layer for all shapes and routings, forward and backward, both sharing profiles, and the PyTorch baselines.
# On a machine without GPUs, or with --dry-run, the host engine runs small shapes through the same steps.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

usage() {
    cat <<'EOF'
Usage: ep_scaling.sh [OPTIONS] N
Measures expert parallelism over N ranks on N GPUs of this host. Writes OUT/ep<N>.jsonl and prints a table.
  --build DIR     programs (default: build/release of this tree, or build/ beside this script where it was packed)
  --gpu-tests DIR what tests/gpu/run.sh pack made; its tests run first
  --baseline DIR  a PyTorch baseline (unfused.py with its libglue.so) to run beside
  --out DIR       where results go (default: tests/bench/results; of a dry run: nowhere)
  --gpus G        GPUs to spread the ranks over (default: N, or as many as there are)
  --dry-run       host engine, small shapes: shows that every step works
  --rounds R      measured rounds (default 30)
EOF
}

build='' gpu_tests='' baseline='' out='' gpus='' dry=no rounds=30 ranks=''
while [[ $# -gt 0 ]]; do
    case $1 in
    --build) build=$2; shift ;;
    --gpu-tests) gpu_tests=$2; shift ;;
    --baseline) baseline=$2; shift ;;
    --out) out=$2; shift ;;
    --gpus) gpus=$2; shift ;;
    --rounds) rounds=$2; shift ;;
    --dry-run) dry=yes ;;
    --help) usage; exit 0 ;;
    -*) echo "ep_scaling.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    *) ranks=$1 ;;
    esac
    shift
done
if [[ ! $ranks =~ ^([1-9]|1[0-6])$ ]]; then
    echo "ep_scaling.sh: N is '$ranks', must be 1..16" >&2
    exit 2
fi
if [[ -z $build ]]; then
    build=$here/../../build/release
    [[ -d $build ]] || build=$here/build
fi
bench=$build/tests/bench/mok-bench
[[ -x $bench ]] || { echo "ep_scaling.sh: no $bench: build the release preset, or name --build" >&2; exit 1; }
export MOK_BUILD_DIR=$build OPENBLAS_NUM_THREADS=1
[[ -d $build/lib ]] && export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
there=$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | wc -l || true)
if [[ $dry == no && $there -eq 0 ]]; then
    echo "ep_scaling.sh: no GPU here; running the host engine instead (--dry-run)" >&2
    dry=yes
fi
if [[ -z $out && $dry == yes ]]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
out=${out:-$here/results}
mkdir -p "$out"
result=$out/ep$ranks.jsonl
: > "$result"

failed=0
step() { # description command...
    local what=$1
    shift
    echo "== $what" >&2
    "$@" >> "$result" || { echo "ep_scaling.sh: failed: $what" >&2; failed=$((failed + 1)); }
}

host() {
    for routing in uniform zipf hot-rank; do
        step "host engine, $routing" "$bench" layer --ep "$ranks" --shape h256-i512 --tokens 128 --rounds 3 \
            --routing "$routing" --json
    done
}

cuda() { # profile
    for op in forward backward; do
        for shape in kimi glm qwen dsv4; do
            for routing in uniform zipf hot-rank; do
                [[ $op == backward && $routing != uniform ]] && continue
                step "$1, $shape, $op, $routing" "$bench" layer --engine cuda --ep "$ranks" --gpus "$gpus" --shape "$shape" \
                    --op "$op" --routing "$routing" --rounds "$rounds" --memory $((100 * gpus / ranks)) --json
            done
        done
    done
}

mps_start() {
    export CUDA_MPS_PIPE_DIRECTORY=$out/mps CUDA_MPS_LOG_DIRECTORY=$out/mps-log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    nvidia-cuda-mps-control -d
    export MOK_TEST_MPS_PIPE=$CUDA_MPS_PIPE_DIRECTORY
    unset CUDA_MPS_PIPE_DIRECTORY # libmok is to find it by itself
}

mps_stop() {
    echo quit | CUDA_MPS_PIPE_DIRECTORY=$MOK_TEST_MPS_PIPE timeout 20 nvidia-cuda-mps-control || true
    rm -rf "$out/mps" "$out/mps-log"
    unset MOK_TEST_MPS_PIPE
}

baselines() {
    local comms=none
    [[ $ranks -gt 1 ]] && comms=symm,nccl
    if [[ $ranks -gt 1 ]]; then
        step "baseline" python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
            "$baseline/unfused.py" kimi,glm,qwen,dsv4 "$comms"
    else
        step "baseline" python3 "$baseline/unfused.py" kimi,glm,qwen,dsv4 "$comms"
    fi
}

if [[ $dry == yes ]]; then
    host
else
    gpus=${gpus:-$((there < ranks ? there : ranks))}
    if [[ -n $gpu_tests ]]; then
        echo "== correctness" >&2
        "$gpu_tests/run.sh" >&2 || failed=$((failed + 1))
    fi
    if command -v nvidia-cuda-mps-control > /dev/null; then
        mps_start
        cuda mps
        mps_stop
    fi
    cuda slices
    [[ -z $baseline ]] || baselines
fi
if command -v python3 > /dev/null && [[ -s $result ]]; then
    python3 - "$result" <<'EOF'
import json, sys
print("| shape | op | EP | routing | sharing | ms | peer ms | peer |\n|---|---|---|---|---|---|---|---|")
for line in open(sys.argv[1]):
    r = json.loads(line) if line.startswith("{") else {}
    if "ms" in r and "op" in r:
        peer = "-" if r.get("peer_ms") is None else f"{r['peer_ms']:.3f}"
        print(f"| {r['shape']} | {r['op']} | {r['ep']} | {r['routing']} | {r.get('sharing', '-')} | {r['ms']:.3f} | {peer} | {r.get('peer') or '-'} |")
EOF
fi
[[ $failed -eq 0 ]]
