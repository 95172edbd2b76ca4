#!/usr/bin/env bash
# The table of reports in tests/README.md: every number from 1 on is there, each test that it names is there and called,
# and each test that has a report's number in its name is in it.
# usage: reports.sh SOURCE_DIR
set -euo pipefail
cd "$1/tests"
bad=0
complain() { echo "$*"; bad=1; }
sources=(--include='*.c' --include='*.sh' --include='*.py')

number=0
while IFS='|' read -r _ report _ tests _; do
    number=$((number + 1))
    [ "$((report))" -eq $number ] || complain "report $report stands where $number should"
    mentioned=$(grep -oE '`[a-z0-9_]+` \([a-z0-9_/.]+\)' <<<"$tests") || complain "report $report: no test"
    while read -r name file; do
        name=${name//\`/} file=${file//[()]/}
        # Where it is made, and where it is called or listed; the name alone in a comment is not enough.
        [ "$(grep -vE '^ *(/?\*|#)' "$file" 2>/dev/null | grep -cw -- "$name")" -ge 2 ] ||
            complain "report $report: no $name in $file that is called"
    done <<<"$mentioned"
done < <(grep -E '^\| [0-9]+ \|' README.md)
[ $number -ge 35 ] || complain "only $number reports"
while read -r name; do
    grep -qF "\`$name\`" README.md || complain "$name: not in README.md"
done < <(grep -rhoE "${sources[@]}" 'report_[0-9]+_[a-z0-9_]+' . | sort -u)
exit $bad
