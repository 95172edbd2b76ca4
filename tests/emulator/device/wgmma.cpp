/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of warpgroups, and matrices in registers. A warp does its quarter of an instruction by itself, at once or
 * when it waits. Its sums lie here meanwhile; what the threads see in their place is NaN.
 */
#include <string.h>

#include "machine.h"
#include "mx/mx.h"
#include "product.h"

namespace emu
{

struct pending_product {
    uint32_t sum; /* index */
    uint64_t a, b;
    bool a_in_registers, add, transpose_a, transpose_b, e4m3;
    uint32_t group;
    uint32_t fragment[32][4];
};

struct sums {
    float *d[32]; /* of each lane; NULL: free */
    uint32_t n, pending;
    std::vector<float> value; /* [16][n] */
};

struct matrix_unit {
    std::vector<sums> all;
    std::vector<pending_product> queue; /* first issued first */
    uint32_t group = 0;                 /* open one */
};

warp::warp() = default;
warp::warp(warp &&) = default;
warp::~warp() = default;

static float to_float(uint16_t v)
{
    uint32_t u = static_cast<uint32_t>(v) << 16;
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

/* ---- operands in shared memory ---- */

struct operand {
    const block *in;
    uint32_t start, leading, stride, span, bits; /* span: bytes of a swizzled row */
};

static operand decode(const block &b, uint64_t descriptor)
{
    static const uint32_t spans[] = { 16, 128, 64, 32 }, bits[] = { 0, 7, 3, 1 };
    const uint32_t mode = static_cast<uint32_t>(descriptor >> 62);
    operand o = { &b,
                  static_cast<uint32_t>(descriptor & 0x3fff) << 4,
                  static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4,
                  static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4,
                  spans[mode],
                  bits[mode] };
    if (descriptor >> 49 & 7u)
        fail("wgmma descriptor %#llx: base offsets are not emulated", static_cast<unsigned long long>(descriptor));
    return o;
}

/* Eight neighbouring elements. */
static void chunk(const operand &o, uint32_t address, uint16_t (&ret)[8])
{
    uint32_t at = address ^ ((address >> 7 & o.bits) << 4);
    if (at < shared_start || at - shared_start + 16 > o.in->shared_bytes)
        fail("wgmma reads shared memory at %#x: the block has [%#x, %#x)", at, shared_start,
             shared_start + o.in->shared_bytes);
    memcpy(ret, o.in->shared + (at - shared_start), 16);
}

/* Where eight elements begin: along k from k8 of row mn, or along mn from mn of row k. */
static uint32_t k_major(const operand &o, uint32_t mn, uint32_t k8)
{
    if (o.bits == 0)
        return o.start + mn / 8 * o.stride + mn % 8 * 16 + k8 * o.leading;
    return o.start + mn / 8 * o.stride + mn % 8 * o.span + k8 * 16;
}

static uint32_t mn_major(const operand &o, uint32_t mn, uint32_t k)
{
    if (o.bits == 0)
        return o.start + mn / 8 * o.stride + k % 8 * 16 + k / 8 * o.leading;
    const uint32_t width = o.span / 2;
    return o.start + mn / width * o.leading + mn % width * 2 + k / 8 * o.stride + k % 8 * o.span;
}

/* A's rows [first, first + 16) */
static void fetch_a(const operand &o, uint32_t first, bool transpose, float (*a)[16])
{
    uint16_t v[8];
    if (!transpose) {
        for (uint32_t r = 0; r < 16; r++)
            for (uint32_t k8 = 0; k8 < 2; k8++) {
                chunk(o, k_major(o, first + r, k8), v);
                for (uint32_t i = 0; i < 8; i++)
                    a[r][k8 * 8 + i] = to_float(v[i]);
            }
        return;
    }
    for (uint32_t k = 0; k < 16; k++)
        for (uint32_t r = 0; r < 16; r += 8) {
            chunk(o, mn_major(o, first + r, k), v);
            for (uint32_t i = 0; i < 8; i++)
                a[r + i][k] = to_float(v[i]);
        }
}

static void fetch_a_registers(const uint32_t (*fragment)[4], float (*a)[16])
{
    for (uint32_t lane = 0; lane < 32; lane++)
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t row = lane / 4 + (i & 1u) * 8, k = (i >> 1) * 8 + lane % 4 * 2;
            a[row][k] = to_float(static_cast<uint16_t>(fragment[lane][i]));
            a[row][k + 1] = to_float(static_cast<uint16_t>(fragment[lane][i] >> 16));
        }
}

/* [16][n] */
static void fetch_b(const operand &o, uint32_t n, bool transpose, float *b)
{
    uint16_t v[8];
    if (!transpose) {
        for (uint32_t c = 0; c < n; c++)
            for (uint32_t k8 = 0; k8 < 2; k8++) {
                chunk(o, k_major(o, c, k8), v);
                for (uint32_t i = 0; i < 8; i++)
                    b[(k8 * 8 + i) * n + c] = to_float(v[i]);
            }
        return;
    }
    for (uint32_t k = 0; k < 16; k++)
        for (uint32_t c = 0; c < n; c += 8) {
            chunk(o, mn_major(o, c, k), v);
            for (uint32_t i = 0; i < 8; i++)
                b[k * n + c + i] = to_float(v[i]);
        }
}

/* Sixteen neighbouring codes along k from 16 k16 of row mn: a chunk of 16 bytes as well. */
static void codes(const operand &o, uint32_t mn, uint32_t k16, float (&ret)[16])
{
    uint16_t v[8];
    uint8_t code[16];
    chunk(o, k_major(o, mn, k16), v);
    memcpy(code, v, 16);
    for (uint32_t i = 0; i < 16; i++)
        ret[i] = mok_e4m3_to_f32(code[i]);
}

/* ---- products ---- */

static void run_product(warp &w, const pending_product &p)
{
    alignas(32) static thread_local float b[16 * 256];
    alignas(32) float a[16][16];
    matrix_unit &m = *w.matrix;
    sums &s = m.all[p.sum];

    if (!p.add)
        std::fill(s.value.begin(), s.value.end(), 0.0f);
    if (p.e4m3) {
        for (uint32_t k16 = 0; k16 < 2; k16++) {
            float row[16];
            for (uint32_t r = 0; r < 16; r++)
                codes(decode(*w.in, p.a), w.index % 4 * 16 + r, k16, a[r]);
            for (uint32_t c = 0; c < s.n; c++) {
                codes(decode(*w.in, p.b), c, k16, row);
                for (uint32_t i = 0; i < 16; i++)
                    b[i * s.n + c] = row[i];
            }
            product_16(s.value.data(), s.n, a, b);
        }
        return;
    }
    if (p.a_in_registers)
        fetch_a_registers(p.fragment, a);
    else
        fetch_a(decode(*w.in, p.a), w.index % 4 * 16, p.transpose_a, a);
    fetch_b(decode(*w.in, p.b), s.n, p.transpose_b, b);
    product_16(s.value.data(), s.n, a, b);
}

/* Sum i of lane's registers: row and column of the warp's tile. */
static float &element(sums &s, uint32_t lane, uint32_t i)
{
    uint32_t row = lane / 4 + (i >> 1 & 1u) * 8, column = i / 4 * 8 + lane % 4 * 2 + (i & 1u);
    return s.value[row * s.n + column];
}

static uint32_t find_sums(matrix_unit &m, const meeting &met, uint32_t n)
{
    float *d = reinterpret_cast<float *>(met.lane[0].v[0]);
    uint32_t free = static_cast<uint32_t>(m.all.size());
    for (uint32_t i = 0; i < m.all.size(); i++) {
        if (m.all[i].pending == 0) {
            free = i;
        } else if (m.all[i].d[0] == d) {
            if (m.all[i].n != n)
                fail("wgmma: sums of %u columns are used as %u before they are there", m.all[i].n, n);
            return i;
        }
    }
    if (free == m.all.size())
        m.all.emplace_back();
    sums &s = m.all[free];
    s.n = n;
    s.value.resize(16 * n);
    for (uint32_t lane = 0; lane < 32; lane++) {
        s.d[lane] = reinterpret_cast<float *>(met.lane[lane].v[0]);
        for (uint32_t i = 0; i < n / 2; i++)
            element(s, lane, i) = s.d[lane][i];
        memset(s.d[lane], 0xff, n / 2 * sizeof(float));
    }
    return free;
}

static void give_back(sums &s)
{
    for (uint32_t lane = 0; lane < 32; lane++)
        for (uint32_t i = 0; i < s.n / 2; i++)
            s.d[lane][i] = element(s, lane, i);
}

static void issue(meeting &met)
{
    warp &w = *current->in;
    const payload &first = met.lane[0];
    const uint32_t flags = static_cast<uint32_t>(first.v[3]), n = flags >> 8;

    if (met.arrived != ~0u)
        fail("wgmma: lanes of the warp are missing (%#x)", met.arrived);
    for (const payload &p : met.lane)
        if (p.v[3] != first.v[3] || p.v[2] != first.v[2] || (p.v[1] != first.v[1] && !(flags & 2u)))
            fail("wgmma: lanes of a warp disagree");
    if (!w.matrix)
        w.matrix = std::make_unique<matrix_unit>();
    matrix_unit &m = *w.matrix;
    pending_product p = {};
    p.sum = find_sums(m, met, n);
    p.a = first.v[1];
    p.b = first.v[2];
    p.add = flags & 1u;
    p.a_in_registers = flags & 2u;
    p.transpose_a = flags & 4u;
    p.transpose_b = flags & 8u;
    p.e4m3 = flags & 16u;
    p.group = m.group;
    if (p.a_in_registers)
        for (uint32_t lane = 0; lane < 32; lane++) {
            memcpy(p.fragment[lane], &met.lane[lane].v[4], 8);
            memcpy(p.fragment[lane] + 2, &met.lane[lane].v[5], 8);
        }
    m.all[p.sum].pending++;
    m.queue.push_back(p);
}

/* Products run in the order of issue; what has run stays in the queue, without its operands, until it is waited for. */
static void run_queue(warp &w, uint32_t before_group)
{
    matrix_unit &m = *w.matrix;
    for (pending_product &p : m.queue)
        if (p.group < before_group && p.b != 0) {
            run_product(w, p);
            p.b = 0;
        }
}

void wgmma(float *d, uint32_t n, uint64_t a, const uint32_t *a_registers, uint64_t b, bool add, bool transpose_a,
           bool transpose_b)
{
    if (n % 8 || n < 8 || n > 256)
        fail("wgmma: n = %u", n);
    payload own = {};
    own.v[0] = reinterpret_cast<uint64_t>(d);
    own.v[1] = a;
    own.v[2] = b;
    own.v[3] = static_cast<uint64_t>(n) << 8 | (add ? 1u : 0u) | (a_registers ? 2u : 0u) | (transpose_a ? 4u : 0u) |
               (transpose_b ? 8u : 0u);
    if (a_registers) {
        memcpy(&own.v[4], a_registers, 8);
        memcpy(&own.v[5], a_registers + 2, 8);
    }
    meet(~0u, MEET_WGMMA, own, issue);
}

void wgmma_e4m3(float *d, uint32_t n, uint64_t a, uint64_t b, bool add)
{
    if (n % 8 || n < 8 || n > 256)
        fail("wgmma: n = %u", n);
    payload own = {};
    own.v[0] = reinterpret_cast<uint64_t>(d);
    own.v[1] = a;
    own.v[2] = b;
    own.v[3] = static_cast<uint64_t>(n) << 8 | (add ? 1u : 0u) | 16u;
    meet(~0u, MEET_WGMMA, own, issue);
}

static void commit(meeting &)
{
    warp &w = *current->in;
    if (!w.matrix)
        w.matrix = std::make_unique<matrix_unit>();
    w.matrix->group++;
    if (self->random.below(8) >= self->with.late_of_8)
        run_queue(w, w.matrix->group);
}

void wgmma_commit()
{
    meet(~0u, MEET_WGMMA_GROUP, {}, commit);
}

static void settle(meeting &met)
{
    warp &w = *current->in;
    if (!w.matrix)
        return;
    matrix_unit &m = *w.matrix;
    uint32_t groups = static_cast<uint32_t>(met.lane[0].v[0]), kept = 0;
    uint32_t before = m.group > groups ? m.group - groups : 0;
    run_queue(w, before);
    for (pending_product &p : m.queue)
        if (p.group < before) {
            sums &s = m.all[p.sum];
            if (--s.pending == 0)
                give_back(s);
        } else {
            m.queue[kept++] = p;
        }
    m.queue.resize(kept);
}

void wgmma_wait(uint32_t groups)
{
    payload own = {};
    own.v[0] = groups;
    meet(~0u, MEET_WGMMA_GROUP, own, settle);
    maybe_yield();
}

/* ---- 8x8 matrices between registers and shared memory ---- */

/* Lane holds elements [lane / 4][2 (lane % 4) ..] of each matrix; lane 8 i + r gives row r of matrix i. */
template <bool Store> static void move_matrices(meeting &m)
{
    const uint32_t count = static_cast<uint32_t>(m.lane[0].v[4] & 0xffu);
    const bool transpose = m.lane[0].v[4] >> 8;
    uint32_t words[32][4];
    if (m.arrived != ~0u)
        fail("%s: lanes of the warp are missing (%#x)", meeting_name(m.kind), m.arrived);
    for (uint32_t l = 0; l < 32; l++)
        memcpy(words[l], &m.lane[l].v[1], 16);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; r < 8; r++) {
            uint8_t *row = reinterpret_cast<uint8_t *>(m.lane[8 * i + r].v[0]);
            for (uint32_t c = 0; c < 8; c++) {
                const uint32_t y = transpose ? c : r, x = transpose ? r : c; /* of the matrix in registers */
                uint32_t &word = words[y * 4 + x / 2][i];
                const uint32_t shift = x % 2 * 16;
                uint16_t v;
                if (Store) {
                    v = static_cast<uint16_t>(word >> shift);
                    memcpy(row + 2 * c, &v, 2);
                } else {
                    memcpy(&v, row + 2 * c, 2);
                    word = (word & ~(0xffffu << shift)) | static_cast<uint32_t>(v) << shift;
                }
            }
        }
    if (!Store)
        for (uint32_t l = 0; l < 32; l++)
            memcpy(&m.lane[l].v[1], words[l], 16);
}

static payload matrix_payload(uint32_t address, const uint32_t *v, uint32_t count, bool transpose)
{
    payload p = {};
    uint32_t words[4] = {};
    if (lane_of() < 8 * count)
        p.v[0] = reinterpret_cast<uint64_t>(shared_pointer(address, 16, 16, true));
    if (v)
        memcpy(words, v, count * sizeof(*v));
    memcpy(&p.v[1], words, 16);
    p.v[4] = count | (transpose ? 256u : 0u);
    return p;
}

void stmatrix(uint32_t address, const uint32_t *v, uint32_t count, bool transpose)
{
    meet(~0u, MEET_STMATRIX, matrix_payload(address, v, count, transpose), move_matrices<true>);
}

void ldmatrix(uint32_t address, uint32_t *v, uint32_t count, bool transpose)
{
    payload p = meet(~0u, MEET_LDMATRIX, matrix_payload(address, nullptr, count, transpose), move_matrices<false>);
    memcpy(v, &p.v[1], count * sizeof(*v));
}

} // namespace emu
