/* SPDX-License-Identifier: Apache-2.0 */
/* Where threads wait for each other: lanes of a warp, barriers of blocks and clusters, mbarriers. */
#include <stdio.h>
#include <string.h>

#include "machine.h"

namespace emu
{

/* ---- warps ---- */

const char *meeting_name(uint32_t kind)
{
    static const char *const names[] = { "__syncwarp", "shuffle",  "match", "vote",        "reduce",
                                         "stmatrix",   "ldmatrix", "wgmma", "wgmma group", "setmaxnreg" };
    return names[kind];
}

static void finish(warp &w, size_t i, void (*complete)(meeting &))
{
    meeting m = w.meetings[i];
    w.meetings.erase(w.meetings.begin() + static_cast<ptrdiff_t>(i));
    if (complete)
        complete(m);
    for (uint32_t l = 0; l < 32; l++)
        if (m.arrived >> l & 1u) {
            w.lane[l]->result = m.lane[l];
            if (w.lane[l] != current)
                self->wake(w.lane[l]);
        }
}

payload meet(uint32_t mask, meeting_kind kind, const payload &own, void (*complete)(meeting &))
{
    fiber *f = current;
    warp &w = *f->in;
    size_t i = 0;

    if (!(mask >> f->lane & 1u))
        fail("%s: lane %u is not in its mask %#x", meeting_name(kind), f->lane, mask);
    for (; i < w.meetings.size(); i++)
        if (w.meetings[i].mask & mask)
            break;
    if (i == w.meetings.size()) {
        w.meetings.emplace_back();
        w.meetings[i].mask = mask;
        w.meetings[i].kind = kind;
        w.meetings[i].arrived = 0;
    }
    meeting &m = w.meetings[i];
    if (m.mask != mask || m.kind != kind)
        fail("lanes of a warp meet in different instructions: %s with mask %#x here, %s with mask %#x there",
             meeting_name(kind), mask, meeting_name(m.kind), m.mask);
    m.lane[f->lane] = own;
    m.arrived |= 1u << f->lane;
    if (m.arrived == (mask & w.alive)) {
        finish(w, i, complete);
        return f->result;
    }
    self->wait(WAIT_LANES, mask, kind);
    return f->result;
}

/* Lanes that have ended are not waited for. What they would have brought is only missed by more than a sync. */
void end_of_lane(warp &w, uint32_t)
{
    for (size_t i = 0; i < w.meetings.size(); i++)
        if (w.meetings[i].arrived == (w.meetings[i].mask & w.alive)) {
            if (w.meetings[i].kind != MEET_SYNC)
                fail("%s: a lane of its mask %#x has ended", meeting_name(w.meetings[i].kind), w.meetings[i].mask);
            finish(w, i, nullptr);
            return;
        }
}

void complete_shuffle(meeting &m)
{
    meeting before = m;
    for (uint32_t l = 0; l < 32; l++)
        if (m.arrived >> l & 1u) {
            uint64_t from = before.lane[l].v[1];
            if (from >= 32 || !(m.arrived >> from & 1u))
                fail("shuffle: lane %u reads lane %llu, which does not take part", l,
                     static_cast<unsigned long long>(from));
            m.lane[l].v[0] = before.lane[from].v[0];
        }
}

void complete_match(meeting &m)
{
    meeting before = m;
    for (uint32_t l = 0; l < 32; l++) {
        uint32_t same = 0;
        for (uint32_t k = 0; k < 32; k++)
            if ((m.arrived >> k & 1u) && before.lane[k].v[0] == before.lane[l].v[0])
                same |= 1u << k;
        m.lane[l].v[0] = same;
    }
}

void complete_vote(meeting &m)
{
    uint32_t yes = 0;
    for (uint32_t l = 0; l < 32; l++)
        if ((m.arrived >> l & 1u) && static_cast<uint32_t>(m.lane[l].v[0]))
            yes |= 1u << l;
    for (payload &p : m.lane)
        p.v[0] = yes;
}

/* ---- blocks ---- */

static void pass(thread_barrier &b, uint32_t expected)
{
    int result = b.kind == VOTE_AND     ? b.votes == static_cast<int>(expected)
                 : b.kind == VOTE_COUNT ? b.votes
                                        : b.votes != 0;
    for (fiber *f : b.waiting)
        f->vote = result;
    if (current)
        current->vote = result;
    self->wake_all(b.waiting);
    b.arrived = 0;
    b.votes = 0;
    self->progress++;
}

static bool arrive(block &blk, thread_barrier &b, uint32_t id, uint32_t threads, vote kind, int value)
{
    if (b.arrived != 0 && (b.expected != threads || b.kind != kind))
        fail("barrier %u: threads arrive with different counts or kinds (%u, %u)", id, b.expected, threads);
    b.expected = threads;
    b.kind = kind;
    b.arrived++;
    b.votes += value != 0;
    uint32_t expected = threads ? threads : blk.alive;
    if (b.arrived > expected)
        fail("barrier %u: more than %u threads arrive", id, expected);
    if (b.arrived < expected)
        return false;
    pass(b, expected);
    return true;
}

int block_sync(uint32_t id, uint32_t threads, vote kind, int value)
{
    block &blk = my_block();
    if (id >= 16 || threads % 32)
        fail("barrier %u for %u threads: ids end at 15, threads are counted in warps", id, threads);
    thread_barrier &b = blk.barrier[id];
    if (!arrive(blk, b, id, threads, kind, value)) {
        b.waiting.push_back(current);
        self->wait(WAIT_BLOCK, id, threads);
    }
    return current->vote;
}

void block_arrive(uint32_t id, uint32_t threads)
{
    block &blk = my_block();
    if (id >= 16 || threads % 32 || threads == 0)
        fail("barrier %u for %u threads: ids end at 15, threads are counted in warps", id, threads);
    arrive(blk, blk.barrier[id], id, threads, VOTE_NONE, 0);
}

static void end_cluster_phase(cluster &c)
{
    c.arrived = 0;
    c.phase++;
    self->wake_all(c.waiting);
    self->progress++;
}

void end_of_thread(block &b)
{
    cluster &c = *b.in;
    for (thread_barrier &t : b.barrier)
        if (t.arrived != 0 && t.expected == 0 && t.arrived == b.alive)
            pass(t, t.arrived);
    if (c.arrived != 0 && c.arrived == c.alive)
        end_cluster_phase(c);
}

void cluster_arrive()
{
    cluster &c = *my_block().in;
    current->cluster_phase = c.phase;
    if (++c.arrived == c.alive)
        end_cluster_phase(c);
}

void cluster_wait()
{
    cluster &c = *my_block().in;
    while (c.phase == current->cluster_phase) {
        c.waiting.push_back(current);
        self->wait(WAIT_CLUSTER);
    }
}

/* ---- shared memory ---- */

uint8_t *shared_base()
{
    return my_block().shared;
}

uint32_t shared_address(const void *p)
{
    block &b = my_block();
    const uint8_t *at = static_cast<const uint8_t *>(p);
    if (at < b.shared || at > b.shared + b.shared_bytes)
        fail("%p is not in the block's shared memory", p);
    return static_cast<uint32_t>(at - b.shared) + shared_start;
}

uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    if (rank >= my_block().in->blocks.size())
        fail("mapa: block %u of a cluster of %zu", rank, my_block().in->blocks.size());
    return (address & ((1u << rank_shift) - 1)) | (rank + 1) << rank_shift;
}

