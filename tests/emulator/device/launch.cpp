/* SPDX-License-Identifier: Apache-2.0 */
/* From a launch's configuration to a kernel that runs on a stream's thread; its seed and the manners drawn from it. */
#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "machine.h"

extern "C" const uintptr_t __start___patchable_function_entries[] __attribute__((weak));
extern "C" const uintptr_t __stop___patchable_function_entries[] __attribute__((weak));

namespace emu
{

void say_where_we_are();

namespace
{

constexpr uint32_t cluster_base = 64; /* as __cluster_dims__ has it */

std::mutex limits_lock;
std::map<const void *, uint32_t> limits; /* of dynamic shared memory */

/* Blocks of a cluster, from the number of no-operations that stand before the kernel. */
uint32_t cluster_of(const void *kernel)
{
    const uintptr_t at = reinterpret_cast<uintptr_t>(kernel);
    for (const uintptr_t *e = __start___patchable_function_entries; e != __stop___patchable_function_entries; e++) {
        const uintptr_t distance = at - *e;
        if (distance <= cluster_base || distance > cluster_base + 16)
            continue;
        const uint8_t *code = reinterpret_cast<const uint8_t *>(*e);
        if (std::all_of(code, code + distance, [](uint8_t byte) { return byte == 0x90; }))
            return static_cast<uint32_t>(distance - cluster_base);
    }
    return 1;
}

uint64_t number_of(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, nullptr, 0) : otherwise;
}

uint64_t mix(uint64_t v)
{
    v ^= v >> 30;
    v *= 0xbf58476d1ce4e5b9ull;
    v ^= v >> 27;
    v *= 0x94d049bb133111ebull;
    return v ^ v >> 31;
}

/* Blocks of this kernel that a device of so many SMs has room for. */
uint32_t room(const grid &g)
{
    int sms = 1;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    uint32_t per_sm = std::min(2048 / g.threads, 4u);
    if (g.shared_bytes)
        per_sm = std::max(1u, std::min(per_sm, shared_limit / (g.shared_bytes + 1024)));
    return static_cast<uint32_t>(sms) * per_sm;
}

manners draw(chance &c)
{
    static const uint32_t yields[] = { 2, 8, 64, 1000 }, late[] = { 0, 4, 4, 8 }, delays[] = { 50, 1000, 1000, 30000 };
    manners m = {};
    m.yield_one_in = yields[c.below(4)];
    m.stay_of_8 = c.below(8);
    m.late_of_8 = late[c.below(4)];
    m.longest_delay = delays[c.below(4)];
    return m;
}

/* Not always as many blocks at once as there is room for: others may use the device. */
void admit(chance &c, grid &g)
{
    const uint32_t whole = std::max(room(g) / g.cluster_size, 1u);
    g.at_once = (c.one_in(4) ? 1 + c.below(whole) : whole) * g.cluster_size;
    g.alone = c.one_in(3);
}

std::atomic<uint64_t> launches{ 0 }, device_clock{ 0 };

/* ---- accesses that no memory answers ---- */

void fault(int signal, siginfo_t *info, void *)
{
    fprintf(stderr, "emulator: signal %d, address %p\n", signal, info->si_addr);
    say_where_we_are();
    void *frames[40];
    backtrace_symbols_fd(frames, backtrace(frames, 40), STDERR_FILENO);
    ::signal(signal, SIG_DFL);
    raise(signal);
}

/* On a stack of its own: a fiber may have used up its. */
void watch_faults()
{
    static thread_local uint8_t *stack = nullptr;
    struct sigaction old = {}, act = {};
    if (stack)
        return;
    stack = static_cast<uint8_t *>(malloc(65536)); /* as long as the thread */
    stack_t s = {};
    s.ss_sp = stack;
    s.ss_size = 65536;
    sigaltstack(&s, nullptr);
    act.sa_sigaction = fault;
    act.sa_flags = SA_SIGINFO | SA_ONSTACK | static_cast<int>(SA_RESETHAND);
    for (int n : { SIGSEGV, SIGBUS })
        if (sigaction(n, nullptr, &old) == 0 && old.sa_handler == SIG_DFL)
            sigaction(n, &act, nullptr);
}

void run_grid(void *cookie);

std::unique_ptr<grid> take_early(grid &last)
{
    std::unique_ptr<grid> next(static_cast<grid *>(emulated_stream_next_early(last.stream, run_grid)));
    if (next)
        admit(self->random, *next);
    return next;
}

void run_grid(void *cookie)
{
    std::unique_ptr<grid> g(static_cast<grid *>(cookie));
    machine m;
    timespec t;

    watch_faults();
    clock_gettime(CLOCK_MONOTONIC, &t);
    m.seed = mix(number_of("MOK_EMULATOR_SEED", 1) * 0x9e3779b97f4a7c15ull + g->number) | 1;
    m.random.state = m.seed;
    m.with = draw(m.random);
    m.next_early = take_early;
    admit(m.random, *g);
    m.now = std::max<uint64_t>(device_clock,
                               static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec));
    self = &m;
    m.run(std::move(g));
    self = nullptr;
    uint64_t seen = device_clock;
    while (seen < m.now && !device_clock.compare_exchange_weak(seen, m.now)) {
    }
}

