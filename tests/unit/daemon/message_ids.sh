#!/usr/bin/env bash
# The identities of the log's messages: each is used once, the catalogue has the same ones, and each message is really
# said.
# usage: message_ids.sh SOURCE_DIR
set -euo pipefail
cd "$1"
bad=0
complain() { echo "$*"; bad=1; }
table=daemon/common/message_ids.c
sed -nE 's/^    \{ "([^"]*)", "([^"]*)", "([0-9a-f]{32})" \},$/\1\t\2\t\3/p' "$table" | {
    count=0
    while IFS=$'\t' read -r component message id; do
        count=$((count + 1))
        [ "$(grep -c "$id" "$table")" -eq 1 ] || complain "$id: there twice"
        grep -q "^-- $id$" deploy/mok.catalog || complain "$component: $message: not in deploy/mok.catalog"
        grep -rqF "\"$component\", \"$message\"" daemon --include='*.c' --exclude="$(basename "$table")" ||
            complain "$component: $message: nobody says that"
    done
    [ "$count" -ge 15 ] || complain "found only $count identities"
    [ "$(grep -c '^-- ' deploy/mok.catalog)" -eq "$count" ] || complain "deploy/mok.catalog has others"
    exit $bad
}
