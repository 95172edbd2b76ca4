#!/usr/bin/env bash
# Tests of the CUDA engine on a bare GPU machine, from a build made elsewhere.
#   tests/gpu/run.sh pack BUILD DIR   on the build machine: puts all that is needed into DIR
#   DIR/run.sh                        on the GPU machine
# The last line is "N passed, N failed, N skipped". The scripts need python3 with PyTorch; without it they are skipped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [[ ${1:-} == pack ]]; then
    build=$2 dir=$3
    mkdir -p "$dir/lib" "$dir/vectors"
    cp "$here"/*.py "$here/run.sh" "$build"/tests/gpu/gpu_{forward,backward,board,context,mx,mx_backward,mx_host,mx_products,mx_32,mx_backward_32,mx_host_32,mx_products_32,quantize} "$dir/"
    cp "$build/tests/gpu/libmok_gpu_shim.so" "$dir/libmok_gpu.so"
    cp "$here"/../data/vectors/* "$dir/vectors/"
    ldd "$build"/tests/gpu/gpu_{forward,quantize} | awk '/=> \// { print $3 }' | sort -u | grep -vE '/(libc|libm|ld-linux[^/]*)\.so' |
        xargs -I{} cp -L {} "$dir/lib/"
    mkdir -p "$dir/daemon"
    "$here/daemon/run.sh" pack "$build" "$dir/daemon"
    exit 0
fi

if [[ $# -gt 0 || ! -x $here/gpu_forward ]]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0"
    [[ ${1-} == --help ]] && exit 0
    [[ $# -gt 0 ]] && echo "run.sh: unknown argument '$1'" >&2
    [[ $# -gt 0 ]] || echo "run.sh: no tests beside this script: pack a build first" >&2
    exit 2
fi
cd "$here"
passed=0 failed=0 skipped=0
check() { # name command...
    local name=$1 code=0
    shift
    "$@" > "$name.log" 2>&1 || code=$?
    case $code in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)); tail -20 "$name.log" ;;
    esac
    echo "$name: exit $code"
}

export OPENBLAS_NUM_THREADS=1
check forward env LD_LIBRARY_PATH="$here/lib" ./gpu_forward vectors
check backward env LD_LIBRARY_PATH="$here/lib" ./gpu_backward vectors
check board env LD_LIBRARY_PATH="$here/lib" ./gpu_board
check context env LD_LIBRARY_PATH="$here/lib" ./gpu_context
check mx env LD_LIBRARY_PATH="$here/lib" ./gpu_mx
check mx_backward env LD_LIBRARY_PATH="$here/lib" ./gpu_mx_backward
check mx_host env LD_LIBRARY_PATH="$here/lib" ./gpu_mx_host
check mx_products env LD_LIBRARY_PATH="$here/lib" ./gpu_mx_products
for name in mx mx_backward mx_host mx_products; do
    check "${name}_32" env LD_LIBRARY_PATH="$here/lib" "./gpu_${name}_32"
done
check quantize env LD_LIBRARY_PATH="$here/lib" ./gpu_quantize
if python3 -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null; then
    check check env LD_LIBRARY_PATH="$here/lib" python3 check.py ./libmok_gpu.so
    if command -v compute-sanitizer > /dev/null; then
        # Of our kernels alone, and with an allocation of its own for each tensor, so that its end is seen.
        check memcheck env LD_LIBRARY_PATH="$here/lib" PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer \
            --kernel-name kns=mok --error-exitcode 1 python3 check.py ./libmok_gpu.so odd
    fi
else
    skipped=$((skipped + 1))
fi
if command -v cuobjdump > /dev/null; then
    check hgmma bash -c 'cuobjdump -sass libmok_gpu.so | grep -q HGMMA.64x256x16.F32.BF16'
    check qgmma bash -c 'cuobjdump -sass libmok_gpu.so | grep -q QGMMA.64x128x32.F32.E4M3'
fi
check daemon "$here/daemon/run.sh" test --mps
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 ]]
