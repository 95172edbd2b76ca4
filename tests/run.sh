#!/usr/bin/env bash
# Every default test, from a fresh clone: installs packages, builds, runs. Asks nothing. The last line is
# "N passed, N failed, N skipped"; exit code 0 only if nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=no
filter=
passed=0 failed=0 skipped=0
failures=()

usage() {
    cat <<'EOF'
Usage: tests/run.sh [--quick] [--filter REGEX] [--help]
Builds the presets release, asan and tsan. In release all tests but the slow ones run (labels unit, integration,
chaos, gpu; those that need a GPU report themselves as skipped where there is none), under the sanitizers the labels
unit and integration.
  --quick         release only
  --filter REGEX  only tests whose name matches
With CI or MOK_WERROR in the environment, warnings are errors.
EOF
}

while [[ $# -gt 0 ]]; do
    case "$1" in
    --quick) quick=yes ;;
    --filter)
        [[ $# -ge 2 ]] || { usage >&2; exit 2; }
        filter=$2
        shift
        ;;
    --help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
    shift
done

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

fail() {
    failed=$((failed + 1))
    failures+=("$1")
}

# build PRESET: configures and builds; shows the compiler's output only when it fails.
build() {
    local preset=$1 werror=OFF log
    [[ -z ${CI-} && ${MOK_WERROR-OFF} =~ ^(OFF|0|)$ ]] || werror=ON
    log=$(mktemp)
    say "building $preset"
    if cmake --preset "$preset" -DMOK_WERROR="$werror" >"$log" 2>&1 && ninja -C "build/$preset" >>"$log" 2>&1; then
        rm -f "$log"
        return 0
    fi
    tail -n 60 "$log"
    rm -f "$log"
    fail "$preset: build"
    return 1
}

# attribute NAME FILE: a number of the first <testsuite>.
attribute() {
    grep -oE -m 1 "[[:space:]]$1=\"[0-9]+\"" "$2" | head -n 1 | grep -oE '[0-9]+' || echo 0
}

# check PRESET JOBS LABELS...: runs the tests of these labels (ctest's -L or -LE and a regular expression).
check() {
    local preset=$1 jobs=$2 report total bad idle
    shift 2
    local -a command=(ctest --test-dir "build/$preset" "$@" --parallel "$jobs" --output-on-failure --no-tests=ignore)
    [[ -z $filter ]] || command+=(-R "$filter")
    # ThreadSanitizer of gcc 12 needs the address-space layout that kernels had before more of it was randomised.
    if [[ $preset == tsan ]] && setarch -R true 2>/dev/null; then
        command=(setarch -R "${command[@]}")
    fi
    report=$(mktemp)
    say "testing $preset ($*)"
    "${command[@]}" --output-junit "$report" || true
    if ! grep -q '<testsuite' "$report"; then
        rm -f "$report"
        [[ -n $filter ]] || fail "$preset: ctest $*"
        return 0
    fi
    total=$(attribute tests "$report")
    bad=$(attribute failures "$report")
    idle=$(($(attribute skipped "$report") + $(attribute disabled "$report")))
    passed=$((passed + total - bad - idle))
    failed=$((failed + bad))
    skipped=$((skipped + idle))
    mapfile -t -O "${#failures[@]}" failures < <(failed_names "$preset" "$report")
    rm -f "$report"
}

failed_names() {
    grep -oE '<testcase name="[^"]*"[^>]*status="fail"' "$2" | sed -E "s/.*name=\"([^\"]*)\".*/$1: \\1/" || true
}

deploy/deps.sh
if build release; then
    check release 2 -L '^unit$'
    check release 2 -L '^integration$'
    check release 1 -LE '^(unit|integration|slow|bench|fuzz)$'
fi
if [[ $quick == no ]]; then
    for preset in asan tsan; do
        if build "$preset"; then
            check "$preset" 2 -L '^(unit|integration)$'
        fi
    done
fi

say "done"
for name in "${failures[@]}"; do
    echo "failed: $name"
done
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 ]]
