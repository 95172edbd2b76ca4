/* SPDX-License-Identifier: Apache-2.0 */
#include "plain.h"

#include <cblas.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* One rank: its tokens, its experts, and the rows its experts got. */
struct side {
    uint16_t *x, *d_out, *out, *d_x;
    int32_t *ids;
    float *weight, *d_weight;
    uint16_t *gate, *up, *down;
    float *d_gate, *d_up, *d_down;
    uint64_t *row_of_slot;             /* [T][K]: row at the expert's rank */
    uint64_t *first;                   /* [E_l + 1] */
    uint64_t *source;                  /* [R]: rank << 40 | slot */
    uint16_t *rows_x, *rows_d, *rows_y, *rows_dx; /* [R][H] */
    float *row_dw;                     /* [R] */
    float *a, *b, *h;                  /* [R][I] */
};

struct plain {
    struct workload w;
    uint32_t tokens, local;
    uint64_t capacity; /* rows of a rank at worst */
    struct side side[16];
    pthread_barrier_t barrier;
    float *scratch[16];
};

static void widen(float *to, const uint16_t *from, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, 4);
    }
}

static void narrow(uint16_t *to, const float *from, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], 4);
        to[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

static void fill(const struct workload *w, uint16_t *to, enum workload_stream stream, uint64_t first, uint64_t count, float scale)
{
    for (uint64_t i = 0; i < count; i++)
        to[i] = workload_bf16(workload_value(w, stream, first + i) * scale);
}

static int open_side(struct plain *p, uint32_t r)
{
    struct side *s = &p->side[r];
    const struct workload *w = &p->w;
    uint64_t h = w->hidden, n = w->intermediate, t = p->tokens, k = w->topk, e = p->local * n * h, c = p->capacity;
    float sh = 1.0f / sqrtf((float)h), si = 1.0f / sqrtf((float)n);
    struct {
        void *pointer;
        uint64_t bytes;
    } wanted[] = {
        { &s->x, t * h * 2 },       { &s->d_out, t * h * 2 },  { &s->out, t * h * 2 },    { &s->d_x, t * h * 2 },
        { &s->ids, t * k * 4 },     { &s->weight, t * k * 4 }, { &s->d_weight, t * k * 4 }, { &s->gate, e * 2 },
        { &s->up, e * 2 },          { &s->down, e * 2 },       { &s->d_gate, e * 4 },     { &s->d_up, e * 4 },
        { &s->d_down, e * 4 },      { &s->row_of_slot, t * k * 8 }, { &s->first, (p->local + 1) * 8ull }, { &s->source, c * 8 },
        { &s->rows_x, c * h * 2 },  { &s->rows_d, c * h * 2 }, { &s->rows_y, c * h * 2 }, { &s->rows_dx, c * h * 2 },
        { &s->row_dw, c * 4 },      { &s->a, c * n * 4 },      { &s->b, c * n * 4 },      { &s->h, c * n * 4 },
        { &p->scratch[r], (4 * n * h + 4 * c * (h > n ? h : n)) * 4 },
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        void *memory = malloc(wanted[i].bytes);
        memcpy(wanted[i].pointer, &memory, sizeof(memory));
        if (!memory)
            return -1;
    }
    fill(w, s->x, STREAM_X, r * t * h, t * h, 1.0f);
    fill(w, s->d_out, STREAM_D_OUT, r * t * h, t * h, 1.0f);
    fill(w, s->gate, STREAM_GATE, r * e, e, sh);
    fill(w, s->up, STREAM_UP, r * e, e, sh);
    fill(w, s->down, STREAM_DOWN, r * e, e, si);
    for (uint64_t i = 0; i < t; i++) {
        workload_ids(w, r * t + i, s->ids + i * k);
        for (uint64_t j = 0; j < k; j++)
            s->weight[i * k + j] = workload_value(w, STREAM_WEIGHT, (r * t + i) * k + j) * 0.5f;
    }
    return 0;
}

struct plain *plain_open(const struct workload *workload, uint32_t tokens)
{
    struct plain *p = calloc(1, sizeof(*p));
    if (!p)
        return NULL;
    p->w = *workload;
    p->tokens = tokens;
    p->local = workload->experts / workload->ep;
    p->capacity = (uint64_t)tokens * workload->topk * workload->ep;
    pthread_barrier_init(&p->barrier, NULL, workload->ep);
    for (uint32_t r = 0; r < workload->ep; r++)
        if (open_side(p, r) < 0) {
            plain_close(p);
            return NULL;
        }
    return p;
}

void plain_close(struct plain *p)
{
    if (!p)
        return;
    for (uint32_t r = 0; r < p->w.ep; r++) {
        struct side *s = &p->side[r];
        void *all[] = { s->x, s->d_out, s->out, s->d_x, s->ids, s->weight, s->d_weight, s->gate, s->up, s->down, s->d_gate,
                        s->d_up, s->d_down, s->row_of_slot, s->first, s->source, s->rows_x, s->rows_d, s->rows_y, s->rows_dx,
                        s->row_dw, s->a, s->b, s->h, p->scratch[r] };
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
            free(all[i]);
    }
    pthread_barrier_destroy(&p->barrier);
    free(p);
}

const uint16_t *plain_out(const struct plain *p, uint32_t rank)
{
    return p->side[rank].out;
}
const uint16_t *plain_d_x(const struct plain *p, uint32_t rank)
{
    return p->side[rank].d_x;
}

/* Where every row of this rank's experts comes from, expert by expert. */
static void sort_rows(struct plain *p, uint32_t rank)
{
    struct side *s = &p->side[rank];
    uint64_t slots = (uint64_t)p->tokens * p->w.topk, low = (uint64_t)rank * p->local;
    memset(s->first, 0, (p->local + 1) * sizeof(*s->first));
    for (uint32_t q = 0; q < p->w.ep; q++)
        for (uint64_t i = 0; i < slots; i++) {
            uint64_t e = (uint64_t)(int64_t)p->side[q].ids[i] - low;
            if (p->side[q].ids[i] >= 0 && e < p->local)
                s->first[e + 1]++;
        }
    for (uint32_t e = 0; e < p->local; e++)
        s->first[e + 1] += s->first[e];
    uint64_t *next = malloc(p->local * sizeof(*next));
    memcpy(next, s->first, p->local * sizeof(*next));
    for (uint32_t q = 0; q < p->w.ep; q++)
        for (uint64_t i = 0; i < slots; i++) {
            uint64_t e = (uint64_t)(int64_t)p->side[q].ids[i] - low;
            if (p->side[q].ids[i] < 0 || e >= p->local)
                continue;
            s->source[next[e]] = (uint64_t)q << 40 | i;
            p->side[q].row_of_slot[i] = next[e]++;
        }
    free(next);
}

static void pull_rows(struct plain *p, uint32_t rank, bool gradient, uint16_t *to)
{
    struct side *s = &p->side[rank];
    uint64_t h = p->w.hidden, rows = s->first[p->local];
    for (uint64_t r = 0; r < rows; r++) {
        const struct side *q = &p->side[s->source[r] >> 40];
        uint64_t token = (s->source[r] & 0xffffffffffull) / p->w.topk;
        memcpy(to + r * h, (gradient ? q->d_out : q->x) + token * h, h * 2);
    }
}

/* out[t] = sum over k of (weight or 1) * row, rows pulled back from the experts' ranks. */
static void merge_rows(struct plain *p, uint32_t rank, bool gradient)
{
    struct side *s = &p->side[rank];
    uint64_t h = p->w.hidden, k = p->w.topk;
    float *sum = p->scratch[rank], *row = sum + h;
    for (uint64_t t = 0; t < p->tokens; t++) {
        memset(sum, 0, h * sizeof(*sum));
        for (uint64_t j = 0; j < k; j++) {
            uint64_t slot = t * k + j;
            s->d_weight[slot] = 0;
            if (s->ids[slot] < 0)
                continue;
            const struct side *q = &p->side[(uint32_t)s->ids[slot] / p->local];
            uint64_t from = s->row_of_slot[slot];
            widen(row, (gradient ? q->rows_dx : q->rows_y) + from * h, h);
            float weight = gradient ? 1.0f : s->weight[slot];
            if (gradient)
                s->d_weight[slot] = q->row_dw[from];
            for (uint64_t i = 0; i < h; i++)
                sum[i] += weight * row[i];
        }
        narrow((gradient ? s->d_x : s->out) + t * h, sum, h);
    }
}

static void gemm(bool ta, bool tb, uint64_t m, uint64_t n, uint64_t k, const float *a, const float *b, float beta, float *c)
{
    if (m == 0)
        return;
    cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, 1, a,
                (int)(ta ? m : k), b, (int)(tb ? k : n), beta, c, (int)n);
}

