#!/usr/bin/env bash
# Installs the Debian packages that building and testing MoK needs. The one place that lists them; asks the package
# server only when something is missing.
set -euo pipefail

packages=(
    cmake
    debootstrap # a machine to boot, for the tests of the service
    g++ # public headers are checked as C++ too
    gcc
    iproute2 # network namespaces, for the tests of the rack
    jq # reads the demo's logs
    libc6-dev
    libarchive-dev
    libcjson-dev
    libcmocka-dev
    libinih-dev
    libmicrohttpd-dev
    libopenblas-dev
    libprotobuf-c-dev
    libsqlite3-dev
    libsystemd-dev
    libuv1-dev
    libzmq3-dev
    lintian # checks packages
    lowdown # pages for man
    mandoc # checks them
    ninja-build
    pkgconf
    procps # pgrep
    protobuf-c-compiler
    python3 # tests of the rack
    systemd-container # boots it
    systemtap-sdt-dev # probes of the workers
    util-linux # setpriv
)

# Other people's programs that a test each holds against what MoK serves. Not by default: they are large (100 MB to get,
# up to two minutes to install), and prometheus comes with a server that its package starts.
optional=(
    chromium # looks at the status page
    prometheus # promtool: alerts, dashboard, a scrape
)

usage() {
    cat <<'EOF'
Usage: deploy/deps.sh [--optional | --list | --missing | --help]
Installs what is missing of the packages that MoK needs (with sudo where not root).
  --optional  install also what some tests need that are skipped without
  --list      print the packages and do nothing
  --missing   print those that are missing and do nothing
EOF
}

installed() {
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

missing() {
    local package
    for package in "${packages[@]}"; do
        installed "$package" || echo "$package"
    done
}

as_root() {
    if [[ $(id -u) -eq 0 ]]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -- "$@"
    else
        echo "deps.sh: these packages must be installed by root, and there is no sudo: ${wanted[*]}" >&2
        exit 1
    fi
}

case "${1-}" in
"") ;;
--optional) packages+=("${optional[@]}") ;;
--list)
    printf '%s\n' "${packages[@]}"
    exit 0
    ;;
--missing)
    missing
    exit 0
    ;;
--help)
    usage
    exit 0
    ;;
*)
    echo "deps.sh: unknown option $1" >&2
    usage >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null; then
    echo "deps.sh: no dpkg here; install what provides these Debian packages: ${packages[*]}" >&2
    exit 1
fi
mapfile -t wanted < <(missing)
if [[ ${#wanted[@]} -eq 0 ]]; then
    exit 0
fi
echo "installing: ${wanted[*]}"
# Retries: package servers drop connections now and then.
options=(-qq -o Acquire::Retries=3)
as_root env DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" update
as_root env DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" install --yes --no-install-recommends "${wanted[@]}" \
    >/dev/null
