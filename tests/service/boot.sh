#!/usr/bin/env bash
# The packages, installed on a Debian that really booted: what an operator and three users of his see. The machine is a
# root of debootstrap's, started by systemd-nspawn without a network; it is kept for the next run in
# /var/cache/mok-test.
# usage: boot.sh SOURCE_DIR PACKAGE_BUILD_DIR
set -euo pipefail
source=$1 build=$2 tests=$MOK_BUILD_DIR/tests/service
cache=${MOK_TEST_CACHE:-/var/cache/mok-test}
export LC_ALL=C

skip() { echo "skipped: $*"; exit 77; }
[ "$(id -u)" -eq 0 ] || skip "only root can boot a machine"
for tool in debootstrap systemd-nspawn nsenter; do
    command -v $tool >/dev/null || skip "no $tool here"
done
debs=("$build"/packages/*.deb)
[ -f "${debs[0]}" ] || skip "the packages were not made"

tmp=$(mktemp -d)
root=$tmp/root machine= leader=

clean() {
    local code=$?
    if [ $code -ne 0 ] && [ $code -ne 77 ] && [ -n "$leader" ]; then
        in_machine journalctl --no-pager -u 'mok*' -n 60 || true
        in_machine systemctl status --no-pager --lines=0 mokd.service mokd.socket || true
        cat "$tmp/failed" 2>/dev/null || true
    fi
    if [ -n "$machine" ]; then
        kill -RTMIN+4 "$leader" 2>/dev/null || true # systemd's power off
        for _ in $(seq 100); do
            kill -0 "$machine" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$machine" 2>/dev/null || true
        wait "$machine" 2>/dev/null || true
    fi
    umount "$root" 2>/dev/null || true
    rm -rf --one-file-system "$tmp"
}
trap clean EXIT

say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }
fail() { echo "FAILED: $*" | tee "$tmp/failed"; exit 1; }
in_machine() { nsenter -t "$leader" -a env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C HOME=/root "$@"; }
as() { # USER COMMAND...
    local user=$1
    shift
    in_machine runuser -u "$user" -- env HOME=/tmp "$@"
}
# until_true SECONDS COMMAND...: tries ten times a second.
until_true() {
    local tries=$(($1 * 10))
    shift
    for _ in $(seq "$tries"); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    return 1
}
property() { in_machine systemctl show --value -p "$1" "${2-mokd.service}"; }
status_says() { [[ $(property StatusText) == *"$1"* ]]; }
# No early end of a pipe's reader, which its writer would take for a failure.
journal_says() { in_machine journalctl --no-pager -o cat -u mokd.service | grep -E -- "$1" >/dev/null; }
worker_pid() { as alice mokctl --json devices | awk -F '[:,]' '/"worker_pid"/ && !n++ { print $2 + 0 }'; }
other_pid() { # FUNCTION OLD: another process is there now
    local now
    now=$($1 2>/dev/null) && [ -n "$now" ] && [ "$now" != 0 ] && [ "$now" != "$2" ]
}
main_pid() { property MainPID; }
version() { in_machine mokctl version | awk '/^mokd/ { sub(",", ""); print $2 }'; }
trained() { grep -qE 'step +[0-9]*[3-9]' "$tmp/bob.log"; }
# other_build VERSION [LINE]: the package of mokd that another build of it makes, in /mok/VERSION of the machine. Its
# configuration ends with the line.
other_build() {
    local into=$tmp/deb
    dpkg-deb -R "$build"/packages/mokd_*.deb "$into"
    [ $# -eq 1 ] || echo "$2" >>"$into/etc/mok/mokd.conf"
    strip -o "$into/usr/bin/mokd" "$tests/mokd-$1"
    strip -o "$into/usr/libexec/mok/mok-worker" "$tests/mok-worker-$1"
    sed -i "s/^Version: .*/Version: $1-1/" "$into/DEBIAN/control"
    rm "$into/DEBIAN/md5sums"
    mkdir "$root/mok/$1"
    dpkg-deb --root-owner-group -Znone -b "$into" "$root/mok/$1/mokd.deb" >/dev/null
    rm -r "$into"
}
install() { in_machine sh -c "dpkg -i $*" >"$tmp/install.log" 2>&1 || fail "dpkg -i $*: $(cat "$tmp/install.log")"; }
drop_in() { # TEXT: of mokd.service; none: away with it
    in_machine mkdir -p /etc/systemd/system/mokd.service.d
    if [ $# -gt 0 ]; then
        printf '%s\n' "$1" >"$root/etc/systemd/system/mokd.service.d/test.conf"
    else
        rm -r "$root/etc/systemd/system/mokd.service.d"
    fi
    in_machine systemctl daemon-reload
}

# ------------------------------------------------------------------ a machine

# What the packages need, so that dpkg alone can install them.
wanted=$(for deb in "${debs[@]}"; do dpkg-deb -f "$deb" Depends; done | tr ',' '\n' | sed 's/|.*//; s/(.*//; s/ //g' |
    grep -v '^libmok' | sort -u | paste -sd,)
base=$cache/root-$(sha256sum <<<"bookworm $wanted" | cut -c 1-16)
if ! [ -d "$base" ]; then
    say "making a root: $wanted"
    mkdir -p "$cache"
    rm -rf --one-file-system "$cache"/root-* "$cache"/making-*
    making=$(mktemp -d "$cache/making-XXXXXX")
    if ! debootstrap --variant=minbase --include="systemd,systemd-sysv,dbus,procps,util-linux,$wanted" bookworm \
        "$making" >"$tmp/debootstrap.log" 2>&1; then
        tail -n 5 "$tmp/debootstrap.log"
        rm -rf --one-file-system "$making"
        skip "no root could be made: is there a server of Debian packages?"
    fi
    chmod 755 "$making"
    rm -rf "$making"/var/cache/apt/archives/*.deb
    mv "$making" "$base"
fi

mkdir "$root" "$tmp/upper" "$tmp/work"
mount -t overlay overlay -o "lowerdir=$base,upperdir=$tmp/upper,workdir=$tmp/work" "$root" 2>/dev/null ||
    cp -a "$base/." "$root"
mkdir "$root/mok"
cp "${debs[@]}" "$build/client/examples/train_moe_lm" "$build/client/examples/two_ranks" "$source/README.md" "$root/mok/"
# The example's own arithmetic, which no package of ours needs.
mkdir "$root/mok/lib"
ldd "$build/client/examples/train_moe_lm" | awk '/openblas|gfortran|quadmath/ { print $3 }' |
    xargs -r cp -L --target-directory="$root/mok/lib"
echo mok-test >"$root/etc/hostname"

say "booting"
systemd-nspawn --quiet --directory="$root" --boot --register=no --keep-unit --private-network --console=pipe \
    --link-journal=no </dev/null >"$tmp/console.log" 2>&1 &
machine=$!
find_leader() { leader=$(pgrep -P "$machine" | head -n 1) && [ -n "$leader" ] && [ -d "/proc/$leader" ]; }
until_true 20 find_leader || skip "systemd-nspawn does not start here: $(tail -n 3 "$tmp/console.log")"
find_leader
booted() { [[ $(in_machine systemctl is-system-running 2>/dev/null) =~ ^(running|degraded)$ ]]; }
until_true 60 booted || skip "systemd does not come up here: $(tail -n 3 "$tmp/console.log")"

# ------------------------------------------------------------------ installation

say "installing"
install '/mok/*.deb'
grep -q "installed, not started" "$tmp/install.log" || fail "nobody says how to start it"
! in_machine systemctl --quiet is-active mokd.service || fail "installing started the service"
in_machine id mokd | grep '(mok)' >/dev/null || fail "mokd is no member of mok"
for user in alice bob carol; do in_machine useradd "$user"; done
for user in alice bob; do in_machine usermod -aG mok "$user"; done
sed -i -e 's/^worker_timeout = .*/worker_timeout = 4/' -e 's/^log_level = .*/log_level = info/' "$root/etc/mok/mokd.conf"

say "systemctl enable --now mokd"
in_machine systemctl --quiet enable --now mokd || fail "enable --now"
[ "$(property ActiveState)" = active ] || fail "not active"
status_says "Serving: 2 of 2 devices up" || fail "status at READY: $(property StatusText)"
in_machine systemctl --quiet is-enabled mokd.service mokd.socket mokd-admin.socket || fail "not enabled"
[ "$(in_machine ps -o user= -p "$(main_pid)")" = mokd ] || fail "mokd runs as somebody else"
in_machine grep -q '^CapEff:.*0000000000000000$' "/proc/$(main_pid)/status" || fail "mokd has capabilities"
exposure=$(in_machine systemd-analyze security --no-pager mokd.service | grep -oE 'exposure level.*: [0-9.]+' |
    grep -oE '[0-9.]+$' | tr -d .)
[ "$exposure" -le 30 ] || fail "exposure $exposure tenths"

say "a second mokd, by hand, takes nothing from the first"
code=0
second=$(in_machine timeout 20 mokd 2>&1) || code=$?
[ $code -eq 1 ] && [[ $second == *"somebody serves /run/mok/mokd.sock already"* ]] ||
    fail "a second mokd: exit $code: $second"

say "who may, and who may not"
as alice mokctl status >/dev/null || fail "alice, of group mok, cannot look"
code=0
refusal=$(as carol mokctl status 2>&1) || code=$?
[ $code -eq 3 ] || fail "carol, not of group mok: exit $code: $refusal"
grep -qi "permission" <<<"$refusal" || fail "carol is not told why: $refusal"
code=0
in_machine runuser -u alice -- mokctl --socket /run/mok/mokd-admin.sock status >/dev/null 2>&1 || code=$?
[ $code -eq 3 ] || fail "alice came through the administrators' door"
in_machine mokctl --socket /run/mok/mokd-admin.sock status >/dev/null || fail "root did not"
! as alice mokctl drain host0 >"$tmp/drain.log" 2>&1 || fail "alice drained a device"
grep -q "no administrator" "$tmp/drain.log" || fail "alice is not told why: $(cat "$tmp/drain.log")"
in_machine mokctl --socket /run/mok/mokd-admin.sock drain host0 || fail "drain"
in_machine mokctl --socket /run/mok/mokd-admin.sock undrain host0 || fail "undrain"

# ------------------------------------------------------------------ jobs

say "jobs of two users"
train() { as "$1" env LD_LIBRARY_PATH=/mok/lib OPENBLAS_NUM_THREADS=1 "OPENBLAS_CORETYPE=${OPENBLAS_CORETYPE-}" \
    /mok/train_moe_lm --ranks 2 --devices 0,1 --text /mok/README.md --steps "$2"; }
train bob 6 >"$tmp/bob.log" 2>&1 &
bob=$!
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 || fail "two_ranks of alice: $(cat "$tmp/alice.log")"
wait $bob || fail "training of bob: $(tail -n 5 "$tmp/bob.log")"

say "a program built with the installed headers"
lib=$(dirname "$(find "$root/usr/lib" -name libmok.so | head -n 1)")
mkdir "$tmp/user"
cp "$source/client/examples/two_ranks.c" "$tmp/user/"
cat >"$tmp/user/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES C)
find_package(mok 0.1 REQUIRED)
add_executable(by_cmake two_ranks.c)
target_link_libraries(by_cmake PRIVATE mok::mok m)
CMAKE
cmake -G Ninja -S "$tmp/user" -B "$tmp/user/build" -DCMAKE_PREFIX_PATH="$root/usr" -DCMAKE_SKIP_RPATH=ON \
    >"$tmp/cmake.log" 2>&1 && ninja -C "$tmp/user/build" >>"$tmp/cmake.log" 2>&1 ||
        fail "CMake: $(tail -n 5 "$tmp/cmake.log")"
# shellcheck disable=SC2046
cc -o "$tmp/user/by_pkg_config" "$tmp/user/two_ranks.c" \
    $(PKG_CONFIG_LIBDIR=$lib/pkgconfig pkg-config --cflags --libs mok) -lm || fail "pkg-config"
cp "$tmp/user/build/by_cmake" "$tmp/user/by_pkg_config" "$root/mok/"
for program in by_cmake by_pkg_config; do
    as alice "/mok/$program" >"$tmp/$program.log" 2>&1 || fail "$program: $(cat "$tmp/$program.log")"
done

# ------------------------------------------------------------------ the service's life

say "reload"
before=$(main_pid)
cp "$root/etc/mok/mokd.conf" "$tmp/mokd.conf"
printf '[limits]\nsessions = many\n' >>"$root/etc/mok/mokd.conf"
in_machine systemctl reload mokd
until_true 10 status_says "configuration not read again" || fail "a bad configuration: $(property StatusText)"
cp "$tmp/mokd.conf" "$root/etc/mok/mokd.conf"
in_machine systemctl reload mokd
good() { ! status_says "not read again"; }
until_true 10 good || fail "a good configuration: $(property StatusText)"
[ "$(main_pid)" = "$before" ] || fail "reloading replaced mokd"

say "a stopped worker is noticed and cured"
worker=$(worker_pid)
in_machine kill -STOP "$worker"
until_true 30 other_pid worker_pid "$worker" || fail "worker $worker stands still for good"
[ "$(main_pid)" = "$before" ] || fail "systemd had to act"
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 || fail "two_ranks after that: $(cat "$tmp/alice.log")"

say "kill -9, an upgrade and a downgrade under a training job"
other_build 0.1.1 '# A line that is new.'
train bob 100000 >"$tmp/bob.log" 2>&1 &
bob=$!
until_true 60 trained || fail "bob does not train: $(tail -n 5 "$tmp/bob.log")"
in_machine mokctl status >"$tmp/status"
grep -q 'over a restart: 2 sessions go on (0 away)' "$tmp/status" || fail "what outlives mokd: $(cat "$tmp/status")"
steps() { grep -c 'step' "$tmp/bob.log" || true; }
bob_goes_on() {
    local reached
    reached=$(steps)
    more() { [ "$(steps)" -gt $((reached + 2)) ]; }
    until_true 60 more || fail "bob stands still: $(tail -n 5 "$tmp/bob.log")"
}
# The manager reads its units again, and is itself run again: neither mokd nor the job notices, and what it keeps stays.
kept=$(property NFileDescriptorStore)
[ "$kept" -gt 0 ] || fail "systemd keeps no descriptors"
in_machine systemctl daemon-reload
in_machine systemctl daemon-reexec
until_true 20 booted || fail "systemd does not come back from daemon-reexec"
[ "$(main_pid)" = "$before" ] || fail "daemon-reload replaced mokd"
[ "$(property NFileDescriptorStore)" = "$kept" ] ||
    fail "daemon-reload took descriptors: $kept, now $(property NFileDescriptorStore)"
bob_goes_on
in_machine kill -KILL "$before"
until_true 20 other_pid main_pid "$before" || fail "mokd did not come back"
until_true 20 status_says "Serving: 2 of 2 devices up" || fail "back, but: $(property StatusText)"
journal_says 'state: sessions of the mokd before.* sessions=[1-9]' || fail "mokd came back without sessions"
before=$(main_pid) was=$(version)
# Unattended, and the package's configuration is another now: the operator's stays, with the package's beside it.
keep='--force-confdef --force-confold'
install "$keep" /mok/0.1.1/mokd.deb
cmp -s "$root/etc/mok/mokd.conf" "$tmp/mokd.conf" || fail "an upgrade took what the operator had written"
grep -q '^worker_timeout = 4' "$root/etc/mok/mokd.conf" || fail "nothing had been written"
grep -q '^# A line that is new' "$root/etc/mok/mokd.conf.dpkg-dist" ||
    fail "the new configuration is not there to compare with"
[ "$(main_pid)" = "$before" ] && [ "$(version)" = "$was" ] || fail "an upgrade restarted mokd"
grep -q "systemctl restart mokd" "$tmp/install.log" || fail "an upgrade does not say what is left to do"
in_machine systemctl restart mokd || fail "restart"
[ "$(version)" = 0.1.1 ] || fail "upgraded, but $(version) runs"
journal_says "state: sessions of the mokd before.* sessions=2 of=2 .*version=$was" || fail "the upgrade lost sessions"
bob_goes_on
install "$keep" '/mok/mokd_*.deb'
in_machine systemctl restart mokd || fail "restart"
[ "$(version)" = "$was" ] || fail "downgraded, but $(version) runs"
journal_says "state: sessions of the mokd before.* sessions=2 of=2 .*version=0.1.1" ||
    fail "the downgrade lost sessions"
bob_goes_on
in_machine pkill -TERM -o -u bob train_moe_lm
code=0
wait $bob || code=$?
[ $code -eq 130 ] || fail "training of bob over kill -9, upgrade and downgrade: exit $code: $(tail -n 5 "$tmp/bob.log")"
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 || fail "two_ranks after that: $(cat "$tmp/alice.log")"

say "a build that cannot read what this one leaves, and back"
other_build 0.2.0
train bob 100000 >"$tmp/bob.log" 2>&1 &
bob=$!
until_true 60 trained || fail "bob does not train: $(tail -n 5 "$tmp/bob.log")"
install /mok/0.2.0/mokd.deb
in_machine systemctl restart mokd || fail "restart"
! wait $bob || fail "bob trained on without his session"
journal_says 'state: not used.*MOK_EVERSION.*format 1: this mokd knows 2' || fail "nobody says why sessions ended"
grep -q MOK_E "$tmp/bob.log" || fail "bob is not told: $(tail -n 5 "$tmp/bob.log")"
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 || fail "two_ranks after that: $(cat "$tmp/alice.log")"
# The package has changed and mokd has not been restarted: a worker that dies now is followed by one of the new package.
install '/mok/mokd_*.deb'
worker=$(worker_pid)
in_machine kill -KILL "$worker"
until_true 20 other_pid worker_pid "$worker" || fail "no worker follows"
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 ||
    fail "two_ranks with a worker of another build: $(cat "$tmp/alice.log")"
in_machine systemctl restart mokd || fail "restart"
journal_says 'state: not used.*MOK_EVERSION.*format 2: this mokd knows 1' || fail "nobody says why there is no state"
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 || fail "two_ranks after that: $(cat "$tmp/alice.log")"

say "a device that is slow to start"
cat >"$root/mok/slow-worker" <<'SH'
#!/bin/sh
sleep 6
exec /usr/libexec/mok/mok-worker
SH
chmod 755 "$root/mok/slow-worker"
sed -i 's|^;worker = .*|worker = /mok/slow-worker|' "$root/etc/mok/mokd.conf"
drop_in $'[Service]\nTimeoutStartSec=3'
in_machine systemctl restart mokd || fail "killed while its devices started: $(property Result)"
status_says "Serving: 2 of 2 devices up" || fail "$(property StatusText)"
cp "$tmp/mokd.conf" "$root/etc/mok/mokd.conf"

say "mokd itself stands still: systemd's watchdog"
drop_in $'[Service]\nWatchdogSec=4'
in_machine systemctl restart mokd
before=$(main_pid)
in_machine kill -STOP "$before"
until_true 30 other_pid main_pid "$before" || fail "the watchdog did not bite"
until_true 20 status_says "Serving: 2 of 2 devices up" || fail "back, but: $(property StatusText)"

say "the units for GPUs, without one"
cat >"$root/usr/bin/nvidia-cuda-mps-control" <<'SH'
#!/bin/sh
# Plays NVIDIA's control daemon: writes down how it was started, and ends when it is told to quit.
said=$CUDA_MPS_LOG_DIRECTORY/said
if [ "$1" = -f ]; then
    echo "$(id -un) $* $CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES" >>"$said"
    echo $$ >"$CUDA_MPS_PIPE_DIRECTORY/pid"
    sleep 0.5
    mkfifo -m 666 "$CUDA_MPS_PIPE_DIRECTORY/control" && exec 3<>"$CUDA_MPS_PIPE_DIRECTORY/control"
    trap 'rm "$CUDA_MPS_PIPE_DIRECTORY/control"; exit 0' TERM
    while :; do sleep 0.05; done
fi
read -r command
echo "$command" >>"$said"
kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")"
SH
chmod 755 "$root/usr/bin/nvidia-cuda-mps-control"
in_machine systemctl start mok-mps@0
[ "$(property ActiveState mok-mps@0)" = inactive ] || fail "a control daemon for a GPU that is not there"
in_machine touch /dev/nvidia0
in_machine systemctl start mok-mps@0
in_machine test -p /run/mok-mps/0/control || fail "up before it answers: $(property ActiveState mok-mps@0)"
[ "$(in_machine stat -c '%a %U' /run/mok-mps/0)" = "755 root" ] || fail "nobody can open its pipes"
in_machine mkdir -p /etc/systemd/system/mokd.service.d
in_machine cp /usr/share/mok/mokd-cuda.conf /etc/systemd/system/mokd.service.d/
in_machine systemctl daemon-reload
printf '[device gpu0]\nkind = cuda\ncuda = 0\nmemory = 1G\nmps_pipe = /run/mok-mps/0\n' >>"$root/etc/mok/mokd.conf"
sed -i 's/^sharing = .*/sharing = mps/' "$root/etc/mok/mokd.conf"
for other in mok-mps@0.service modprobe@nvidia_uvm.service nvidia-fabricmanager.service; do
    [[ " $(property After) " == *" $other "* ]] || fail "mokd does not start after $other"
done
said=$(in_machine runuser -u mokd -- mokd --check-config 2>&1) || said="refused: $said"
if [ "$said" = OK ] || [[ $said != *"this build"* ]]; then
    in_machine systemctl restart mokd || fail "with mokd-cuda.conf: $(property Result)"
    status_says "Serving: 2 of 3 devices up" && status_says "gpu0 has failed" ||
        fail "a GPU that is not there: $(property StatusText)"
else
    cp "$tmp/mokd.conf" "$root/etc/mok/mokd.conf"
    in_machine systemctl restart mokd || fail "with mokd-cuda.conf: $(property Result)"
fi
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 || fail "two_ranks with mokd-cuda.conf: $(cat "$tmp/alice.log")"
before=$(property MainPID mok-mps@0)
in_machine kill -KILL "$before"
mps_pid() { property MainPID mok-mps@0; }
until_true 20 other_pid mps_pid "$before" || fail "nobody starts the control daemon again"
started='root -f -multiuser-server PCI_BUS_ID 0'
two_starts() { [ "$(cat "$root/var/log/mok-mps/0/said")" = "$started"$'\n'"$started" ]; }
until_true 10 two_starts || fail "the control daemon was started thus: $(cat "$root/var/log/mok-mps/0/said")"
until_true 10 in_machine systemctl --quiet is-active mok-mps@0 || fail "the next control daemon does not answer"
in_machine systemctl stop mok-mps@0
[ "$(tail -n 1 "$root/var/log/mok-mps/0/said")" = quit ] || fail "the control daemon is not told to quit"
[ "$(property Result mok-mps@0)" = success ] || fail "the control daemon ends: $(property Result mok-mps@0)"
cp "$tmp/mokd.conf" "$root/etc/mok/mokd.conf"

say "memory limit, descriptor limit, full disk"
drop_in
drop_in $'[Service]\nLimitNOFILE=200'
in_machine mount -t tmpfs -o size=64k,mode=0777 tmpfs /var/lib/mok
in_machine sh -c 'dd if=/dev/zero of=/var/lib/mok/full bs=1k count=128 2>/dev/null || true'
sed -i '0,/^;memory = .*/s//memory = 1M/' "$root/etc/mok/mokd.conf"
in_machine systemctl restart mokd || fail "does not start with few descriptors and a full disk"
! train alice 1 >"$tmp/alice.log" 2>&1 || fail "a layer in 1 MiB"
grep -q 'device host0 has 1048576 bytes' "$tmp/alice.log" ||
    fail "no word of the memory's bound: $(cat "$tmp/alice.log")"
cp "$tmp/mokd.conf" "$root/etc/mok/mokd.conf"
journal_says 'few descriptors.*LimitNOFILE' || fail "a low descriptor limit is not named"
as alice /mok/two_ranks >"$tmp/alice.log" 2>&1 || fail "two_ranks with a full disk: $(cat "$tmp/alice.log")"
drop_in
in_machine systemctl stop mokd 2>/dev/null
journal_says 'usage: cannot be written.*full' || fail "a full disk is not named"
in_machine umount /var/lib/mok
in_machine systemctl reset-failed mokd.service mokd.socket mokd-admin.socket

say "a connection starts mokd"
for socket in mokd.sock mokd-admin.sock; do
    [ "$(property ActiveState)" = inactive ] || fail "mokd runs though it was stopped"
    in_machine systemctl --quiet is-active mokd.socket mokd-admin.socket || fail "the sockets went with mokd"
    in_machine mokctl --socket "/run/mok/$socket" status >"$tmp/status" ||
        fail "nobody answers at $socket: $(cat "$tmp/status")"
    state=$(property ActiveState) # asked once: it may go from the one to the other
    [ "$state" = active ] || [ "$state" = activating ] || fail "who answered at $socket? mokd is $state"
    [ $socket = mokd-admin.sock ] || in_machine systemctl stop mokd 2>/dev/null
done
until_true 20 status_says "Serving: 2 of 2 devices up" || fail "started by a connection, but: $(property StatusText)"

# ------------------------------------------------------------------ the end

say "removing"
in_machine dpkg -P mok-tools libmok-dev libmok1 >"$tmp/install.log" 2>&1 || fail "dpkg -P: $(cat "$tmp/install.log")"
in_machine dpkg -r mokd >"$tmp/install.log" 2>&1 || fail "dpkg -r: $(cat "$tmp/install.log")"
! in_machine pgrep -u mokd >/dev/null || fail "left running: $(in_machine pgrep -au mokd)"
cmp -s "$root/etc/mok/mokd.conf" "$tmp/mokd.conf" || fail "removing took the configuration"
in_machine dpkg -P mokd >"$tmp/install.log" 2>&1 || fail "dpkg -P: $(cat "$tmp/install.log")"
left=$(in_machine find / -xdev \( -name 'mokd*' -o -name 'libmok*' -o -name 'mokctl*' \) -not -path '/mok/*' -not -path '/proc/*')
[ -z "$left" ] || fail "left behind: $left"
[ "$(in_machine systemctl is-system-running)" = running ] ||
    fail "failed units: $(in_machine systemctl --failed --no-legend)"
say "done"
