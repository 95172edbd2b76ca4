/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The emulated GPU itself: that instructions do what the manual says, and that mistakes end with a sentence that names
 * them. Each mistake is made in a child process.
 */
#include "instructions.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

extern "C" {
#include <cmocka.h>
}

#include "launch.cuh"

namespace
{

using namespace mok;

template <class T> struct device_array {
    T *at = nullptr;
    size_t count;
    explicit device_array(const std::vector<T> &from) : count(from.size())
    {
        void *p = nullptr;
        assert_int_equal(cudaMalloc(&p, count * sizeof(T)), cudaSuccess);
        at = static_cast<T *>(p);
        memcpy(p, from.data(), count * sizeof(T));
    }
    ~device_array()
    {
        cudaFree(at);
    }
    std::vector<T> get() const
    {
        cudaDeviceSynchronize();
        return std::vector<T>(at, at + count);
    }
};

template <class... P, class... A> void run(void (*kernel)(P...), dim3 grid, uint32_t threads, size_t shared, A... a)
{
    assert_int_equal(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024), 0);
    assert_int_equal(launch(false, kernel, grid, threads, shared, nullptr, a...), 0);
    cudaDeviceSynchronize();
}

uint16_t bf16(float v)
{
    return __float2bfloat16_rn(v).bits;
}

CUtensorMap map_of(const void *base, uint64_t columns, uint64_t rows, uint32_t box_rows)
{
    CUtensorMap map;
    const cuuint64_t size[] = { columns, rows }, stride[] = { columns * 2 };
    const cuuint32_t box[] = { 64, box_rows }, step[] = { 1, 1 };
    assert_int_equal(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(base), size,
                                            stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                     0);
    return map;
}

__device__ void wait(uint32_t bar, uint32_t parity)
{
    while (!mbar_try(bar, parity)) {
    }
}

/* ---- products ---- */

constexpr uint32_t bar_at = 96 * 1024; /* behind the tiles */

/*
 * D[64][256] = A B^T of 64 k's. K-major operands are [rows][64 k], others [64 k][rows] in blocks of 64 columns, each 64
 * rows of 128 bytes.
 */
