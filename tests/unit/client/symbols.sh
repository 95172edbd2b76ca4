#!/usr/bin/env bash
# libmok.so exports exactly the functions that mok/mok.h declares, all of one version node.
# usage: symbols.sh LIBRARY HEADER
set -euo pipefail
library=$1 header=$2

exported=$(nm -D --defined-only "$library" | awk '$2 == "T" { print $3 }' | sort)
declared=$(grep -E '^[a-z]' "$header" | grep -oE '\bmok_[a-z0-9_]+\(' | tr -d '(' | sort)
[ -n "$declared" ] || { echo "found no function in $header"; exit 1; }

if ! diff <(sed 's/$/@@MOK_1/' <<<"$declared") <(echo "$exported"); then
    echo "above: < declared in the header, > exported by the library"
    exit 1
fi
others=$(nm -D --defined-only "$library" | awk '$2 != "T" && $3 !~ /^MOK_1/ { print $2, $3 }')
[ -z "$others" ] || { echo "also exported: $others"; exit 1; }
soname=$(readelf -d "$library" | grep SONAME | grep -oE 'libmok\.so\.[0-9]+')
[ "$soname" = libmok.so.1 ] || { echo "soname is $soname, must be libmok.so.1"; exit 1; }
wc -l <<<"$exported"
