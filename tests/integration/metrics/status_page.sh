#!/usr/bin/env bash
# The status page in a browser: see status_page.py.
set -euo pipefail
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
[[ $chromium ]] || { echo "SKIPPED: no chromium (Debian package chromium)"; exit 77; }
command -v python3 > /dev/null || { echo "SKIPPED: no python3"; exit 77; }
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/mokd_on_port.sh"
start_mokd
PYTHONDONTWRITEBYTECODE=1 python3 "$here/status_page.py" "$chromium" "$port" "$dir" "$mokd" || {
    grep -v -e dbus -e 'VERBOSE' "$dir/profile/browser.log" | tail -5 >&2 || true
    fail "the page"
}
