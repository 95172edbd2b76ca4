#!/usr/bin/env bash
# Every default test, from a fresh clone: installs packages, builds, runs. Asks nothing. The last line is
# "N passed, N failed, N skipped"; exit code 0 only if nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=no
filter=
passed=0 failed=0 skipped=0
failures=() wanting=()

usage() {
    cat <<'EOF'
Usage: tests/run.sh [--quick] [--filter REGEX] [--help]
Builds the presets package (optimised, for the whole machine; its packages are what is tested), asan and tsan. In package
all tests but the slow ones run (labels unit, integration, chaos, emulated, boot, gpu; what needs a GPU, or root and a machine
to boot, is skipped where that is not there), under the sanitizers unit and integration. Takes minutes, most of them for the
sanitizers; --quick is for while one works.
  --quick         without the sanitizers
  --filter REGEX  only tests whose name matches
With CI or MOK_WERROR in the environment, warnings are errors.
EOF
}

while [[ $# -gt 0 ]]; do
    case "$1" in
    --quick) quick=yes ;;
    --filter)
        [[ $# -ge 2 ]] || { echo "run.sh: --filter needs a regular expression" >&2; exit 2; }
        filter=$2
        shift
        ;;
    --help)
        usage
        exit 0
        ;;
    *)
        echo "run.sh: unknown option $1" >&2
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

# Builds a preset while tests run that mostly wait: with time that nobody else wants. What went wrong, build() finds
# again.
ahead=
build_ahead() {
    [[ $quick == no ]] || return 0
    local -a idle=(chrt --idle 0)
    "${idle[@]}" true 2>/dev/null || idle=(nice -n 19)
    configure "$1" >/dev/null 2>&1 || return 0
    "${idle[@]}" ninja -C "build/$1" >/dev/null 2>&1 &
    ahead=$!
}
wait_ahead() {
    [[ -n $ahead ]] || return 0
    chrt --other --pid 0 "$ahead" 2>/dev/null || true # now it is wanted
    wait "$ahead" || true
    ahead=
}
trap '[[ -z $ahead ]] || kill "$ahead" 2>/dev/null || true' EXIT

configure() {
    local werror=OFF
    [[ -z ${CI-} && ${MOK_WERROR-OFF} =~ ^(OFF|0|)$ ]] || werror=ON
    cmake --preset "$1" -DMOK_TESTS=ON -DMOK_WERROR="$werror"
}

# build PRESET: configures and builds; shows the compiler's output only when it fails.
build() {
    local preset=$1 log
    wait_ahead
    log=$(mktemp)
    say "building $preset"
    if configure "$preset" >"$log" 2>&1 &&
        ninja -C "build/$preset" >>"$log" 2>&1; then
        rm -f "$log"
        return 0
    fi
    tail -n 60 "$log"
    rm -f "$log"
    fail "$preset: build"
    return 1
}

# verdicts FILE: a line "passed|failed|skipped NAME [PACKAGE]" for each test of a JUnit report, with the package for
# want of which it says that it was skipped. A test that could not be started has failed: ctest counts it among the
# skipped ones.
verdicts() {
    awk '
        function tell() { if (name != "") print verdict, name, package }
        /<testcase / {
            tell()
            match($0, /name="[^"]*"/)
            name = substr($0, RSTART + 6, RLENGTH - 7)
            verdict = /status="run"/ ? "passed" : "failed"
            package = ""
            if (/status="disabled"/) verdict = "skipped"
        }
        /<skipped message="SKIP_/ { verdict = "skipped" }
        verdict == "skipped" && match($0, /Debian package [a-z0-9.+-]+/) { package = substr($0, RSTART + 15, RLENGTH - 15) }
        END { tell() }
    ' "$1"
}

# check PRESET LABELS...: runs the tests of these labels (ctest's -L or -LE and a regular expression) on two cores,
# which ctest counts in halves.
check() {
    local preset=$1 report verdict name package
    shift
    local -a command=(ctest --test-dir "build/$preset" "$@" --parallel 4 --output-on-failure --no-tests=ignore)
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
    while read -r verdict name package; do
        case "$verdict" in
        passed) passed=$((passed + 1)) ;;
        skipped)
            skipped=$((skipped + 1))
            [[ -z $package ]] || wanting+=("$name ($package)")
            ;;
        *) fail "$preset: $name" ;;
        esac
    done < <(verdicts "$report")
    rm -f "$report"
}

deploy/deps.sh
if build package; then
    check package -L '^(unit|integration|emulated)$'
    # Those that kill and time things run one after the other; beside them a machine boots, which mostly waits.
    build_ahead asan
    check package -LE '^(unit|integration|emulated|slow|bench|fuzz)$'
fi
if [[ $quick == no ]]; then
    if build asan; then
        build_ahead tsan
        check asan -L '^(unit|integration)$'
    fi
    if build tsan; then
        check tsan -L '^(unit|integration)$'
    fi
fi

if [[ -n $filter && $((passed + failed + skipped)) -eq 0 ]]; then
    echo "run.sh: --filter $filter: matches no test" >&2
    exit 2
fi
say "done"
[[ ${#wanting[@]} -eq 0 ]] || echo "skipped for want of a package, which deploy/deps.sh --optional installs: ${wanting[*]}"
for name in "${failures[@]}"; do
    echo "failed: $name"
done
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 ]]
