#!/usr/bin/env bash
# The main job, end to end: builds MoK, starts mokd with two host devices, trains two jobs on them at the same time,
# repeats one, and checks that nothing is left behind. Exit code 0 only if all of it was checked.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly build=build/release
readonly steps=80
readonly margin=1.5 # each job's loss must fall by at least this much
readonly mxfp8_percent=5 # the loss curve in MXFP8 stays this close to that in BF16
readonly first_uid=61001 second_uid=61002

keep=no
work=
mokd_pid=
phase=start
declare -a tracked=() # "pid start-time" of every process of the demo
declare -a launchers=()

usage() {
    cat <<EOF
Usage: deploy/demo.sh [--keep] [--help]
Installs missing packages, builds into $build, and runs two training jobs (two ranks each) that share two host
devices through mokd. As root the jobs run as users $first_uid and $second_uid. Last line: DEMO OK.
  --keep    keep the folder with logs, configuration and checkpoints
EOF
}

while [[ $# -gt 0 ]]; do
    case "$1" in
    --keep) keep=yes ;;
    --help)
        usage
        exit 0
        ;;
    *)
        echo "demo.sh: unknown option $1" >&2
        usage >&2
        exit 2
        ;;
    esac
    shift
done

say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

die() {
    printf 'demo.sh: %s\n' "$*" >&2
    exit 1
}

# Field 22 of stat is the start time: a pid alone may be another process by now.
start_time() {
    local stat fields
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} != Z ]] || return 1
    echo "${fields[19]}"
}

track() {
    local started
    started=$(start_time "$1") || return 0
    tracked+=("$1 $started")
}

track_children() {
    local child
    for child in $(pgrep -P "$1" || true); do
        track "$child"
    done
}

alive() {
    local now
    now=$(start_time "$1") && [[ $now == "$2" ]]
}

kill_tracked() {
    local entry
    for entry in "${tracked[@]}"; do
        # shellcheck disable=SC2086
        if alive $entry; then
            kill -KILL "${entry% *}" 2>/dev/null || true
        fi
    done
}

