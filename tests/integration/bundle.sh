#!/usr/bin/env bash
# mokctl bundle over a running mokd with a job: the archive has what a bug report needs, and none of the secrets that
# were planted in configuration, log, unit, and in the tensors of the job.
# usage: bundle.sh BUILD_DIR
set -euo pipefail
build=$1
dir=$(mktemp -d /tmp/mok-bundle-XXXXXX)
pids=()
cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$dir"
}
trap cleanup EXIT
fail() { echo "FAILED: $*"; exit 1; }

curve='rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7' # 40 characters, as those of the rack
cat >"$dir/mokd.conf" <<CONF
[daemon]
socket = $dir/mokd.sock
[device host0]
CONF
cp "$dir/mokd.conf" "$dir/shown.conf"
cat >>"$dir/shown.conf" <<CONF
; key = planted-commented-key
password = planted-password with words
public = $curve
CONF
printf '%s\n' "planted-key-file $curve" >"$dir/rack.key"
chmod 600 "$dir/rack.key"

# The programs that are asked, with secrets in what they say.
mkdir "$dir/bin"
cat >"$dir/bin/journalctl" <<SAY
#!/bin/sh
echo "2026-11-29T20:00:00 n1 mokd[1]: rack: peer n2 key=planted-log-key sent $curve"
echo "2026-11-29T20:00:01 n1 mokd[1]: session: resume token=planted-log-token job=train"
SAY
cat >"$dir/bin/systemctl" <<SAY
#!/bin/sh
echo "Environment=API_TOKEN=planted-unit-token"
SAY
chmod +x "$dir/bin/"*

"$build/daemon/mokd/mokd" --config "$dir/mokd.conf" >"$dir/log" 2>&1 &
pids+=($!)
export MOK_SOCKET=$dir/mokd.sock PATH=$dir/bin:$PATH
for _ in $(seq 400); do "$build/client/mokctl" status >/dev/null 2>&1 && break; sleep 0.05; done
"$build/tests/integration/bundle-job" planted-tensor >"$dir/job" &
pids+=($!)
for _ in $(seq 400); do grep -q ready "$dir/job" && break; sleep 0.05; done
grep -q ready "$dir/job" || fail "the job did not start"

"$build/client/mokctl" bundle --out "$dir/b.tar.gz" --config "$dir/shown.conf" >"$dir/said" ||
    fail "bundle: $(cat "$dir/said")"
mkdir "$dir/x"
tar -xzf "$dir/b.tar.gz" -C "$dir/x"
[ "$(stat -c %a "$dir/b.tar.gz")" = 600 ] || fail "others may read the archive"
for name in versions.json doctor.json status.json mokd.conf log.txt unit.txt cpu.txt memory.txt os.txt mokd-limits.txt; do
    [ -s "$dir/x"/*/"$name" ] || fail "$name is missing"
done
if grep -rnaE 'planted|rq:rM' "$dir/x"; then fail "secrets are in the archive"; fi
for name in versions doctor status; do
    python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$dir/x"/*/$name.json || fail "$name.json is none"
done
# and what is of use is there
grep -q '"job":.*"bundle-job"' "$dir/x"/*/status.json || fail "the job is not in the status"
grep -q "socket = $dir/mokd.sock" "$dir/x"/*/mokd.conf || fail "the configuration is not there"
grep -q 'session: resume' "$dir/x"/*/log.txt || fail "the log is not there"
"$build/client/mokctl" bundle --out "$dir/d.tar" >/dev/null || fail "no archive without --config"
mkdir "$dir/y"
tar -xf "$dir/d.tar" -C "$dir/y"
grep -q "socket = $dir/mokd.sock" "$dir/y"/*/mokd.conf || fail "not the configuration that mokd reads"
"$build/client/mokctl" bundle --out "$dir/b.tar.gz" 2>"$dir/said" && fail "an archive was overwritten"
grep -q 'File exists' "$dir/said" || fail "said: $(cat "$dir/said")"
# without mokd there is one too
kill "${pids[0]}" && wait "${pids[0]}" || true
"$build/client/mokctl" bundle --out "$dir/c.tar" --config "$dir/shown.conf" >/dev/null || fail "no archive without mokd"
tar -tf "$dir/c.tar" >"$dir/list" # not through a pipe: grep -q leaves before tar has ended
grep -q doctor.json "$dir/list" || fail "an archive without doctor"
echo OK