static block &block_of(uint32_t address, bool own)
{
    block &b = my_block();
    uint32_t rank = address >> rank_shift;
    if (rank == 0 || rank - 1 == b.rank)
        return b;
    if (own)
        fail("shared-memory address %#x is another block's", address);
    if (rank > b.in->blocks.size())
        fail("shared-memory address %#x is of no block", address);
    block &other = *b.in->blocks[rank - 1];
    if (other.alive == 0)
        fail("shared-memory address %#x is of a block that has ended", address);
    return other;
}

static uint8_t *pointer_in(block &b, uint32_t address, uint32_t bytes, uint32_t align)
{
    uint32_t offset = address & ((1u << rank_shift) - 1);
    if (offset < shared_start || offset - shared_start + bytes > b.shared_bytes)
        fail("shared-memory address %#x, %u bytes: the block has [%#x, %#x)", address, bytes, shared_start,
             shared_start + b.shared_bytes);
    if (offset % align)
        fail("shared-memory address %#x is not aligned to %u", address, align);
    return b.shared + (offset - shared_start);
}

uint8_t *shared_pointer(uint32_t address, uint32_t bytes, uint32_t align, bool own)
{
    return pointer_in(block_of(address, own), address, bytes, align);
}

/* ---- mbarriers: eight bytes of shared memory; who waits is noted beside ---- */

