#!/usr/bin/env bash
# The status page in a browser: it shows the devices, a job and its experts' load, in light and dark, and loads nothing
# that is not mokd's own.
set -euo pipefail
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
[[ $chromium ]] || { echo "SKIPPED: no chromium (Debian package chromium)"; exit 77; }
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/mokd_on_port.sh"

browse() {
    timeout 90 "$chromium" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
        --user-data-dir="$dir/profile" --hide-scrollbars --window-size=1280,1500 --enable-logging=stderr \
        "$@" "http://127.0.0.1:$port/" 2> "$dir/browser"
}

# The page as it is after a few looks at mokd. A loaded machine may take its time to draw even one.
dump() {
    for _ in 1 2 3; do
        browse --virtual-time-budget=7000 --dump-dom > "$dir/dom" || true
        grep -q 'data-looks=' "$dir/dom" && return 0
    done
    tail -5 "$dir/browser" >&2
    fail "the page never showed what mokd said"
}

shows() {
    grep -qE "$1" "$dir/dom" || fail "the page does not show $1"
}

start_mokd
dump
shows 'all 2 devices are up'
shows 'No job is connected'
shows 'No layer is open'

# A job of two ranks that goes on, and a worker that died: an error that is worth showing.
"$build/client/examples/train_moe_lm" --ranks 2 --devices 0,1 --text "${MOK_SOURCE_DIR:?}/README.md" --steps 1000000 \
    > "$dir/train" 2>&1 &
job=$!
for _ in $(seq 300); do
    grep -q 'step 10/' "$dir/train" && break
    sleep 0.1
done
dump
shows '<th scope="row"[^>]*>host0</th>'
shows '<caption>[^<]*Busy'
shows 'train_moe_lm · layer 0 · rank 1'
shows 'role="img" aria-label="[0-9]+ experts; most: expert'
shows '<html lang="en">'
grep -q 'WWWWWWWW' "$dir/dom" && fail "the page's word was not filled in"
grep -Eq 'Refused to|violates the following Content Security Policy|Uncaught' "$dir/browser" &&
    fail "the browser complains: $(grep -E 'Refused to|violates|Uncaught' "$dir/browser" | head -3)"
for scheme in 0 1; do # dark, light
    browse --virtual-time-budget=2500 --blink-settings=preferredColorScheme=$scheme --screenshot="$dir/shot$scheme.png" > /dev/null || true
    [[ -s $dir/shot$scheme.png ]] || fail "no picture of scheme $scheme"
    [[ ${MOK_TEST_SHOTS-} ]] && cp "$dir/shot$scheme.png" "$MOK_TEST_SHOTS/"
done
cmp -s "$dir/shot0.png" "$dir/shot1.png" && fail "dark and light look the same"

kill "$job" && wait "$job" || true
kill -KILL "$(pgrep -P "$mokd" -f 'mok-worker:host1')" || fail "no worker to kill"
for _ in $(seq 100); do
    get /status.json '*/*' | grep -q 'worker lost' && break
    sleep 0.1
done
dump
shows 'worker lost'
shows 'was ended by signal 9'
echo OK
