#!/usr/bin/env bash
# Measures the host engine on this machine: writes tests/bench/results/*.jsonl and prints tables of them.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() {
    cat <<'EOF'
Usage: tests/bench/run.sh [--update-readme] [BUILD_DIR]
Measures the host engine on this machine; takes some minutes, and other programs disturb it. Writes
tests/bench/results/*.jsonl and prints the tables. BUILD_DIR: build/release unless given.
  --update-readme   put the tables into README.md
EOF
}

build=build/release
tables=--print
for argument in "$@"; do
    case "$argument" in
    --update-readme) tables= ;;
    --help)
        usage
        exit 0
        ;;
    -*)
        echo "run.sh: unknown option $argument" >&2
        usage >&2
        exit 2
        ;;
    *) build=$argument ;;
    esac
done
bench=$build/tests/bench/mok-bench
[ -x "$bench" ] || { echo "no $bench: cmake --preset release && cmake --build --preset release" >&2; exit 1; }
export MOK_BUILD_DIR=$build OPENBLAS_NUM_THREADS=1
MOK_COMMIT=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
export MOK_COMMIT
out=tests/bench/results
mkdir -p "$out"
"$bench" queue --json > "$out/queue.jsonl"
"$bench" metrics --json > "$out/metrics.jsonl"
"$bench" crowd --json > "$out/crowd.jsonl"
{
    "$bench" layer --json
    "$bench" layer --ep 2 --shape h1024-i2048 --json
} > "$out/layer-host.jsonl"
{
    "$bench" layer --peer plain --json
    "$bench" layer --peer plain --ep 2 --json
    "$bench" layer --peer plain --ep 2 --routing hot-rank --shape h512-i1408 --json
} > "$out/plain-host.jsonl"
"$bench" engine --json > "$out/sweep-host.jsonl"
"$bench" engine --sweep comm --threads 2 --json >> "$out/sweep-host.jsonl"
"$bench" restart --json > "$out/restart.jsonl"
"$bench" mesh --json > "$out/mesh.jsonl"
"$bench" sim --rounds 10 --json > "$out/sim-rack.jsonl"
"$bench" sim --groups --json > "$out/sim-groups.jsonl"
"$bench" rack --json > "$out/rack.jsonl"
dump=$(mktemp)
trap 'rm -f "$dump"' EXIT
tests/bench/with_mokd.sh "$build" "$build/client/examples/train_moe_lm" --ranks 1 --devices 0 --quiet --dump "$dump"
"$bench" mxfp8 --dump "$dump" --json | sed "s|$dump|FILE|" > "$out/mxfp8.jsonl"
# shellcheck disable=SC2086
tests/bench/tables.py $tables
