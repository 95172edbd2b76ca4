/* SPDX-License-Identifier: Apache-2.0 */
/* Stacks, and how one is left for another. */
#include "fiber.h"

#include <string.h>
#include <sys/mman.h>

#include <mutex>
#include <vector>

#include "machine.h"

asm(R"(
.text
.globl mok_emulator_switch
.type mok_emulator_switch, @function
mok_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size mok_emulator_switch, .-mok_emulator_switch
.section .note.GNU-stack,"",@progbits
.text
)");

namespace emu
{

namespace
{

constexpr uint32_t page = 4096, slab = 64;

struct pool {
    std::mutex lock;
    std::vector<void *> stacks;
    std::vector<uint8_t *> regions;
    uint32_t made = 0;
};

pool &shared_pool()
{
    static pool *p = new pool; /* streams may outlive static objects */
    return *p;
}

uint8_t *reserve(uint64_t bytes)
{
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        fail("no memory for %llu bytes of stacks or shared memory", static_cast<unsigned long long>(bytes));
    return static_cast<uint8_t *>(p);
}

} // namespace

void *stack_take()
{
    pool &p = shared_pool();
    std::lock_guard<std::mutex> hold(p.lock);
    if (p.stacks.empty()) {
        uint8_t *at = reserve(static_cast<uint64_t>(slab) * stack_bytes);
        for (uint32_t i = slab; i-- > 0;) {
            mprotect(at + i * stack_bytes, page, PROT_NONE);
            p.stacks.push_back(at + i * stack_bytes);
        }
    }
    void *stack = p.stacks.back();
    p.stacks.pop_back();
    return stack;
}

void stack_give(void *stack)
{
    pool &p = shared_pool();
    std::lock_guard<std::mutex> hold(p.lock);
    p.stacks.push_back(stack);
}

uint8_t *region_take()
{
    pool &p = shared_pool();
    std::lock_guard<std::mutex> hold(p.lock);
    if (p.regions.empty()) {
        uint8_t *at = reserve(region_bytes + 2 * page);
        mprotect(at, page, PROT_NONE);
        mprotect(at + page + region_bytes, page, PROT_NONE);
        return at + page;
    }
    uint8_t *region = p.regions.back();
    p.regions.pop_back();
    return region;
}

void region_give(uint8_t *region)
{
    pool &p = shared_pool();
    std::lock_guard<std::mutex> hold(p.lock);
    p.regions.push_back(region);
}

/* Stacks begin at different distances from their ends, so that not all of them fall on the same lines of a cache. */
void *stack_ready(void *stack, void (*entry)())
{
    const uintptr_t number = reinterpret_cast<uintptr_t>(stack) / stack_bytes;
    uintptr_t top = reinterpret_cast<uintptr_t>(stack) + stack_bytes - 128 - number % 61 * 128;
    uintptr_t *sp = reinterpret_cast<uintptr_t *>(top / 64 * 64);
    *--sp = 0; /* where entry would return to: nowhere */
    *--sp = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; i++)
        *--sp = 0;
    return sp;
}

} // namespace emu
