# Sourced by the tests of the metrics port: a mokd with two devices and a port of its own, gone when the test is.
build=${MOK_BUILD_DIR:?}
dir=$(mktemp -d /tmp/mok-metrics-XXXXXX)
mokd=
port=

end() {
    local code=$?
    if [[ $mokd ]]; then
        kill "$mokd" 2> /dev/null || true
        wait "$mokd" 2> /dev/null || true
    fi
    [[ $code -eq 0 || $code -eq 77 ]] || sed 's/^/  mokd| /' "$dir/log" >&2 || true
    rm -rf "$dir"
}
trap end EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# A port may be somebody else's: then another one.
start_mokd() {
    export MOK_SOCKET=$dir/s
    for _ in $(seq 20); do
        port=$((20000 + RANDOM % 12000))
        printf '[daemon]\nsocket = %s\n[metrics]\nlisten = 127.0.0.1:%d\n[device host0]\nthreads = 1\n[device host1]\nthreads = 1\n' \
            "$MOK_SOCKET" "$port" > "$dir/mokd.conf"
        "$build/daemon/mokd/mokd" --config "$dir/mokd.conf" --runtime-dir "$dir" 2> "$dir/log" &
        mokd=$!
        for _ in $(seq 300); do
            [[ $("$build/client/mokctl" --json devices 2> /dev/null | grep -c '"up"') -eq 2 ]] && return 0
            kill -0 "$mokd" 2> /dev/null || break
            sleep 0.1
        done
        kill -0 "$mokd" 2> /dev/null && fail "mokd runs but does not come up"
        wait "$mokd" || true
        mokd=
        grep -q 'metrics.*cannot be listened on' "$dir/log" || fail "mokd does not start"
    done
    fail "no free port"
}

# get PATH ACCEPT [HOST]: the answer's body; the head goes to $dir/head.
get() {
    exec 3<> "/dev/tcp/127.0.0.1/$port"
    printf 'GET %s HTTP/1.1\r\nHost: %s\r\nAccept: %s\r\nConnection: close\r\n\r\n' "$1" "${3-127.0.0.1:$port}" "$2" >&3
    cat <&3 > "$dir/answer"
    exec 3>&-
    sed '/^\r$/q' "$dir/answer" > "$dir/head"
    sed '1,/^\r$/d' "$dir/answer"
}
