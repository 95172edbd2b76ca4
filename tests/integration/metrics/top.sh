#!/usr/bin/env bash
# mokctl top on a terminal, which a program plays: see top_screen.py.
set -euo pipefail
command -v python3 > /dev/null || { echo "SKIPPED: no python3"; exit 77; }
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/mokd_on_port.sh"
start_mokd
"$build/client/examples/train_moe_lm" --ranks 2 --devices 0,1 --text "${MOK_SOURCE_DIR:?}/README.md" --steps 1000000 \
    > "$dir/train" 2>&1 &
job=$!
for _ in $(seq 300); do
    grep -q 'step  *[0-9]' "$dir/train" && break
    sleep 0.1
done
python3 "$here/top_screen.py" "$build/client/mokctl" "$MOK_SOCKET" "$mokd" || fail "the screen"
mokd=
kill "$job" 2> /dev/null || true # it may have ended with mokd
wait "$job" || true
