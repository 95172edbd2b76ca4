#!/usr/bin/env bash
# Expert parallelism over the GPUs of one host, everything in one call of under ten minutes, the most important first:
# layers through mokd beside the PyTorch baselines, correctness over N GPUs, mok-bench layer for all shapes, routings and
# sharing profiles, what NVLink carries, a group over two daemons. A step that fails or is late does not end the call.
# On a machine without GPUs, or with --dry-run, the host engine runs small shapes through the same steps.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
gpu=$here/../gpu
. "$gpu/daemon/carried.sh"

usage() {
    cat <<'EOT'
Usage: ep_scaling.sh [OPTIONS] N
       ep_scaling.sh pack BUILD DIR [BASELINE]
Measures expert parallelism over N ranks on N GPUs of this host. Writes OUT/ep<N>.jsonl and prints tables. With fewer
GPUs than ranks it writes OUT/shared-ep<N>-gpus<G>.jsonl: that says that all works, not how fast N GPUs are.
`pack` puts all that a bare GPU machine needs into DIR; there it is DIR/bench/ep_scaling.sh N.
  --build DIR     programs (default: build/release of this tree; of a packed one, what it carries)
  --baseline DIR  another PyTorch baseline (unfused.py, common.py, glue.cu) to run beside (default: the packed one)
  --out DIR       where results go (default: $OUT, else tests/bench/results; of a dry run: nowhere)
  --gpus G        GPUs to spread the ranks over (default: N, or as many as there are)
  --shapes S      of layers, with commas, instead of each step's own
  --tokens T      a rank (default 2048)
  --rounds R      measured rounds (default 30)
  --limit S       seconds for everything (default 540)
  --only WORDS    steps whose names match this regular expression
  --dry-run       host engine, small shapes: shows that every step works
EOT
}