template <bool TransposedA, bool TransposedB>
__global__ void product_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float *out)
{
    const uint32_t smem = smem_address(dynamic_shared()), b_at = smem + 32 * 1024, bar = smem + bar_at;
    if (threadIdx.x == 0) {
        mbar_init(bar, 1);
        mbar_init_fence();
        mbar_expect(bar, (64 + 256) * 128);
        tma_load_2d(smem, &a, bar, 0, 0);
        if (TransposedB)
            for (int32_t i = 0; i < 4; i++)
                tma_load_2d(b_at + static_cast<uint32_t>(i) * 64 * 128, &b, bar, 64 * i, 0);
        else
            tma_load_2d(b_at, &b, bar, 0, 0);
    }
    __syncthreads();
    wait(bar, 0);
    float d[128];
    const uint64_t at = TransposedA ? wgmma_descriptor_mn(smem, 64 * 128) : wgmma_descriptor(smem);
    const uint64_t bt = TransposedB ? wgmma_descriptor_mn(b_at, 64 * 128) : wgmma_descriptor(b_at);
    wgmma_fence();
    for (uint32_t i = 0; i < 4; i++)
        wgmma_m64n256k16<TransposedA, TransposedB>(d, at + (TransposedA ? 128 : 2) * i,
                                                   bt + (TransposedB ? 128 : 2) * i, i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (uint32_t i = 0; i < 128; i++)
        out[(row + (i / 2 % 2) * 8) * 256 + i / 4 * 8 + column + i % 2] = d[i];
}

template <bool TransposedA, bool TransposedB> void check_product()
{
    std::vector<uint16_t> a(64 * 64), b(256 * 64);
    std::vector<float> want(64 * 256), none(64 * 256);
    auto value = [](uint32_t i) { return static_cast<float>(static_cast<int>(i * 2654435761u >> 28) - 8); };
    for (uint32_t k = 0; k < 64; k++) {
        for (uint32_t r = 0; r < 64; r++)
            a[TransposedA ? k * 64 + r : r * 64 + k] = bf16(value(r * 64 + k));
        for (uint32_t c = 0; c < 256; c++)
            b[TransposedB ? k * 256 + c : c * 64 + k] = bf16(value(7777 + c * 64 + k));
    }
    for (uint32_t r = 0; r < 64; r++)
        for (uint32_t c = 0; c < 256; c++)
            for (uint32_t k = 0; k < 64; k++)
                want[r * 256 + c] += value(r * 64 + k) * value(7777 + c * 64 + k);
    device_array<uint16_t> on_a(a), on_b(b);
    device_array<float> out(none);
    run(product_kernel<TransposedA, TransposedB>, 1, 128, bar_at + 8, map_of(on_a.at, 64, 64, 64),
        TransposedB ? map_of(on_b.at, 256, 64, 64) : map_of(on_b.at, 64, 256, 256), out.at);
    assert_true(out.get() == want);
}

void products_of_any_orientation_are_exact_on_small_integers(void **)
{
    check_product<false, false>();
    check_product<true, false>();
    check_product<false, true>();
    check_product<true, true>();
}

/* ---- copies ---- */

__global__ void box_kernel(const __grid_constant__ CUtensorMap map, int32_t x, int32_t y, uint16_t *out)
{
    const uint32_t smem = smem_address(dynamic_shared()), bar = smem + 1024;
    if (threadIdx.x == 0) {
        mbar_init(bar, 1);
        mbar_expect(bar, 1024);
        tma_load_2d(smem, &map, bar, x, y);
    }
    __syncthreads();
    wait(bar, 0);
    for (uint32_t i = threadIdx.x; i < 512; i += blockDim.x) {
        uint32_t row = i / 64, chunk = i % 64 / 8;
        out[i] = *reinterpret_cast<uint16_t *>(dynamic_shared() + row * 128 + (chunk ^ row) * 16 + i % 8 * 2);
    }
}

void a_box_is_swizzled_and_zero_outside_of_its_tensor(void **)
{
    std::vector<uint16_t> from(72 * 10);
    for (uint32_t i = 0; i < from.size(); i++)
        from[i] = static_cast<uint16_t>(i + 1);
    device_array<uint16_t> on(from);
    for (int32_t x : { 0, 8, 64, -16 })
        for (int32_t y : { 0, 5, -3 }) {
            device_array<uint16_t> out(std::vector<uint16_t>(512));
            run(box_kernel, 1, 64, 2048, map_of(on.at, 72, 10, 8), x, y, out.at);
            std::vector<uint16_t> got = out.get();
            for (int32_t i = 0; i < 512; i++) {
                int32_t r = y + i / 64, c = x + i % 64;
                bool inside = r >= 0 && r < 10 && c >= 0 && c < 72;
                assert_int_equal(got[static_cast<size_t>(i)], inside ? r * 72 + c + 1 : 0);
            }
        }
}

__global__ void __cluster_dims__(2, 1, 1) multicast_kernel(const __grid_constant__ CUtensorMap map, uint32_t *out)
{
    const uint32_t smem = smem_address(dynamic_shared()), bar = smem + 2048, word = smem + 2064;
    if (threadIdx.x == 0) {
        mbar_init(bar, 1);
        mbar_init_fence();
    }
    cluster_sync();
    if (threadIdx.x == 0) {
        const uint32_t other = 1 - cluster_rank();
        mbar_expect(bar, 1024 + 16);
        if (cluster_rank() == 0)
            tma_load_2d_multicast(smem, &map, bar, 0, 0, 3);
        store_async_16(cluster_address(word, other), make_uint4(cluster_rank(), 1, 2, 3), cluster_address(bar, other));
    }
    wait(bar, 0);
    if (threadIdx.x == 0) {
        out[2 * blockIdx.x] = *reinterpret_cast<uint16_t *>(dynamic_shared());
        out[2 * blockIdx.x + 1] = load_shared_16(word).x;
    }
    cluster_sync();
}

void a_multicast_and_a_remote_store_reach_the_other_block(void **)
{
    device_array<uint16_t> on(std::vector<uint16_t>(64 * 8, 77));
    device_array<uint32_t> out(std::vector<uint32_t>(12));
    run(multicast_kernel, 6, 32, 4096, map_of(on.at, 64, 8, 8), out.at);
    std::vector<uint32_t> got = out.get();
    for (uint32_t b = 0; b < 6; b++) {
        assert_int_equal(got[2 * b], 77);
        assert_int_equal(got[2 * b + 1], 1 - b % 2);
    }
}

/* Without a wait, what a copy brings is there in some runs and NaN in others. */
__global__ void impatient_kernel(const uint32_t *from, uint32_t *out)
{
    const uint32_t smem = smem_address(dynamic_shared());
    cp_async_16(smem + threadIdx.x * 16, from, 16);
    cp_async_commit();
    if (*reinterpret_cast<uint32_t *>(dynamic_shared() + threadIdx.x * 16) == 5)
        atomicAdd(out, 1);
    cp_async_wait<0>();
    if (*reinterpret_cast<uint32_t *>(dynamic_shared() + threadIdx.x * 16) == 5)
        atomicAdd(out + 1, 1);
}

void a_copy_lands_early_or_late_but_before_its_wait_ends(void **)
{
    device_array<uint32_t> from(std::vector<uint32_t>(4, 5)), out(std::vector<uint32_t>(2));
    for (int i = 0; i < 16; i++)
        run(impatient_kernel, 1, 64, 1024, from.at, out.at);
    assert_in_range(out.get()[0], 1, 64 * 16 - 1);
    assert_int_equal(out.get()[1], 64 * 16);
}

/* ---- lanes and blocks ---- */

__global__ void lanes_kernel(uint32_t *out)
{
    const uint32_t lane = threadIdx.x;
    uint32_t wrong = 0;
    wrong |= __shfl_sync(~0u, lane * 3, 7) != 21;
    wrong |= __shfl_up_sync(~0u, lane, 2) != (lane < 2 ? lane : lane - 2);
    wrong |= __shfl_xor_sync(~0u, lane, 5) != (lane ^ 5u);
    wrong |= __match_any_sync(~0u, lane % 4) != 0x11111111u << lane % 4;
    wrong |= __ballot_sync(~0u, lane > 30) != 1u << 31;
    wrong |= __reduce_add_sync(~0u, lane) != 496;
    if (lane < 8)
        wrong |= __reduce_max_sync(0xffu, lane) != 7;
    else
        wrong |= __reduce_min_sync(~0xffu, lane) != 8;
    wrong |= __syncthreads_or(lane == 31) == 0;
    wrong |= __syncthreads_count(lane < 9) != 9;
    const uint32_t smem = smem_address(dynamic_shared());
    stmatrix_x4(smem + (lane % 8) * 16 + lane / 8 * 128, lane, lane + 100, lane + 200, lane + 300);
    __syncwarp();
    uint32_t v[4], t[4];
    emu::ldmatrix(smem + (lane % 8) * 16 + lane / 8 * 128, v, 4, false);
    emu::ldmatrix(smem + (lane % 8) * 16 + lane / 8 * 128, t, 4, true);
    for (uint32_t i = 0; i < 4; i++)
        wrong |= v[i] != lane + 100 * i;
    /* element [2 (lane % 4)][lane / 4] of the first: low or high half of its lane's register */
    const uint32_t holder = lane % 4 * 2 * 4 + lane / 8;
    wrong |= (t[0] & 0xffffu) != (lane / 4 % 2 ? 0 : holder);
    atomicAdd(out, wrong);
}

void lanes_exchange_what_the_manual_says(void **)
{
    device_array<uint32_t> out(std::vector<uint32_t>(1));
    for (int i = 0; i < 8; i++)
        run(lanes_kernel, 1, 32, 1024, out.at);
    assert_int_equal(out.get()[0], 0);
}

/* ---- mistakes ---- */

__global__ void lost_arrival_kernel()
{
    const uint32_t bar = smem_address(dynamic_shared());
    if (threadIdx.x == 0)
        mbar_init(bar, 2);
    __syncthreads();
    if (threadIdx.x == 0)
        mbar_arrive(bar);
    wait(bar, 0);
}

__global__ void surplus_arrival_kernel()
{
    const uint32_t bar = smem_address(dynamic_shared());
    mbar_init(bar, 1);
    mbar_arrive(bar, 2);
}

__global__ void split_warp_kernel()
{
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __shfl_sync(~0u, 1, 0);
}

__global__ void overrun_kernel(uint32_t *p, uint32_t count)
{
    p[threadIdx.x + count] = 1;
}

__global__ void misaligned_kernel(const uint8_t *p)
{
    __ldg(reinterpret_cast<const uint4 *>(p + 4));
}

__global__ void unfinished_copy_kernel(const uint32_t *from)
{
    for (uint32_t i = 0; i < 16; i++)
        cp_async_16(smem_address(dynamic_shared()), from, 16);
}

/* What a child that makes the mistake says before it is ended. */
template <class Mistake> std::string last_words(Mistake make)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        for (int n : { SIGSEGV, SIGBUS, SIGABRT }) /* cmocka has its own */
            signal(n, SIG_DFL);
        setenv("MOK_EMULATOR_SEED", "3", 1);
        for (int i = 0; i < 8; i++)
            make();
        _exit(0);
    }
    close(ends[1]);
    std::string said;
    char part[512];
    for (ssize_t n; (n = read(ends[0], part, sizeof(part))) > 0;)
        said.append(part, static_cast<size_t>(n));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFSIGNALED(status))
        fail_msg("nothing was found; said: %s", said.c_str());
    return said;
}