/* A launch that a graph repeats. */
struct kept_launch {
    const void *kernel;
    dim3 size, block;
    size_t shared_bytes;
    bool early;
    std::function<void()> body;
};

cudaError_t launch_kept(void *cookie, cudaStream_t stream)
{
    const kept_launch &k = *static_cast<const kept_launch *>(cookie);
    return launch(k.kernel, k.size, k.block, k.shared_bytes, stream, k.early, k.body);
}

void drop_kept(void *cookie)
{
    delete static_cast<kept_launch *>(cookie);
}

} // namespace

cudaError_t set_shared_limit(const void *kernel, uint32_t bytes)
{
    std::lock_guard<std::mutex> hold(limits_lock);
    if (bytes > shared_limit)
        return cudaErrorInvalidValue;
    limits[kernel] = bytes;
    return cudaSuccess;
}

cudaError_t launch(const void *kernel, dim3 size, dim3 block, size_t shared_bytes, cudaStream_t stream, bool early,
                   std::function<void()> body)
{
    auto g = std::make_unique<grid>();
    g->kernel = kernel;
    g->size = { size.x, size.y, size.z };
    g->block_size = { block.x, block.y, block.z };
    g->threads = block.x * block.y * block.z;
    g->blocks = static_cast<uint64_t>(size.x) * size.y * size.z;
    g->shared_bytes = static_cast<uint32_t>(shared_bytes);
    g->cluster_size = cluster_of(kernel);
    g->stream = stream;
    g->body = std::move(body);
    if (g->threads == 0 || g->threads > 1024 || g->blocks == 0 || size.x % g->cluster_size || size.y > 65535 ||
        size.z > 65535)
        return cudaErrorInvalidConfiguration;
    {
        std::lock_guard<std::mutex> hold(limits_lock);
        auto limit = limits.find(kernel);
        if (shared_bytes >
            (limit == limits.end() ? shared_default_limit : std::max(limit->second, shared_default_limit)))
            return cudaErrorInvalidValue;
    }
    if (emulated_stream_captures(stream)) {
        auto kept = std::make_unique<kept_launch>(
            kept_launch{ kernel, size, block, shared_bytes, early, std::move(g->body) });
        const emulated_node node = { launch_kept, drop_kept, kept.get() };
        cudaError_t e = emulated_capture(&node);
        if (e == cudaSuccess)
            kept.release();
        return e;
    }
    g->number = ++launches;
    cudaError_t e = emulated_stream_call(stream, run_grid, g.get(), early);
    if (e == cudaSuccess)
        g.release();
    return e;
}

} // namespace emu
