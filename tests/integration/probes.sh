#!/usr/bin/env bash
# The worker's probes are in the program, with their provider and four arguments each. Usage: probes.sh BUILD_DIR
set -euo pipefail
notes=$(readelf -n "$1/daemon/worker/mok-worker")
if ! grep -q stapsdt <<< "$notes"; then
    [[ -e /usr/include/sys/sdt.h || -n $(find /usr/include -path '*/sys/sdt.h' -print -quit) ]] || { echo "skipped: no sys/sdt.h here"; exit 77; }
    echo "FAILED: sys/sdt.h is here, and the worker has no probes"
    exit 1
fi
for probe in op_submit op_start op_finish; do
    block=$(grep -A3 'Provider: mok' <<< "$notes" | grep -A3 "Name: $probe\$" || true)
    arguments=$(grep -o '[0-9]*@' <<< "$block" | wc -l)
    [[ $arguments -ge 4 ]] || { echo "FAILED: mok:$probe has $arguments arguments"; exit 1; }
done
echo OK
