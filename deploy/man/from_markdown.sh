#!/bin/sh
# A page for man from a page of Markdown.
# usage: from_markdown.sh LOWDOWN VERSION DATE NAME SECTION FILE
set -eu
lowdown=$1 version=$2 date=$3 name=$4 section=$5 file=$6
# Pages for man have no links: the text of one stays, its target goes. A page that is not one of man's gets a NAME.
{
    if [ "$(head -n 1 "$file")" != "# NAME" ]; then
        printf '# NAME\n\n%s - %s\n\n' "$name" "$(sed -n '1s/^# *//p' "$file")"
        sed -e '1d' "$file"
    else
        cat "$file"
    fi
} | sed -e 's/\[\([^]]*\)\]([^)]*)/\1/g' |
    "$lowdown" -s -tman --out-no-smarty -mtitle="$name" -msection="$section" -mvolume=MoK -msource="MoK $version" \
        -mdate="$date" |
    sed -e 's/\\f(\{0,1\}C[RBI]\{0,1\}/\\fB/g' |
    awk '/^\.S[HS]$/ { heading = $0; next }
        heading { print heading " \"" $0 "\""; heading = ""; after = 1; next }
        /^\.[LP]P$/ && after { next } { after = 0; print }'