static void experts_forward(struct plain *p, uint32_t rank)
{
    struct side *s = &p->side[rank];
    uint64_t h = p->w.hidden, n = p->w.intermediate;
    float *weights = p->scratch[rank], *x = weights + n * h, *y = x + p->capacity * h;
    for (uint32_t e = 0; e < p->local; e++) {
        uint64_t r0 = s->first[e], rows = s->first[e + 1] - r0;
        float *a = s->a + r0 * n, *b = s->b + r0 * n, *hid = s->h + r0 * n;
        widen(x, s->rows_x + r0 * h, rows * h);
        widen(weights, s->gate + e * n * h, n * h);
        gemm(false, true, rows, n, h, x, weights, 0, a);
        widen(weights, s->up + e * n * h, n * h);
        gemm(false, true, rows, n, h, x, weights, 0, b);
        for (uint64_t i = 0; i < rows * n; i++)
            hid[i] = a[i] / (1.0f + expf(-a[i])) * b[i];
        widen(weights, s->down + e * n * h, n * h);
        gemm(false, true, rows, h, n, hid, weights, 0, y);
        narrow(s->rows_y + r0 * h, y, rows * h);
    }
}

static float row_weight(const struct plain *p, uint64_t source)
{
    return p->side[source >> 40].weight[source & 0xffffffffffull];
}

