#!/usr/bin/env bash
# One case of training through the real stack: train.sh CASE. Needs MOK_BUILD_DIR.
set -euo pipefail

readonly bin=${MOK_BUILD_DIR:?the build folder}
readonly train=$bin/client/examples/train_moe_lm
readonly small=(--steps 6 --batch 4 --seq 16 --hidden 32 --intermediate 48 --experts 4 --layers 2 --quiet)

work=$(mktemp -d /tmp/mok-test-train.XXXXXX)
mokd_pid=
jobs_pid=

finish() {
    local code=$? pid
    trap - EXIT
    for pid in $jobs_pid $mokd_pid; do
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    if [[ $code -ne 0 ]]; then
        tail -n 30 "$work"/*.out "$work/mokd.log" 2>/dev/null || true
    fi
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT

die() {
    echo "FAILED: $*"
    exit 1
}

start_mokd() {
    mkdir "$work/run"
    cat >"$work/mokd.conf" <<CONFIG
[daemon]
socket = $work/run/mokd.sock
socket_mode = 0600
[device host0]
kind = host
threads = 1
[device host1]
kind = host
threads = 1
CONFIG
    "$bin/daemon/mokd/mokd" --config "$work/mokd.conf" --runtime-dir "$work/run" >"$work/mokd.log" 2>&1 &
    mokd_pid=$!
    export MOK_SOCKET=$work/run/mokd.sock
    for _ in $(seq 200); do
        if [[ $("$bin/client/mokctl" --json devices 2>/dev/null | jq '[.devices[] | select(.state == "up")] | length') == 2 ]]; then
            return 0
        fi
        kill -0 "$mokd_pid" 2>/dev/null || die "mokd ended"
        sleep 0.1
    done
    die "mokd's devices are not up after 20 s"
}

# mokd ends in order, and no sanitizer has complained in it or in a worker.
stop_mokd() {
    local code=0
    kill -TERM "$mokd_pid"
    wait "$mokd_pid" 2>/dev/null || code=$?
    [[ $code -eq 0 ]] || die "mokd ended with exit code $code"
    mokd_pid=
    [[ -z $(ls -A "$work/run") ]] || die "mokd left $(ls -A "$work/run")"
    ! grep -E 'Sanitizer|runtime error' "$work/mokd.log" || die "a sanitizer complained"
}

# run NAME ARGUMENT...: trains; output in NAME.out. Later options win over earlier ones.
run() {
    local name=$1
    shift
    "$train" "${small[@]}" --log "$work/$name.log" "$@" >"$work/$name.out" 2>&1
}

losses() { jq -c '[.step, .loss]' "$work/$1.log"; }

hash_of() { grep '^parameters ' "$work/$1.out"; }

# wait_steps NAME N: until the log has N steps.
wait_steps() {
    for _ in $(seq 600); do
        if [[ -f $work/$1.log && $(wc -l <"$work/$1.log") -ge $2 ]]; then
            return 0
        fi
        sleep 0.1
    done
    die "$1 has not done $2 steps after 60 s"
}

case_repeat() {
    run one
    run two
    [[ $(losses one) == "$(losses two)" ]] || die "equal seeds gave different losses"
    [[ $(hash_of one) == "$(hash_of two)" ]] || die "equal seeds gave different parameters"
    run other --seed 2
    [[ $(hash_of one) != "$(hash_of other)" ]] || die "another seed gave the same parameters"
    grep -qE '^job train_moe_lm: 2 ranks, 6 steps, loss 5\.[0-9]+ -> [0-9.]+, [0-9]+ tokens/s$' "$work/one.out" ||
        die "last line"
}

case_resume() {
    run whole --steps 7
    run first --steps 3 --checkpoint "$work/checkpoint"
    run second --steps 7 --checkpoint "$work/checkpoint" --resume
    [[ $(losses whole) == "$(losses first; losses second)" ]] || die "the resumed run has other losses"
    [[ $(hash_of whole) == "$(hash_of second)" ]] || die "the resumed run has other parameters"
    run saving --steps 7 --save-every 2 --checkpoint "$work/other"
    cmp "$work/checkpoint" "$work/other" || die "checkpoints of the same step differ"
    if run again --steps 7 --checkpoint "$work/checkpoint" --resume; then
        die "a finished run was resumed"
    fi
    if run mixed --steps 9 --checkpoint "$work/checkpoint" --resume --precision mxfp8-per32; then
        die "a run in another precision was resumed"
    fi
    grep -q 'was written with --precision bf16, this run has mxfp8-per32$' "$work/mixed.out" || die "no reason"
}

# What may change speed and memory only must not change a bit.
case_features() {
    run full
    run recompute --recompute
    [[ $(losses full) == "$(losses recompute)" ]] || die "--recompute changed the losses"
    [[ $(hash_of full) == "$(hash_of recompute)" ]] || die "--recompute changed the parameters"
    run shared --shared-expert --micro-batches 4 --topk 3
    [[ $(hash_of full) != "$(hash_of shared)" ]] || die "--shared-expert changed nothing"
    run alone --ranks 1 --batch 8
    [[ $(tail -n 1 "$work/alone.log" | jq '.loss < 6') == true ]] || die "one rank"
}

case_gradients() {
    run check --check-gradients || die "gradients"
    run shared --check-gradients --shared-expert --recompute --topk 3 || die "gradients with a shared expert"
    [[ $(grep -c ' ok$' "$work/shared.out") -eq 9 ]] || die "the table has not nine good lines"
}

# Both MXFP8 rules train, with weight gradients of either kind, and stay close to BF16.
case_precision() {
    local precision wgrad
    run bf16 --steps 20
    for precision in mxfp8-per32 mxfp8-per128; do
        for wgrad in bf16 mxfp8; do
            run "$precision-$wgrad" --steps 20 --precision "$precision" --wgrad "$wgrad"
            [[ $(hash_of bf16) != "$(hash_of "$precision-$wgrad")" ]] || die "$precision gave the bits of bf16"
            jq -se '(.[39].loss - .[19].loss) / .[19].loss | . < 0.05 and . > -0.05' "$work/bf16.log" \
                "$work/$precision-$wgrad.log" >/dev/null || die "$precision, $wgrad is more than 5 % away from bf16"
        done
        [[ $(hash_of "$precision-bf16") != "$(hash_of "$precision-mxfp8")" ]] || die "--wgrad mxfp8 changed nothing"
    done
    run again --steps 20 --precision mxfp8-per128
    [[ $(hash_of again) == "$(hash_of mxfp8-per128-mxfp8)" ]] || die "the repeat in mxfp8 has other parameters"
}

# The one-file example: both ranks compare with plain loops.
case_two-ranks() {
    "$bin/client/examples/two_ranks" >"$work/two.out" 2>&1 || die "two_ranks"
    [[ $(grep -c '^rank [01]: ' "$work/two.out") -eq 2 && $(tail -n 1 "$work/two.out") == OK ]] || die "what it printed"
}

case_killed-rank() {
    "$train" "${small[@]}" --steps 100000 --log "$work/job.log" >"$work/job.out" 2>&1 &
    jobs_pid=$!
    wait_steps job 2
    local rank started=$SECONDS code=0
    rank=$(pgrep -P "$jobs_pid" | tail -n 1)
    kill -KILL "$rank"
    wait "$jobs_pid" || code=$?
    [[ $code -eq 1 ]] || die "the job ended with exit code $code"
    [[ $((SECONDS - started)) -le 4 ]] || die "the job took more than 4 s to end"
    grep -q 'was killed by signal 9' "$work/job.out" || die "no word of the killed rank"
    run after || die "no training after a killed rank"
}

case_killed-mokd() {
    "$train" "${small[@]}" --steps 100000 --log "$work/job.log" >"$work/job.out" 2>&1 &
    jobs_pid=$!
    wait_steps job 2
    local started=$SECONDS code=0
    kill -KILL "$mokd_pid"
    wait "$mokd_pid" 2>/dev/null || true
    mokd_pid=
    wait "$jobs_pid" || code=$?
    [[ $code -eq 1 ]] || die "the job ended with exit code $code"
    [[ $((SECONDS - started)) -le 4 ]] || die "the job took more than 4 s to end"
    grep -q 'MOK_EDAEMON' "$work/job.out" || die "no word of mokd's death"
}

case_stop() {
    "$train" "${small[@]}" --steps 100000 --checkpoint "$work/checkpoint" --log "$work/job.log" >"$work/job.out" 2>&1 &
    jobs_pid=$!
    wait_steps job 2
    local code=0 steps
    kill -TERM "$jobs_pid"
    wait "$jobs_pid" || code=$?
    [[ $code -eq 130 ]] || die "the job ended with exit code $code"
    steps=$(wc -l <"$work/job.log")
    run rest --steps $((steps + 2)) --checkpoint "$work/checkpoint" --resume
    run whole --steps $((steps + 2))
    [[ $(hash_of whole) == "$(hash_of rest)" ]] || die "the stopped and resumed run has other parameters"
}

# Two jobs on the same devices disturb nobody's bits, and leave no descriptor in mokd.
case_two-jobs() {
    local before other=0
    run alone
    before=$(find "/proc/$mokd_pid/fd" -mindepth 1 | wc -l)
    "$train" "${small[@]}" --job other --steps 40 --seed 2 --log "$work/other.log" >"$work/other.out" 2>&1 &
    jobs_pid=$!
    wait_steps other 1
    run beside
    wait "$jobs_pid" || other=$?
    [[ $other -eq 0 ]] || die "the other job ended with exit code $other"
    [[ $(hash_of alone) == "$(hash_of beside)" ]] || die "a job beside changed the parameters"
    for _ in $(seq 50); do
        [[ $(find "/proc/$mokd_pid/fd" -mindepth 1 | wc -l) -gt $before ]] || return 0
        sleep 0.1
    done
    die "mokd holds $(find "/proc/$mokd_pid/fd" -mindepth 1 | wc -l) descriptors, had $before"
}

for tool in jq pgrep; do
    command -v "$tool" >/dev/null || {
        echo "no $tool"
        exit 77
    }
done
[[ -x $bin/daemon/mokd/mokd ]] || die "$bin/daemon/mokd/mokd is not there"
start_mokd
"case_$1"
[[ -z $mokd_pid ]] || stop_mokd
echo "ok"
