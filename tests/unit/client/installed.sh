#!/usr/bin/env bash
# What is installed is enough to build a program, through pkg-config and through CMake's find_package.
# The installed tree is moved first: nothing in it may know where it was installed to.
# usage: installed.sh BUILD_DIR SOURCE_DIR C_COMPILER
set -euo pipefail
build=$1 source=$2 cc=$3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
prefix=$tmp/usr

cmake --install "$build/client" --prefix "$tmp/first" >/dev/null
mv "$tmp/first" "$prefix"
pc=$(find "$prefix" -name mok.pc)

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
flags=$(pkg-config --cflags --libs mok)
libdir=$(pkg-config --variable=libdir mok)
# shellcheck disable=SC2086
"$cc" -o "$tmp/by_pkg_config" "$tmp/program.c" $flags "-Wl,-rpath,$libdir"
said=$("$tmp/by_pkg_config")
[ "$said" = "$expected" ] || { echo "pkg-config: said \"$said\", must say \"$expected\""; exit 1; }

# shellcheck disable=SC2086
"$cc" -Wall -Wextra -Werror -o "$tmp/two_ranks" "$source/client/examples/two_ranks.c" $flags "-Wl,-rpath,$libdir" -lm
said=$(MOK_SOCKET=/nonexistent/mokd.sock "$tmp/two_ranks" 2>/dev/null || true)
[ "$said" = FAILED ] || { echo "two_ranks: said \"$said\" without mokd"; exit 1; }

cat >"$tmp/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES C)
find_package(mok 0.1 REQUIRED)
add_executable(by_cmake program.c)
target_link_libraries(by_cmake PRIVATE mok::mok)
CMAKE
cmake -G Ninja -S "$tmp" -B "$tmp/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null
cmake --build "$tmp/build" >/dev/null
said=$("$tmp/build/by_cmake")
[ "$said" = "$expected" ] || { echo "find_package: said \"$said\", must say \"$expected\""; exit 1; }

PATH=$prefix/bin:$PATH mokctl --help >/dev/null
