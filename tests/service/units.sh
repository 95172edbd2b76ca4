#!/usr/bin/env bash
# The units are what systemd takes without a word, protected to the degree that we say.
# usage: units.sh BUILD_DIR SOURCE_DIR
set -euo pipefail
build=$1 source=$2
command -v systemd-analyze >/dev/null || { echo "no systemd-analyze here"; exit 77; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export LC_ALL=C

# Programs where this machine has them; the GPU vendor's are the vendor's to install.
printf '#!/bin/sh\n' >"$tmp/nvidia-cuda-mps-control"
chmod 755 "$tmp/nvidia-cuda-mps-control"
for unit in mokd.service mokd.socket mokd-admin.socket mok-mps@.service; do
    sed -e "s|^ExecStart=.*/mokd\$|ExecStart=$build/daemon/mokd/mokd|" \
        -e "s|^ExecStart=nvidia-cuda-mps-control|ExecStart=$tmp/nvidia-cuda-mps-control|" \
        -e 's|^Documentation=man:.*||' "$build/deploy/systemd/$unit" >"$tmp/$unit"
done
cp "$tmp/mok-mps@.service" "$tmp/mok-mps@0.service"

# said WHAT FILE...: systemd-analyze verify has nothing to say.
verify() {
    local what=$1 said
    shift
    said=$(SYSTEMD_UNIT_PATH="$tmp:/usr/lib/systemd/system:/lib/systemd/system" systemd-analyze verify --man=no "$@" 2>&1) ||
        { echo "$what: $said"; exit 1; }
    [ -z "$said" ] || { echo "$what: $said"; exit 1; }
}
verify units "$tmp/mokd.service" "$tmp/mokd.socket" "$tmp/mokd-admin.socket" "$tmp/mok-mps@0.service"

# exposure FILE: tenths of a point, as systemd-analyze security gives them.
exposure() {
    systemd-analyze security --offline=true --no-pager "$1" | grep -oE 'exposure level.*: [0-9.]+' | grep -oE '[0-9.]+$' | tr -d .
}
plain=$(exposure "$tmp/mokd.service")
echo "mokd.service: exposure $plain tenths"
[ "$plain" -le 30 ] || { systemd-analyze security --offline=true --no-pager "$tmp/mokd.service"; exit 1; }

# With the drop-in for GPUs: still valid, and what it opens is what it says.
mkdir "$tmp/mokd.service.d"
cp "$source/deploy/systemd/mokd-cuda.conf" "$tmp/mokd.service.d/"
verify "units with mokd-cuda.conf" "$tmp/mokd.service"
cuda=$(exposure "$tmp/mokd.service")
echo "mokd.service with mokd-cuda.conf: exposure $cuda tenths"
[ "$cuda" -le 50 ]

# Every exception has its reason: a line that loosens something stands under a comment, or under the one line that does.
awk '/^\[/ { next } /^#/ { said = 2; next } /^$/ { said = 0; next }
    said-- <= 0 { print FILENAME ": no reason above " $0; bad = 1 } END { exit bad }' "$tmp/mokd.service.d/mokd-cuda.conf"
