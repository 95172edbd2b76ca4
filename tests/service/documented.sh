#!/usr/bin/env bash
# Every public function, every key of the configuration and every command of mokctl has its place in a page for man; the
# pages are free of errors; bash completes what there is.
# usage: documented.sh BUILD_DIR SOURCE_DIR
set -euo pipefail
build=$1 source=$2
man=$build/deploy/man
[ -f "$man/mokd.8.gz" ] || { echo "no pages here: lowdown is missing"; exit 77; }
bad=0
complain() { echo "$*"; bad=1; }

# functions
functions=$(grep -E '^[a-z]' "$source/client/include/mok/mok.h" | grep -oE '\bmok_[a-z0-9_]+\(' | tr -d '(' | sort -u)
[ "$(wc -l <<<"$functions")" -gt 20 ] || complain "found only: $functions"
for name in $functions; do
    if ! [ -f "$man/$name.3" ]; then
        complain "$name: no page"
        continue
    fi
    page=$man/$(sed -n 's|^\.so man3/||p' "$man/$name.3")
    grep -qE "^\.SS \"(.*, )?$name(,.*)?\"" "$page" || complain "$name: $(basename "$page") has not a word about it"
    grep -qE "[ *]$name\(" "$page" || complain "$name: not in the synopsis of $(basename "$page")"
done

# keys: those that the parser knows
keys=$(grep -hoE '^ *\{ "[a-z_0-9]+", (VALUE|KEY)_' "$source"/daemon/mokd/config*.c | grep -oE '"[^"]+"' | tr -d '"' | sort -u)
[ "$(wc -l <<<"$keys")" -gt 15 ] || complain "found only: $keys"
for key in $keys; do
    grep -qE "^\\\\fB$key = " "$man/mokd.conf.5" || complain "$key: not in mokd.conf(5)"
    # what the sample gives is what the parser takes
    grep -qE "^;?$key *=" "$source/deploy/mokd.conf.sample" || complain "$key: not in mokd.conf.sample"
done

# commands: those that mokctl tells apart
commands=$(grep -hoE '\{ "[a-z-]+", MOKCTL_|strcmp\(name, "[a-z-]+"\)' "$source"/client/mokctl/*.c | grep -oE '"[^"]+"' |
    tr -d '"' | sort -u)
[ "$(wc -l <<<"$commands")" -ge 7 ] || complain "found only: $commands"
for command in $commands; do
    grep -qE "^\\\\fB$command\b" "$man/mokctl.1" || complain "$command: not in mokctl(1)"
done
for option in $("$build/daemon/mokd/mokd" --help | grep -oE -- '--[a-z-]+' | sort -u); do
    gzip -dc "$man/mokd.8.gz" | sed 's/\\-/-/g; s/\\f[A-Z]//g' | grep -F -- "$option" >/dev/null || complain "$option: not in mokd(8)"
done

# pages
if command -v mandoc >/dev/null; then
    for page in "$man"/*.[1-8]; do
        grep -q '^\.so ' "$page" && continue
        said=$(mandoc -T lint -W warning "$page") || true
        [ -z "$said" ] || complain "$said"
    done
fi

# completion
complete_line() {
    PATH=$build/client:$PATH bash -c '
        source "$0"
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        _mokctl
        printf "%s\n" "${COMPREPLY[@]}"' "$source/deploy/completion/mokctl" "$@" | sort -u
}
expect() { # WORD that must be among what LINE... gives
    local word=$1
    shift
    complete_line "$@" | grep -xF -- "$word" >/dev/null || complain "completion of \"$*\" does not offer $word"
}
expect status mokctl st
expect devices mokctl ""
expect layer mokctl --json la
expect --hidden mokctl layer --hid
expect --json mokctl --js
expect mxfp8-per32 mokctl layer --explain --precision mx
[ -z "$(complete_line mokctl nonsense)" ] || complain "completion offers something for nonsense"
[ -z "$(complete_line mokctl status --hid)" ] || complain "completion offers --hidden for status"

exit $bad
