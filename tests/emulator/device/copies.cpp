/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies that land later than they are asked for. Each is done when it is asked for, or when whoever waits for it is
 * told that it has landed: the first finds places that are overwritten too early, the second those that are read too
 * early.
 */
#include <string.h>

#include "machine.h"

namespace emu
{

static bool draw_late()
{
    return self->random.below(8) < self->with.late_of_8;
}

static uint64_t landing_time()
{
    return self->now + 100 + self->random.below(self->with.longest_delay);
}

static uint32_t swizzle(uint32_t address, uint32_t mode)
{
    static const uint32_t bits[] = { 0, 1, 3, 7 }; /* none, 32, 64, 128 bytes */
    return address ^ ((address >> 7 & bits[mode]) << 4);
}

/* ---- tensors ---- */

struct tensor_copy {
    emulated_tensor_map map;
    int64_t at[5];
};

static tensor_copy make_tensor(const CUtensorMap *map, uint32_t dimensions, const int32_t *at)
{
    tensor_copy t = {};
    if (reinterpret_cast<uintptr_t>(map) % 64)
        fail("tensor map at %p: not aligned to 64 bytes", static_cast<const void *>(map));
    memcpy(&t.map, map, sizeof(t.map));
    if (t.map.magic != EMULATED_TENSOR_MAP_MAGIC)
        fail("tensor map at %p: there is none", static_cast<const void *>(map));
    if (t.map.dimensions != dimensions)
        fail("tensor map of %u dimensions used with %u", t.map.dimensions, dimensions);
    for (uint32_t i = 0; i < dimensions; i++)
        t.at[i] = at[i];
    return t;
}

static uint32_t row_bytes(const emulated_tensor_map &m)
{
    return static_cast<uint32_t>(m.box[0]) * m.element_bytes;
}

static uint32_t box_rows(const emulated_tensor_map &m)
{
    uint32_t rows = 1;
    for (uint32_t i = 1; i < m.dimensions; i++)
        rows *= m.box[i];
    return rows;
}

/* Row r of the box: where it begins in memory, NULL when it lies outside. */
static uint8_t *row_of(const tensor_copy &t, uint32_t r)
{
    uint64_t offset = 0;
    for (uint32_t i = 1; i < t.map.dimensions; i++) {
        int64_t index = t.at[i] + r % t.map.box[i];
        r /= t.map.box[i];
        if (index < 0 || static_cast<uint64_t>(index) >= t.map.size[i])
            return nullptr;
        offset += static_cast<uint64_t>(index) * t.map.stride[i - 1];
    }
    return reinterpret_cast<uint8_t *>(t.map.base) + offset;
}

/* Bytes [from, to) of a row of the box lie inside the tensor. */
static void inside(const tensor_copy &t, int64_t *from, int64_t *to)
{
    int64_t e = t.map.element_bytes, left = t.at[0] < 0 ? -t.at[0] : 0;
    int64_t right = static_cast<int64_t>(t.map.size[0]) - t.at[0];
    *from = left * e;
    *to = std::min<int64_t>(row_bytes(t.map), right * e);
}

static void load_box(const tensor_copy &t, block &b, uint32_t dst)
{
    const uint32_t bytes = row_bytes(t.map), rows = box_rows(t.map);
    int64_t from, to;
    inside(t, &from, &to);
    for (uint32_t r = 0; r < rows; r++) {
        const uint8_t *row = row_of(t, r);
        uint8_t line[4096];
        memset(line, 0, bytes);
        if (row && to > from)
            memcpy(line + from, row + t.at[0] * t.map.element_bytes + from, static_cast<size_t>(to - from));
        for (uint32_t c = 0; c < bytes; c += 16)
            memcpy(b.shared + (swizzle(dst + r * bytes + c, t.map.swizzle) - shared_start), line + c, 16);
    }
}

void tensor_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, uint32_t dimensions, const int32_t *at,
                 uint16_t mask)
{
    block &own = my_block();
    tensor_copy t = make_tensor(map, dimensions, at);
    const uint32_t bytes = row_bytes(t.map) * box_rows(t.map), size = own.in->blocks.size() & 0xffffu;
    const uint32_t offset = dst & ((1u << rank_shift) - 1), bar_offset = bar & ((1u << rank_shift) - 1);
    if (mask == 0)
        mask = static_cast<uint16_t>(1u << (dst >> rank_shift ? (dst >> rank_shift) - 1 : own.rank));
    if (mask >> size)
        fail("multicast to %#x in a cluster of %u", mask, size);
    shared_pointer(dst, bytes, t.map.swizzle ? 128u << (t.map.swizzle == 3 ? 3 : t.map.swizzle) : 128, false);
    for (uint32_t rank = 0; rank < size; rank++) {
        if (!(mask >> rank & 1u))
            continue;
        block *b = own.in->blocks[rank].get();
        bool late = draw_late();
        b->in_flight++;
        if (!late)
            load_box(t, *b, offset);
        self->at(landing_time(), [=] {
            if (late)
                load_box(t, *b, offset);
            b->in_flight--;
            mbar_complete_bytes(*b, bar_offset, bytes);
        });
    }
    maybe_yield();
}