/* u = d_out down; d_weight = <u, h>; a, b become d_a, d_b; h becomes weight * h. */
static void activation_backward(struct plain *p, struct side *s, uint64_t row, float *u)
{
    uint64_t n = p->w.intermediate;
    float *a = s->a + row * n, *b = s->b + row * n, *hid = s->h + row * n, weight = row_weight(p, s->source[row]), dot = 0;
    for (uint64_t i = 0; i < n; i++) {
        float sigmoid = 1.0f / (1.0f + expf(-a[i])), silu = a[i] * sigmoid, d = weight * u[i];
        dot += u[i] * hid[i];
        float da = d * b[i] * (sigmoid + silu * (1.0f - sigmoid)), db = d * silu;
        a[i] = da;
        b[i] = db;
        hid[i] *= weight;
    }
    s->row_dw[row] = dot;
}

static void experts_backward(struct plain *p, uint32_t rank)
{
    struct side *s = &p->side[rank];
    uint64_t h = p->w.hidden, n = p->w.intermediate, wide = h > n ? h : n;
    float *weights = p->scratch[rank], *x = weights + n * h, *d = x + p->capacity * wide, *u = d + p->capacity * wide;
    for (uint32_t e = 0; e < p->local; e++) {
        uint64_t r0 = s->first[e], rows = s->first[e + 1] - r0;
        widen(d, s->rows_d + r0 * h, rows * h);
        widen(weights, s->down + e * n * h, n * h);
        gemm(false, false, rows, n, h, d, weights, 0, u);
        for (uint64_t r = 0; r < rows; r++)
            activation_backward(p, s, r0 + r, u + r * n);
        memset(s->d_down + e * n * h, 0, n * h * 4);
        gemm(true, false, h, n, rows, d, s->h + r0 * n, 0, s->d_down + e * n * h);
        widen(x, s->rows_x + r0 * h, rows * h);
        gemm(true, false, n, h, rows, s->a + r0 * n, x, 0, s->d_gate + e * n * h);
        gemm(true, false, n, h, rows, s->b + r0 * n, x, 0, s->d_up + e * n * h);
        widen(weights, s->gate + e * n * h, n * h);
        gemm(false, false, rows, h, n, s->a + r0 * n, weights, 0, d);
        widen(weights, s->up + e * n * h, n * h);
        gemm(false, false, rows, h, n, s->b + r0 * n, weights, 1, d);
        narrow(s->rows_dx + r0 * h, d, rows * h);
    }
}

void plain_forward(struct plain *p, uint32_t rank)
{
    sort_rows(p, rank);
    pthread_barrier_wait(&p->barrier);
    pull_rows(p, rank, false, p->side[rank].rows_x);
    pthread_barrier_wait(&p->barrier);
    experts_forward(p, rank);
    pthread_barrier_wait(&p->barrier);
    merge_rows(p, rank, false);
    pthread_barrier_wait(&p->barrier);
}

void plain_backward(struct plain *p, uint32_t rank)
{
    pull_rows(p, rank, true, p->side[rank].rows_d);
    pthread_barrier_wait(&p->barrier);
    experts_backward(p, rank);
    pthread_barrier_wait(&p->barrier);
    merge_rows(p, rank, true);
    pthread_barrier_wait(&p->barrier);
}