void assert_says(const std::string &said, const char *what)
{
    if (said.find(what) == std::string::npos)
        fail_msg("wanted \"%s\" in: %s", what, said.c_str());
}

void mistakes_are_named(void **)
{
    assert_says(last_words([] { run(lost_arrival_kernel, 1, 32, 64); }), "1 of 2 arrivals");
    assert_says(last_words([] { run(surplus_arrival_kernel, 1, 1, 64); }), "2 arrivals, 1 are left");
    assert_says(last_words([] { run(split_warp_kernel, 1, 32, 0); }), "meet in different instructions");
    assert_says(last_words([] {
                    device_array<uint32_t> a(std::vector<uint32_t>(64));
                    run(overrun_kernel, 1, 32, 0, a.at, 64u);
                }),
                "signal 11");
    assert_says(last_words([] {
                    device_array<uint8_t> a(std::vector<uint8_t>(64));
                    run(misaligned_kernel, 1, 1, 0, const_cast<const uint8_t *>(a.at));
                }),
                "not aligned to 16");
    assert_says(last_words([] {
                    device_array<uint32_t> a(std::vector<uint32_t>(64));
                    run(unfinished_copy_kernel, 1, 1, 64, const_cast<const uint32_t *>(a.at));
                }),
                "copies were under way");
}

__global__ void __cluster_dims__(4, 1, 1) wide_kernel()
{
}

void what_cannot_be_launched_is_refused(void **)
{
    assert_int_equal(launch(false, wide_kernel, 6, 32, 0, nullptr), cudaErrorInvalidConfiguration);
    assert_int_equal(launch(false, wide_kernel, 8, 1025, 0, nullptr), cudaErrorInvalidConfiguration);
    assert_int_equal(launch(false, wide_kernel, 8, 32, 49 * 1024, nullptr), cudaErrorInvalidValue);
    run(wide_kernel, 8, 32, 0);
}

} // namespace

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mistakes_are_named), /* first: its children must not inherit a GPU that runs */
        cmocka_unit_test(products_of_any_orientation_are_exact_on_small_integers),
        cmocka_unit_test(a_box_is_swizzled_and_zero_outside_of_its_tensor),
        cmocka_unit_test(a_multicast_and_a_remote_store_reach_the_other_block),
        cmocka_unit_test(a_copy_lands_early_or_late_but_before_its_wait_ends),
        cmocka_unit_test(lanes_exchange_what_the_manual_says),
        cmocka_unit_test(what_cannot_be_launched_is_refused),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