/* ---- sixteen bytes by each thread ---- */

static void land(const small_copy &c)
{
    uint8_t *to = shared_pointer(c.dst, c.size, c.size, true);
    memcpy(to, c.src, c.bytes);
    memset(to + c.bytes, 0, c.size - c.bytes);
}

void cp_async(uint32_t dst, const void *src, uint32_t size, uint32_t bytes)
{
    if (bytes > size)
        fail("cp.async of %u bytes", bytes);
    if (bytes)
        check_aligned(src, size);
    small_copy c = { dst, size, bytes, current->copy_group, src };
    if (draw_late()) {
        shared_pointer(dst, size, size, true);
        current->copies.push_back(c);
    } else {
        land(c);
    }
}

void cp_async_commit()
{
    current->copy_group++;
}

void cp_async_wait(uint32_t groups)
{
    fiber *f = current;
    size_t kept = 0;
    for (const small_copy &c : f->copies)
        if (c.group + groups < f->copy_group)
            land(c);
        else
            f->copies[kept++] = c;
    f->copies.resize(kept);
    maybe_yield();
}

void store_async_16(uint32_t dst, const uint32_t (&v)[4], uint32_t bar)
{
    block &own = my_block();
    uint8_t *to = shared_pointer(dst, 16, 16, false);
    shared_pointer(bar, 8, 8, false);
    if (dst >> rank_shift != bar >> rank_shift)
        fail("st.async: data %#x and barrier %#x are of different blocks", dst, bar);
    uint32_t rank = dst >> rank_shift, bar_offset = bar & ((1u << rank_shift) - 1);
    block *b = rank ? own.in->blocks[rank - 1].get() : &own;
    uint32_t a[4] = { v[0], v[1], v[2], v[3] };
    b->in_flight++;
    self->at(landing_time(), [=] {
        memcpy(to, a, 16);
        b->in_flight--;
        mbar_complete_bytes(*b, bar_offset, 16);
    });
}

/* ---- bulk copies ---- */

void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    block *b = &my_block();
    check_aligned(src, 16);
    if (bytes % 16)
        fail("bulk copy of %u bytes", bytes);
    uint8_t *to = shared_pointer(dst, bytes, 16, true);
    uint32_t bar_offset = bar & ((1u << rank_shift) - 1);
    bool late = draw_late();
    b->in_flight++;
    if (!late)
        memcpy(to, src, bytes);
    self->at(landing_time(), [=] {
        if (late)
            memcpy(to, src, bytes);
        b->in_flight--;
        mbar_complete_bytes(*b, bar_offset, bytes);
    });
    maybe_yield();
}

static void start_bulk(std::function<void()> run)
{
    if (!draw_late())
        run();
    else
        current->bulk.push_back({ current->bulk_group, std::move(run) });
}

static void add_floats(void *to, const void *from, uint32_t bytes)
{
    float *a = static_cast<float *>(to);
    const float *v = static_cast<const float *>(from);
    for (uint32_t i = 0; i < bytes / 4; i++)
        a[i] += v[i];
}

void bulk_store(void *dst, uint32_t src, uint32_t bytes, bool add_f32)
{
    check_aligned(dst, 16);
    if (bytes % 16)
        fail("bulk copy of %u bytes", bytes);
    const uint8_t *from = shared_pointer(src, bytes, 16, true);
    start_bulk([=] {
        if (add_f32)
            add_floats(dst, from, bytes);
        else
            memcpy(dst, from, bytes);
    });
}

void tensor_store(const CUtensorMap *map, uint32_t src, uint32_t dimensions, const int32_t *at, bool add)
{
    tensor_copy t = make_tensor(map, dimensions, at);
    const uint32_t bytes = row_bytes(t.map), rows = box_rows(t.map);
    block *b = &my_block();
    shared_pointer(src, bytes * rows, 128, true);
    if (add && t.map.element_bytes != 4)
        fail("tensor addition of elements of %u bytes", t.map.element_bytes);
    const uint32_t offset = src & ((1u << rank_shift) - 1);
    start_bulk([=] {
        int64_t from, to;
        inside(t, &from, &to);
        for (uint32_t r = 0; r < rows; r++) {
            uint8_t *row = row_of(t, r), line[4096];
            if (!row || to <= from)
                continue;
            for (uint32_t c = 0; c < bytes; c += 16)
                memcpy(line + c, b->shared + (swizzle(offset + r * bytes + c, t.map.swizzle) - shared_start), 16);
            row += t.at[0] * t.map.element_bytes + from;
            if (add)
                add_floats(row, line + from, static_cast<uint32_t>(to - from));
            else
                memcpy(row, line + from, static_cast<size_t>(to - from));
        }
    });
}

void bulk_commit()
{
    current->bulk_group++;
}

void bulk_wait(uint32_t groups)
{
    fiber *f = current;
    size_t kept = 0;
    for (auto &op : f->bulk)
        if (op.group + groups < f->bulk_group)
            op.run();
        else
            f->bulk[kept++] = std::move(op);
    f->bulk.resize(kept);
    maybe_yield();
}

} // namespace emu
