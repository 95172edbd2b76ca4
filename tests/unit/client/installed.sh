#!/usr/bin/env bash
# What is installed is enough to build a program, through pkg-config and through CMake's find_package.
# usage: installed.sh BUILD_DIR C_COMPILER
set -euo pipefail
build=$1 cc=$2
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
prefix=$tmp/usr

cmake --install "$build/client" --prefix "$prefix" >/dev/null
pc=$(find "$prefix" -name mok.pc)
lib=$(dirname "$(find "$prefix" -name libmok.so)")

cat >"$tmp/program.c" <<'C'
#include <mok/mok.h>
#include <stdio.h>
int main(void)
{
    mok_session *session;
    mok_session_options options = { sizeof(options), "/nonexistent/mokd.sock", NULL, 0, 0 };
    int r = mok_session_open(&options, &session);
    printf("%s %s\n", mok_version(), mok_error_name(r));
    return 0;
}
C
expected="0.1.0 MOK_EDAEMON"

export PKG_CONFIG_PATH=$(dirname "$pc")
flags=$(pkg-config --define-variable=prefix="$prefix" --cflags --libs mok)
# shellcheck disable=SC2086
"$cc" -o "$tmp/by_pkg_config" "$tmp/program.c" $flags
said=$(LD_LIBRARY_PATH=$lib "$tmp/by_pkg_config")
[ "$said" = "$expected" ] || { echo "pkg-config: said \"$said\", must say \"$expected\""; exit 1; }

cat >"$tmp/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES C)
find_package(mok 0.1 REQUIRED)
add_executable(by_cmake program.c)
target_link_libraries(by_cmake PRIVATE mok::mok)
CMAKE
cmake -S "$tmp" -B "$tmp/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null
cmake --build "$tmp/build" >/dev/null
said=$("$tmp/build/by_cmake")
[ "$said" = "$expected" ] || { echo "find_package: said \"$said\", must say \"$expected\""; exit 1; }

PATH=$prefix/bin:$PATH mokctl --help >/dev/null