struct mbar_state {
    uint64_t pending : 20, expected : 20, phase : 1;
    int64_t bytes : 22;
    uint64_t valid : 1;
};
static_assert(sizeof(mbar_state) == 8, "an mbarrier's size");

static mbar_waiters *waiters_of(block &b, uint32_t offset)
{
    for (mbar_waiters &w : b.mbars)
        if (w.address == offset)
            return &w;
    return nullptr;
}

static mbar_state load_state(block &b, uint32_t bar, mbar_waiters **ret)
{
    uint32_t offset = bar & ((1u << rank_shift) - 1);
    mbar_state s;
    memcpy(&s, pointer_in(b, bar, 8, 8), sizeof(s));
    *ret = waiters_of(b, offset);
    if (!*ret)
        fail("mbarrier %#x was not initialised", bar);
    if (!s.valid || s.expected == 0)
        fail("mbarrier %#x was overwritten", bar);
    return s;
}

static void store_state(block &b, uint32_t bar, mbar_state s, mbar_waiters &w)
{
    if (s.pending == 0 && s.bytes == 0) {
        s.phase = !s.phase;
        s.pending = s.expected;
        self->wake_all(w.waiting);
    }
    memcpy(pointer_in(b, bar, 8, 8), &s, sizeof(s));
    self->progress++;
}

void mbar_init(uint32_t bar, uint32_t count)
{
    block &b = my_block();
    mbar_state s = {};
    if (count == 0 || count >= 1u << 20)
        fail("mbarrier.init: count %u", count);
    s.pending = s.expected = count & 0xfffffu;
    s.valid = 1;
    memcpy(shared_pointer(bar, 8, 8, true), &s, sizeof(s));
    if (mbar_waiters *w = waiters_of(b, bar)) {
        if (!w->waiting.empty())
            fail("mbarrier.init: threads wait for %#x", bar);
        return;
    }
    b.mbars.push_back({ bar, {} });
}

void mbar_invalidate(uint32_t bar)
{
    block &b = my_block();
    mbar_waiters *w;
    load_state(b, bar, &w);
    if (!w->waiting.empty())
        fail("mbarrier.inval: threads wait for %#x", bar);
    b.mbars.erase(b.mbars.begin() + (w - b.mbars.data()));
}

static void count_down(mbar_state &s, uint32_t bar, uint32_t count)
{
    if (count == 0 || count > s.pending)
        fail("mbarrier %#x: %u arrivals, %u are left of its phase", bar, count, static_cast<uint32_t>(s.pending));
    s.pending = (s.pending - count) & 0xfffffu;
}

void mbar_arrive(uint32_t bar, uint32_t count, bool own)
{
    block &b = block_of(bar, own);
    mbar_waiters *w;
    mbar_state s = load_state(b, bar, &w);
    count_down(s, bar, count);
    store_state(b, bar, s, *w);
    maybe_yield();
}