finish() {
    local code=$? log
    trap - EXIT
    if [[ $code -ne 0 && -n $work ]]; then
        echo "demo.sh: failed while: $phase" >&2
        for log in "$work"/build.log "$work"/mokd.log "$work"/*/out; do
            [[ -s $log ]] || continue
            printf -- '--- %s\n' "$log" >&2
            tail -n 25 "$log" >&2
        done
    fi
    kill_tracked
    wait 2>/dev/null || true
    if [[ -n $work && $keep == no ]]; then
        rm -rf "$work"
    elif [[ -n $work ]]; then
        echo "kept: $work"
    fi
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

build_all() {
    phase="installing packages"
    say "looking for missing packages"
    deploy/deps.sh
    phase="building"
    say "building into $build (some minutes the first time)"
    if ! { cmake --preset release && ninja -C "$build" mokd mok-worker mokctl train_moe_lm; } >"$work/build.log" 2>&1; then
        die "the build failed"
    fi
}

# Programs and library at a place that the jobs' users can reach, wherever the sources are.
install_programs() {
    phase="copying programs"
    mkdir "$work/bin"
    cp "$build/client/examples/train_moe_lm" "$work/bin/"
    cp -d "$build"/client/libmok.so* "$work/bin/"
    chmod -R a+rX "$work/bin"
}

write_config() {
    mkdir "$work/run"
    chmod 755 "$work" "$work/run"
    cat >"$work/mokd.conf" <<EOF
[daemon]
socket = $work/run/mokd.sock
socket_mode = 0666
log_level = info

[device host0]
kind = host
threads = 1

[device host1]
kind = host
threads = 1
EOF
}

devices_up() {
    "$build/client/mokctl" --json --socket "$work/run/mokd.sock" devices 2>/dev/null |
        jq -e '[.devices[] | select(.state == "up")] | length == 2' >/dev/null 2>&1
}

start_mokd() {
    phase="starting mokd"
    "$build/daemon/mokd/mokd" --config "$work/mokd.conf" --runtime-dir "$work/run" >"$work/mokd.log" 2>&1 &
    mokd_pid=$!
    track "$mokd_pid"
    for _ in $(seq 100); do
        if devices_up; then
            track_children "$mokd_pid"
            return 0
        fi
        kill -0 "$mokd_pid" 2>/dev/null || die "mokd ended"
        sleep 0.1
    done
    die "mokd's devices are not up after 10 s"
}

descriptors() {
    find "/proc/$mokd_pid/fd" -mindepth 1 -maxdepth 1 | wc -l
}

# Entries of /dev/shm that belong to the users of the demo.
shared_files() {
    find /dev/shm -mindepth 1 \( -user "$(id -u)" -o -uid $first_uid -o -uid $second_uid \) -printf '%p %i\n' 2>/dev/null |
        sort
}

# run_job FOLDER UID ARGUMENT...: trains in the background, output in FOLDER/out, losses in FOLDER/log.
run_job() {
    local folder=$work/$1 uid=$2
    shift 2
    mkdir "$folder"
    local -a command=("$work/bin/train_moe_lm" --socket "$work/run/mokd.sock" --ranks 2 --devices "0,1" --steps "$steps"
        --log "$folder/log" "$@")
    if [[ $(id -u) -eq 0 ]]; then
        chown "$uid:$uid" "$folder"
        command=(setpriv "--reuid=$uid" "--regid=$uid" --clear-groups "${command[@]}")
    fi
    (
        cd "$folder"
        HOME=$folder OPENBLAS_NUM_THREADS=1 LD_LIBRARY_PATH=$work/bin exec "${command[@]}"
    ) >"$folder/out" 2>&1 &
    launchers+=("$!")
    track "$!"
}

steps_done() {
    local lines=0
    [[ -f $work/$1/log ]] && lines=$(wc -l <"$work/$1/log")
    echo "$lines"
}

# One line on a terminal that says how far each job is.
progress() {
    [[ -t 1 ]] || return 0
    local job line=""
    for job in "$@"; do
        line+="$job step $(steps_done "$job")/$steps  "
    done
    printf '\r[%3d s] %s' "$SECONDS" "$line"
}

# watch_jobs FOLDER...: shows progress until the jobs have ended; mokctl once, when all of them train.
watch_jobs() {
    local shown=no launcher job running all
    while :; do
        running=no
        for launcher in "${launchers[@]}"; do
            kill -0 "$launcher" 2>/dev/null && running=yes
        done
        [[ $running == yes ]] || break
        all=yes
        for job in "$@"; do
            [[ $(steps_done "$job") -ge 3 ]] || all=no
        done
        if [[ $shown == no && $all == yes ]]; then
            shown=yes
            for launcher in "${launchers[@]}"; do
                track_children "$launcher"
            done
            show_status
        fi
        progress "$@"
        sleep 0.3
    done
    [[ ! -t 1 ]] || printf '\r\033[K'
    for launcher in "${launchers[@]}"; do
        wait "$launcher" || die "a job ended with exit code $?"
    done
    launchers=()
    [[ $shown == yes ]] || die "the jobs ended before mokctl could be asked about them"
}

show_status() {
    [[ ! -t 1 ]] || printf '\r\033[K'
    if [[ $phase == repeat* ]]; then
        return 0
    fi
    local sessions
    "$build/client/mokctl" --socket "$work/run/mokd.sock" status
    sessions=$("$build/client/mokctl" --json --socket "$work/run/mokd.sock" jobs | grep -oE '"(alice|bob)"' | sort -u |
        wc -l)
    [[ $sessions -eq 2 ]] || die "mokctl jobs shows $sessions of the two jobs"
}

check_loss() {
    local first last
    first=$(head -n 1 "$work/$1/log" | jq -r .loss)
    last=$(tail -n 5 "$work/$1/log" | jq -s '[.[].loss] | add / length')
    [[ $(steps_done "$1") -eq $steps ]] || die "$1 has logged $(steps_done "$1") steps, not $steps"
    jq -ne "$first - $last >= $margin" >/dev/null ||
        die "the loss of $1 went from $first to $last: it must fall by $margin"
}

losses() { jq -c '[.step, .loss]' "$work/$1/log"; }

check_repeat() {
    diff <(losses "$1") <(losses "$2") >"$work/losses.diff" ||
        die "losses of the repeat differ: $(head -n 4 "$work/losses.diff")"
    [[ $(grep '^parameters ' "$work/$1/out") == $(grep '^parameters ' "$work/$2/out") ]] ||
        die "the repeat ended with other parameters"
}

# Mean distance of two loss curves over the last quarter of the steps, in percent of the first one.
curve_distance() {
    jq -rn --slurpfile a "$work/$1/log" --slurpfile b "$work/$2/log" --argjson from $((steps * 3 / 4)) '
        [range($from; $a | length) | ($a[.].loss - $b[.].loss) / $a[.].loss | if . < 0 then -. else . end]
        | add / length * 1000 | round / 10'
}

check_mxfp8() {
    jq -ne "$1 <= $mxfp8_percent" >/dev/null || die "the loss in MXFP8 is $1 % away from that in BF16"
}

# Releases happen in mokd right after a job's last process; give them a moment, then count.
settle_descriptors() {
    local before=$1
    for _ in $(seq 50); do
        [[ $(descriptors) -ne $before ]] || break
        sleep 0.1
    done
    echo $(($(descriptors) - before))
}

stop_mokd() {
    phase="stopping mokd"
    local code=0
    kill -TERM "$mokd_pid"
    for _ in $(seq 100); do
        kill -0 "$mokd_pid" 2>/dev/null || break
        sleep 0.1
    done
    kill -0 "$mokd_pid" 2>/dev/null && die "mokd still runs 10 s after SIGTERM"
    wait "$mokd_pid" || code=$?
    [[ $code -eq 0 ]] || die "mokd ended with exit code $code"
}

count_processes() {
    local entry left=0
    for entry in "${tracked[@]}"; do
        # shellcheck disable=SC2086
        if alive $entry; then
            left=$((left + 1))
        fi
    done
    echo "$left"
}

work=$(mktemp -d "${TMPDIR:-/tmp}/mok-demo.XXXXXX")
build_all
say "built"
install_programs
write_config
"$build/daemon/mokd/mokd" --config "$work/mokd.conf" --check-config >/dev/null || die "mokd refuses its configuration"
shared_before=$(shared_files)
start_mokd
say "mokd runs as process $mokd_pid with two host devices"
descriptors_before=$(descriptors)

phase="training two jobs at the same time"
run_job alice $first_uid --job alice --seed 1
run_job bob $second_uid --job bob --seed 2 --text /usr/share/common-licenses/Apache-2.0 --shared-expert --recompute \
    --micro-batches 4
watch_jobs alice bob
check_loss alice
check_loss bob
say "both jobs have trained, each loss fell by more than $margin"

phase="repeat of alice, and alice in MXFP8"
run_job alice-again $first_uid --job alice --seed 1 --quiet
run_job alice-mxfp8 $first_uid --job alice-mxfp8 --seed 1 --quiet --precision mxfp8
watch_jobs alice-again alice-mxfp8
check_repeat alice alice-again
distance=$(curve_distance alice alice-mxfp8)
check_mxfp8 "$distance"
say "alice has trained once more, and in MXFP8"

phase="looking for what was left behind"
left_descriptors=$(settle_descriptors "$descriptors_before")
stop_mokd
left_processes=$(count_processes)
left_files=$(find "$work/run" -mindepth 1 | wc -l)
left_files=$((left_files + $(comm -13 <(echo "$shared_before") <(shared_files) | wc -l)))
say "mokd has stopped"

tail -n 1 "$work/alice/out"
tail -n 1 "$work/bob/out"
tail -n 1 "$work/alice-mxfp8/out"
echo "mxfp8: loss curve within $distance % of bf16"
echo "repeat of alice: bitwise identical"
echo "left behind: $left_processes processes, $left_files files, $left_descriptors descriptors"
phase="checking what was left behind"
[[ $left_processes -eq 0 && $left_files -eq 0 && $left_descriptors -eq 0 ]] || die "something was left behind"
echo "DEMO OK"