pack() { # build folder [baseline]
    local build=$1 folder=$2
    mkdir -p "$folder/bench/peers" "$folder/gpu"
    cp "$here/ep_scaling.sh" "$folder/bench/"
    cp "$here"/peers/*.{py,cu} "$folder/bench/peers/"
    "$gpu/run.sh" pack "$build" "$folder/gpu"
    strip "$folder"/gpu/gpu_* "$folder/gpu/libmok_gpu.so"
    git -C "$here" rev-parse --short=12 HEAD > "$folder/commit" 2> /dev/null || true
    if [[ -n ${3-} ]]; then
        mkdir -p "$folder/baseline"
        cp "$3"/*.{py,cu} "$folder/baseline/"
        chmod -R u+w "$folder/baseline"
    fi
    if command -v nvcc > /dev/null; then # what is compiled here need not be compiled there
        compile "$folder/bench/peers/glue.cu" "$folder/bench/peers/libglue.so"
        [[ -z ${3-} ]] || compile "$folder/baseline/glue.cu" "$folder/baseline/libglue.so"
    fi
    du -sh "$folder"
}

compile() { # source library
    [[ -e $2 && $2 -nt $1 ]] && return
    nvcc -std=c++17 -O3 -gencode=arch=compute_90,code=sm_90 -shared -Xcompiler=-fPIC -o "$2.$$" "$1" && strip "$2.$$" && mv "$2.$$" "$2"
}

if [[ ${1-} == pack ]]; then
    pack "${@:2}"
    exit 0
fi
build='' baseline='' out='' gpus='' shapes='' tokens='' dry=no rounds=30 ranks='' limit=540 only=''
while [[ $# -gt 0 ]]; do
    case $1 in
    --build) build=$2; shift ;;
    --baseline) baseline=$2; shift ;;
    --out) out=$2; shift ;;
    --gpus) gpus=$2; shift ;;
    --shapes) shapes=$2; shift ;;
    --tokens) tokens=$2; shift ;;
    --rounds) rounds=$2; shift ;;
    --limit) limit=$2; shift ;;
    --only) only=$2; shift ;;
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
python=(env "LD_LIBRARY_PATH=${LD_LIBRARY_PATH-}" python3) # the packed libraries are for our programs
if [[ -n $build ]]; then
    carried_use "$build"
elif [[ -e $gpu/daemon/build.tar.xz ]]; then
    carried_unpack "$gpu/daemon"
else
    carried_use "$(cd "$here/../.." && pwd)/build/release"
fi
bench=$MOK_BUILD_DIR/tests/bench/mok-bench
[[ -x $bench ]] || { echo "ep_scaling.sh: no $bench: build the release preset, or name --build" >&2; exit 1; }
[[ -s $here/../commit ]] && MOK_COMMIT=$(< "$here/../commit") && export MOK_COMMIT
there=$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | wc -l || true)
if [[ $dry == no && $there -eq 0 ]]; then
    echo "ep_scaling.sh: no GPU here; running the host engine instead (--dry-run)" >&2
    dry=yes
fi
if [[ -z $out && $dry == yes ]]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
out=${out:-${OUT:-$here/results}}
mkdir -p "$out"
[[ $dry == yes ]] || gpus=${gpus:-$((there < ranks ? there : ranks))}
name=ep$ranks
[[ $dry == yes || $gpus -ge $ranks ]] || name=shared-ep$ranks-gpus$gpus # no figures of N GPUs: not among these
result=$out/$name.jsonl log=$out/$name.log
: > "$result"
: > "$log"
begun=$SECONDS failed=()
now() { echo "[$((SECONDS - begun)) s]"; }

# Standard output is records, standard error goes to the log; the last lines of both are shown when it fails. @LIMIT in the
# command is the time that it has to end by itself; it is stopped a little later, and killed where that does not help.
step() { # seconds-at-most description command...
    local most=$1 what=$2 left=$((limit - SECONDS + begun - 6)) code=0 from=$SECONDS
    shift 2
    [[ $what =~ $only ]] || return 0
    if [[ $left -lt 8 ]]; then
        echo "$(now) left out, no time: $what" >&2
        failed+=("left out: $what")
        return 0
    fi
    most=$((most < left ? most : left))
    set -- "${@//@LIMIT/$((most - 3))}"
    echo "$(now) $what (at most $most s)" >&2
    echo "== $(now) $what: $*" >> "$log"
    timeout -k 5 "$most" "$@" > "$out/step.out" 2> "$out/step.err" || code=$?
    grep -a '^{' "$out/step.out" >> "$result" || true
    cat "$out/step.out" "$out/step.err" >> "$log"
    if [[ $code -eq 77 ]]; then
        echo "$(now) skipped: $what" >&2
    elif [[ $code -ne 0 ]]; then
        failed+=("failed with $code: $what")
        echo "$(now) FAILED with $code after $((SECONDS - from)) s: $what" >&2
        grep -av 'session: [a-z]*ed session' "$out/step.err" | tail -n 12 | cut -c1-300 >&2 || true
        grep -av '^{' "$out/step.out" | tail -n 12 | cut -c1-300 >&2 || true
    fi
    rm -f "$out/step.out" "$out/step.err"
}

host() {
    for routing in uniform zipf hot-rank; do
        step 120 "host engine, $routing" "$bench" layer --ep "$ranks" --shape h256-i512 --tokens 128 --rounds 3 \
            --routing "$routing" --json
    done
}

on_gpus() {
    local memory=$((100 * gpus / ranks)) peers=strong,naive
    [[ $gpus -lt $ranks ]] && peers='' # NCCL wants a GPU a rank
    local sizes=(${tokens:+--tokens "$tokens"}) every=(${shapes:+--shape "$shapes"}) two=${shapes:-kimi,qwen} first=${shapes%%,*} routing op shape sweep program
    local layer=("${python[@]}" "$here/peers/layer.py" --ep "$ranks" --gpus "$gpus" --memory "$memory" --limit @LIMIT "${sizes[@]}")
    local plain=("$bench" layer --engine cuda --ep "$ranks" --gpus "$gpus" --memory "$memory" --rounds "$rounds" --json "${sizes[@]}")
    [[ -e $here/peers/libglue.so ]] && export MOK_PEERS_GLUE=$here/peers/libglue.so
    [[ -z $baseline && -d $here/../baseline ]] && baseline=$(cd "$here/../baseline" && pwd)
    [[ -z $baseline ]] || compile "$baseline/glue.cu" "$baseline/libglue.so" || baseline=''
    local other=() one=("${python[@]}" "$here/peers/layer.py" --ep 1 --memory 60 --limit @LIMIT)
    [[ -z $baseline ]] || other=(--baseline "$baseline") # with one rank only

    if command -v nvidia-cuda-mps-control > /dev/null && mps_start; then
        trap mps_stop EXIT
    fi
    local sharing=${MOK_TEST_MPS_PIPE:+mps}
    sharing=${sharing:-slices}
    if [[ $ranks -gt 1 ]]; then
        step 100 "$sharing, EP $ranks beside the baselines, uniform" "${layer[@]}" "${every[@]}" --candidates "mok,mok16${peers:+,$peers}" --rounds "$rounds"
        if [[ -n $peers && -z $only ]] && ! grep -q '"of": "mok"' "$result"; then # one that does not run must not cost the others
            step 60 "$sharing, EP $ranks without the baselines, uniform" "${layer[@]}" "${every[@]}" --candidates mok --rounds "$rounds"
            step 60 "EP $ranks, the baselines without MPS and mokd, uniform" env -u MOK_TEST_MPS_PIPE "${layer[@]}" "${every[@]}" \
                --candidates "$peers" --rounds "$rounds"
        fi
    fi
    step 60 "$sharing, EP 1 beside the baselines, uniform" "${one[@]}" "${sizes[@]}" "${every[@]}" "${other[@]}" --candidates mok,mok16,strong,naive \
        --rounds "$rounds"
    step 45 "$sharing, EP $ranks correct against FP64, all routings" "${layer[@]}" --check --candidates "mok${peers:+,$peers}"
    step 70 "$sharing, EP $ranks beside the strong baseline, Zipf and hot rank" "${layer[@]}" "${every[@]}" --candidates "mok${peers:+,strong}" \
        --routing zipf,hot-rank --rounds $((rounds / 2 + 1))
    if [[ $ranks -gt 1 ]]; then
        step 45 "$sharing, EP $ranks beside the strong baseline, hot rank with twice the rows" "${layer[@]}" "${every[@]}" --candidates "mok${peers:+,strong}" \
            --routing hot-rank-twice --ops forward --rounds $((rounds / 2 + 1))
        step 45 "$sharing, EP 1 beside the strong baseline, with as many rows" "${one[@]}" "${every[@]}" --candidates mok,strong --tokens 4096 --ops forward \
            --rounds $((rounds / 2 + 1))
        step 25 "$sharing, EP $ranks, where a hot rank's time goes" "${layer[@]}" --shape "${first:-qwen}" --routing hot-rank --spans
        for sweep in comm_units=0,4,8,12,16,24,32 minibatch_rows=0,512,1024,2048,4096,8192; do
            step 30 "$sharing, EP $ranks, sweep of ${sweep%=*}" "${layer[@]}" --sweep "$sweep" --shape "$two" --rounds 12
        done
    fi
    if [[ -x $MOK_BUILD_DIR/tests/gpu/daemon/gpu_rack ]]; then
        step 30 "test: one group over two daemons" "$MOK_BUILD_DIR/tests/gpu/daemon/gpu_rack"
    fi
    if [[ -n $baseline && $ranks -eq 2 && $gpus -eq 2 ]]; then
        step 50 "the other baseline" "${python[@]}" -m torch.distributed.run --standalone --nproc-per-node 2 "$baseline/unfused.py" "$two" symm
    fi
    step 40 "$sharing, EP 1 beside the strong baseline, expert taken by half of all rows" "${one[@]}" "${sizes[@]}" "${every[@]}" --candidates mok,strong \
        --routing hot-expert --rounds $((rounds / 2 + 1))
    step 60 "$sharing, EP 1 beside the strong baseline, 512 to 16,384 tokens" "${one[@]}" --tokens 512,1024,4096,8192,16384 --candidates mok,strong \
        --shape "${first:-kimi}" --rounds $((rounds / 3 + 1))
    for op in forward backward; do
        if [[ -z $shapes ]]; then
            step 60 "$sharing, daemon's cost, all shapes, $op" "${plain[@]}" --op "$op"
        fi
        for shape in ${shapes//,/ }; do
            step 30 "$sharing, daemon's cost, $shape, $op" "${plain[@]}" --shape "$shape" --op "$op"
        done
    done
    for routing in zipf hot-rank; do
        step 40 "$sharing, daemon's cost, ${first:-kimi}, forward, $routing" "${plain[@]}" --shape "${first:-kimi}" --routing "$routing"
    done
    mps_stop
    step 40 "slices, EP $ranks beside the strong baseline, uniform" "${layer[@]}" --candidates "mok${peers:+,strong}" --shape "$two" \
        --rounds $((rounds / 2 + 1))
    for op in forward backward; do
        for shape in ${two//,/ }; do
            step 30 "slices, daemon's cost, $shape, $op" "${plain[@]}" --shape "$shape" --op "$op"
        done
    done
    if [[ $gpus -eq 2 && -e $gpu/libmok_gpu.so ]]; then
        step 30 "the same bits on one GPU and on two" env "LD_LIBRARY_PATH=$gpu/lib" python3 "$gpu/two_gpus.py" "$gpu/libmok_gpu.so" kimi,qwen
    fi
    for program in gpu_daemon gpu_daemon_backward gpu_stream; do
        if [[ -x $MOK_BUILD_DIR/tests/gpu/daemon/$program ]]; then
            step 60 "test $program, slices" "$MOK_BUILD_DIR/tests/gpu/daemon/$program"
        fi
    done
}

if [[ $dry == yes ]]; then
    host
else
    on_gpus
fi
if command -v python3 > /dev/null && [[ -s $result ]]; then
    "${python[@]}" "$here/peers/table.py" "$result" || true
fi
echo "$(now) done, ${#failed[@]} steps failed; $result" >&2
[[ ${#failed[@]} -eq 0 ]] || printf '%s\n' "${failed[@]}" >&2
[[ ${#failed[@]} -eq 0 ]]
