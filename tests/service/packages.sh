#!/usr/bin/env bash
# The Debian packages are made, hold what they say, depend on no GPU vendor's library, and lintian finds no error in
# them. A build that is for the whole machine makes its own packages; any other is not, so one is made below
# PACKAGE_BUILD_DIR.
# usage: packages.sh SOURCE_DIR PACKAGE_BUILD_DIR C_COMPILER
set -euo pipefail
source=$1 build=$2 cc=$3
for tool in dpkg-deb dpkg-shlibdeps lowdown; do
    command -v "$tool" >/dev/null || { echo "no $tool here"; exit 77; }
done

cd "$source"
log=$(mktemp)
if [ "$build" = "${MOK_BUILD_DIR-}" ]; then
    make_packages() { rm -rf "$build/packages" && cpack --config "$build/CPackConfig.cmake"; }
else
    make_packages() { cmake --preset package -B "$build" -DCMAKE_C_COMPILER="$cc" && ninja -C "$build" -j2 all package; }
fi
make_packages >"$log" 2>&1 || { tail -n 40 "$log"; exit 1; }
rm -f "$log"
debs=("$build"/packages/*.deb)
[ ${#debs[@]} -eq 4 ] || { echo "made: ${debs[*]}"; exit 1; }

fail() { echo "$*"; exit 1; }
deb() { echo "$build"/packages/"$1"_*.deb; }
holds() { # PACKAGE PATH...
    local list package=$1 path
    list=$(dpkg-deb -c "$(deb "$package")" | awk '{ print $6 }')
    shift
    for path; do
        grep -qE "^\.$path$" <<<"$list" || fail "$package lacks $path"
    done
}
holds mokd /usr/bin/mokd /usr/libexec/mok/mok-worker /etc/mok/mokd.conf '/usr/lib/systemd/system/mokd\.service' \
    /usr/lib/systemd/system/mokd.socket /usr/lib/systemd/system/mokd-admin.socket \
    /usr/lib/systemd/system/mok-mps@.service /usr/lib/sysusers.d/mok.conf /usr/lib/tmpfiles.d/mok.conf \
    /usr/share/man/man8/mokd.8.gz /usr/share/man/man5/mokd.conf.5.gz /usr/share/mok/mokd-cuda.conf
holds libmok1 '/usr/lib/[^/]*/libmok\.so\.1' '/usr/lib/[^/]*/libmok\.so\.1\.[0-9.]+'
holds libmok-dev /usr/include/mok/mok.h /usr/include/mok/types.h '/usr/lib/[^/]*/libmok\.so' '/usr/lib/[^/]*/pkgconfig/mok\.pc' \
    '/usr/lib/[^/]*/cmake/mok/mok-config\.cmake' /usr/share/man/man3/mok_session_open.3.gz /usr/share/man/man7/mok-abi.7.gz
holds mok-tools /usr/bin/mokctl /usr/share/man/man1/mokctl.1.gz /usr/share/bash-completion/completions/mokctl

[ "$(dpkg-deb -I "$(deb mokd)" conffiles)" = /etc/mok/mokd.conf ] || fail "the configuration is no conffile"
dpkg-deb -f "$(deb libmok-dev)" Depends | grep -F "libmok1 (= $(dpkg-deb -f "$(deb libmok1)" Version))" >/dev/null ||
    fail "libmok-dev fits any libmok1"
dpkg-deb -I "$(deb libmok1)" shlibs | grep "^libmok 1 libmok1" >/dev/null || fail "libmok1 has no shlibs"
[ "$(dpkg-deb -I "$(deb libmok1)" symbols | grep -c '^ mok_.*@MOK_1')" -ge 30 ] || fail "libmok1's symbols are not told"
for deb in "${debs[@]}"; do
    depends=$(dpkg-deb -f "$deb" Depends Recommends)
    ! grep -qiE 'cuda|nvidia' <<<"$depends" || fail "$deb depends on a GPU's library: $depends"
done

if command -v lintian >/dev/null; then
    said=$(lintian --allow-root --tag-display-limit 0 --fail-on error "${debs[@]}" 2>&1) || fail "$said"
    echo "$said"
fi
