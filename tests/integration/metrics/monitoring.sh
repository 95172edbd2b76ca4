#!/usr/bin/env bash
# What deploy/monitoring holds fits what mokd serves: rules, dashboard and a scrape of a running mokd pass promtool.
set -euo pipefail
command -v promtool > /dev/null || { echo "SKIPPED: no promtool (Debian package prometheus)"; exit 77; }
source_dir=${MOK_SOURCE_DIR:?}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/mokd_on_port.sh"
alerts=$source_dir/deploy/monitoring/mok-alerts.yml
sums=$source_dir/deploy/monitoring/mok-rack.yml
dashboard=$source_dir/deploy/monitoring/mok-dashboard.json

promtool check rules "$alerts" > "$dir/out" || fail "the alert rules: $(cat "$dir/out")"
cp "$alerts" "$here/alerts.test.yml" "$dir/"
for alert in $(sed -n 's/.*- alert: //p' "$alerts"); do
    grep -A1 "alertname: $alert\$" "$here/alerts.test.yml" | grep -q 'exp_alerts: \[\]' ||
        fail "$alert: no test that it is silent"
    grep -A1 "alertname: $alert\$" "$here/alerts.test.yml" | grep -q 'exp_alerts:$' ||
        fail "$alert: no test that it fires"
done
(cd "$dir" && promtool test rules alerts.test.yml) > "$dir/out" 2>&1 ||
    fail "the alerts do not fire as they should: $(cat "$dir/out")"

promtool check rules "$sums" > "$dir/out" || fail "the sums over a rack: $(cat "$dir/out")"
cp "$sums" "$here/rack.test.yml" "$dir/"
(cd "$dir" && promtool test rules rack.test.yml) > "$dir/out" 2>&1 ||
    fail "the sums over a rack are others: $(cat "$dir/out")"

# Every expression of the dashboard is one: as rules, promtool reads them.
jq -r '[.. | objects | select(has("expr")) | .expr] | unique | .[]' "$dashboard" |
    sed 's/\$__rate_interval/5m/g; s/\$[a-z]*/.*/g' > "$dir/expressions"
[[ $(wc -l < "$dir/expressions") -ge 25 ]] || fail "the dashboard has only $(wc -l < "$dir/expressions") expressions"
{
    printf 'groups:\n- name: dashboard\n  rules:\n'
    n=0
    while IFS= read -r expression; do
        n=$((n + 1))
        printf '  - record: panel:%d\n    expr: |\n      %s\n' "$n" "$expression"
    done < "$dir/expressions"
} > "$dir/dashboard.yml"
promtool check rules "$dir/dashboard.yml" > "$dir/out" 2>&1 || fail "the dashboard: $(cat "$dir/out")"

start_mokd
"$build/client/examples/two_ranks" > /dev/null

get /metrics 'text/plain;version=0.0.4' > "$dir/text"
grep -q '^Content-Type: text/plain; version=0.0.4; charset=utf-8' "$dir/head" ||
    fail "the older format has no type of its own"
promtool check metrics < "$dir/text" > "$dir/out" 2>&1 || fail "the scrape: $(cat "$dir/out")"

# promtool's reader of OpenMetrics is that of `tsdb create-blocks-from`, which wants a time for each sample.
get /metrics 'application/openmetrics-text;version=1.0.0' > "$dir/open"
sed "/^#/!s/\$/ $(date +%s)/" "$dir/open" > "$dir/stamped"
promtool tsdb create-blocks-from openmetrics "$dir/stamped" "$dir/blocks" > "$dir/out" 2>&1 ||
    fail "no OpenMetrics: $(cat "$dir/out")"

{ cat "$alerts" "$dir/expressions"; grep 'expr:' "$sums" | sed 's/rack:mok_[a-z_:0-9]*//g'; } | grep -oE '\bmok_[a-z_]+' | sed -E 's/_(bucket|sum|count)$//' | sort -u > "$dir/asked"
sed -n 's/^# TYPE \([a-z_]*\) .*/\1/p' "$dir/text" | sort -u > "$dir/served"
missing=$(comm -23 "$dir/asked" "$dir/served")
[[ -z $missing ]] || fail "asked for and not served: $missing"

# A page of another site that gives its own name our address gets nothing.
get /status.json '*/*' evil.example > /dev/null
grep -q '^HTTP/1.1 403 ' "$dir/head" || fail "a foreign name was answered: $(head -1 "$dir/head")"
get /status.json '*/*' "localhost:$port" > /dev/null
grep -q '^HTTP/1.1 200 ' "$dir/head" || fail "localhost was not answered: $(head -1 "$dir/head")"
echo "$(wc -l < "$dir/expressions") expressions, $(wc -l < "$dir/served") metrics: OK"