static void add_bytes(mbar_state &s, uint32_t bar, int64_t bytes)
{
    if (s.bytes + bytes > (1 << 20) - 1 || s.bytes + bytes < -(1 << 20))
        fail("mbarrier %#x expects %lld bytes more than it can count", bar, static_cast<long long>(bytes));
    s.bytes = s.bytes + bytes;
}

void mbar_expect(uint32_t bar, uint32_t bytes, bool arrives, bool own)
{
    block &b = block_of(bar, own);
    mbar_waiters *w;
    mbar_state s = load_state(b, bar, &w);
    add_bytes(s, bar, bytes);
    if (arrives)
        count_down(s, bar, 1);
    store_state(b, bar, s, *w);
    maybe_yield();
}

void mbar_complete_bytes(block &b, uint32_t offset, uint32_t bytes)
{
    mbar_waiters *w;
    mbar_state s = load_state(b, offset, &w);
    add_bytes(s, offset, -static_cast<int64_t>(bytes));
    store_state(b, offset, s, *w);
}

bool mbar_try(uint32_t bar, uint32_t parity)
{
    block &b = my_block();
    mbar_waiters *w;
    if (load_state(b, bar, &w).phase != (parity & 1u)) {
        maybe_yield();
        return true;
    }
    if (self->random.one_in(32)) { /* the instruction may give up */
        self->yield();
    } else {
        w->waiting.push_back(current);
        self->wait(WAIT_MBAR, bar & ((1u << rank_shift) - 1), parity);
    }
    return load_state(b, bar, &w).phase != (parity & 1u);
}

bool mbar_test(uint32_t bar, uint32_t parity)
{
    mbar_waiters *w;
    maybe_yield();
    return load_state(my_block(), bar, &w).phase != (parity & 1u);
}

void describe_mbar(block &b, uint32_t address, char *text, size_t size)
{
    mbar_state s;
    memcpy(&s, pointer_in(b, address, 8, 8), sizeof(s));
    snprintf(text, size, " %#x (byte %u of dynamic shared memory; phase %u, %u of %u arrivals and %lld bytes missing)",
             address, address - shared_start, static_cast<unsigned>(s.phase), static_cast<unsigned>(s.pending),
             static_cast<unsigned>(s.expected), static_cast<long long>(s.bytes));
}

void check_block_left_nothing(block &b)
{
    if (b.in_flight != 0)
        fail("block %llu ended while %u copies into its shared memory were under way",
             static_cast<unsigned long long>(b.number), b.in_flight);
}

/* ---- registers ---- */

void registers(uint32_t count, bool raise)
{
    warp &w = *current->in;
    if (count % 8 || count < 24 || count > 256)
        fail("setmaxnreg %u", count);
    meet(~0u, MEET_REGISTERS, {}, [](meeting &) {});
    /* the last lane to come runs on first */
    if (w.registers == count)
        return;
    block &b = *w.in;
    if (raise ? count < w.registers : count > w.registers)
        fail("setmaxnreg: from %u to %u registers is the other direction", w.registers, count);
    while (raise && b.registers_free < 32ull * (count - w.registers)) {
        sleep_ns(100);
        if (w.registers == count)
            return;
    }
    b.registers_free += 32ull * w.registers;
    b.registers_free -= 32ull * count;
    w.registers = count;
    self->progress++;
}

/* ---- kernels that follow each other ---- */

void wait_for_previous_kernel()
{
    grid &g = *my_block().of;
    while (!g.previous_done) {
        g.waiting.push_back(current);
        self->wait(WAIT_KERNEL);
    }
}

void let_next_kernel_start()
{
    block &b = my_block();
    if (!b.let_next) {
        b.let_next = true;
        b.of->let_next++;
        self->changes++;
    }
    maybe_yield();
}

} // namespace emu
