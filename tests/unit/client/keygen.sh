#!/usr/bin/env bash
# mokctl keygen: a secret file, a public one, its line on stdout; never over a key that is there; no mokd needed.
set -euo pipefail
mokctl=$MOK_BUILD_DIR/client/mokctl
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

fail() {
    echo "keygen: $*" >&2
    exit 1
}
# refused CODE WORDS ARGUMENT...: the exit code, and what stderr says.
refused() {
    local code=$1 words=$2 rc=0
    shift 2
    "$mokctl" keygen "$@" >"$dir/out" 2>"$dir/err" || rc=$?
    [[ $rc -eq $code ]] || fail "$* ended with $rc, not $code"
    grep -q "$words" "$dir/err" || fail "$* does not say: $words"
    [[ ! -s $dir/out ]] || fail "$* prints a key"
}

mkdir "$dir/a" "$dir/b"
line=$("$mokctl" keygen --out "$dir/a" 2>/dev/null)
[[ $line =~ ^public_key\ =\ [0-9a-f]{64}$ ]] || fail "printed: $line"
[[ $line == "$(<"$dir/a/rack.pub")" ]] || fail "rack.pub is another key than was printed"
[[ $(stat -c %a "$dir/a/rack.key") == 600 ]] || fail "others may read the secret key"
[[ $(grep -cE '^secret_key = [0-9a-f]{64}$' "$dir/a/rack.key") == 1 ]] || fail "rack.key holds no key"
[[ $("$mokctl" keygen --out "$dir/b" 2>/dev/null) != "$line" ]] || fail "the same key twice"

before=$(<"$dir/a/rack.key")
refused 1 'never written over' --out "$dir/a"
[[ $(<"$dir/a/rack.key") == "$before" ]] || fail "the key was written over"
refused 1 'No such file or directory' --out "$dir/nowhere"
refused 2 'takes no "stray"' stray
refused 2 'unrecognized option' --bogus
