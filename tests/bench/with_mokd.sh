#!/usr/bin/env bash
# Runs a command beside a mokd with one host device of its own. Usage: with_mokd.sh BUILD_DIR COMMAND...
set -euo pipefail
build=$1
shift
dir=$(mktemp -d)
export MOK_SOCKET=$dir/mokd.sock
printf '[daemon]\nsocket = %s\n[device host0]\nthreads = 1\n' "$MOK_SOCKET" > "$dir/mokd.conf"
"$build/daemon/mokd/mokd" --config "$dir/mokd.conf" --runtime-dir "$dir" 2> "$dir/log" &
mokd=$!
trap 'kill "$mokd" 2> /dev/null || true; wait "$mokd" || true; rm -rf "$dir"' EXIT
for _ in $(seq 100); do
    "$build/client/mokctl" devices > /dev/null 2>&1 && break
    sleep 0.1
done
"$@"
