#!/usr/bin/env bash
# Measures the host engine on this machine, writes tests/bench/results/*.jsonl and the tables of README.md.
# Takes some minutes; close other programs. Usage: tests/bench/run.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build/release}
bench=$build/tests/bench/mok-bench
[ -x "$bench" ] || { echo "no $bench: cmake --preset release && cmake --build --preset release" >&2; exit 1; }
export MOK_BUILD_DIR=$build OPENBLAS_NUM_THREADS=1
MOK_COMMIT=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
export MOK_COMMIT
out=tests/bench/results
mkdir -p "$out"
"$bench" queue --json > "$out/queue.jsonl"
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
dump=$(mktemp)
trap 'rm -f "$dump"' EXIT
tests/bench/with_mokd.sh "$build" "$build/client/examples/train_moe_lm" --ranks 1 --devices 0 --quiet --dump "$dump"
"$bench" mxfp8 --dump "$dump" --json | sed "s|$dump|FILE|" > "$out/mxfp8.jsonl"
tests/bench/tables.py
