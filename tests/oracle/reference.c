/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The FP32-accumulating reference: what a straightforward layer with BF16 tensors reaches. It rounds to BF16 what a
 * GEMM must read as an operand or what is stored between steps (a, b, h, y, d_a, d_b, weighted h, d_x rows), and sums
 * in FP32. The tests state the product's tolerance as a multiple of this reference's error.
 */
#include "oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mx_model.h"
#include "plain_bf16.h"

/* Rows of all slots of one expert, in canonical order, as operands of its weight gradients. */
struct operand_rows {
    size_t rows;
    float *x, *d_out;        /* [rows][H] */
    float *d_a, *d_b, *h;    /* [rows][I]; h: weighted, quantised once */
};

struct float_network {
    size_t hidden, width;
    float clamp;
    uint32_t group; /* operands are E4M3 with a scale a group; 0: BF16 */
    const uint16_t *gate, *up, *down;
    double *d_gate, *d_up, *d_down; /* hold FP32 values */
    struct operand_rows *operands; /* NULL: weight gradients are added row by row */
    float *a, *b, *h, *y, *d_a, *d_b, *d_x;
    float *full_h; /* h before it became an operand */
    float *a_moves, *b_moves; /* 1, or 0 where the clamp holds the value */
};

static float *must_floats(size_t count)
{
    float *memory = calloc(count ? count : 1, sizeof(float));
    if (!memory) {
        fprintf(stderr, "reference: out of memory\n");
        abort();
    }
    return memory;
}

static float load(const uint16_t *values, size_t index)
{
    return bf16_to_float(values[index]);
}

static void add_float(double *sum, float value)
{
    *sum = (double)((float)*sum + value);
}

static float limited(float value, float low, float high)
{
    return value > high ? high : value < low ? low : value;
}

/* As operands of a product: BF16 values, or MX values of the row. */
static void round_operand(const struct float_network *net, float *row, size_t count)
{
    if (net->group)
        mx_model_round(row, count, net->group);
    else
        for (size_t i = 0; i < count; i++)
            row[i] = bf16_round(row[i]);
}

static void forward_row(struct float_network *net, const float *x)
{
    for (size_t i = 0; i < net->width; i++) {
        float a = 0, b = 0;
        for (size_t j = 0; j < net->hidden; j++) {
            a += load(net->gate, i * net->hidden + j) * x[j];
            b += load(net->up, i * net->hidden + j) * x[j];
        }
        net->a_moves[i] = !(net->clamp > 0) || a <= net->clamp;
        net->b_moves[i] = !(net->clamp > 0) || fabsf(b) <= net->clamp;
        net->a[i] = a = bf16_round(a);
        net->b[i] = b = bf16_round(b);
        if (net->clamp > 0) {
            a = limited(a, -INFINITY, net->clamp);
            b = limited(b, -net->clamp, net->clamp);
        }
        net->h[i] = net->full_h[i] = a / (1 + expf(-a)) * b;
    }
    round_operand(net, net->h, net->width);
    for (size_t j = 0; j < net->hidden; j++) {
        float y = 0;
        for (size_t i = 0; i < net->width; i++)
            y += load(net->down, j * net->width + i) * net->h[i];
        net->y[j] = bf16_round(y);
    }
}

/* Fills d_a and d_b (rounded); returns d(loss)/d(weight). */
static float swiglu_backward(struct float_network *net, const float *d_out, float weight)
{
    float d_weight = 0;

    for (size_t i = 0; i < net->width; i++) {
        float d_h = 0, a = net->a[i], b = net->b[i];
        for (size_t j = 0; j < net->hidden; j++)
            d_h += load(net->down, j * net->width + i) * d_out[j];
        d_weight += d_h * net->h[i];
        d_h *= weight;
        if (net->clamp > 0) {
            a = limited(a, -INFINITY, net->clamp);
            b = limited(b, -net->clamp, net->clamp);
        }
        float sigma = 1 / (1 + expf(-a));
        net->d_a[i] = net->a_moves[i] > 0 ? d_h * b * sigma * (1 + a * (1 - sigma)) : 0;
        net->d_b[i] = net->b_moves[i] > 0 ? d_h * a * sigma : 0;
    }
    round_operand(net, net->d_a, net->width);
    round_operand(net, net->d_b, net->width);
    return d_weight;
}

static void keep_operands(struct float_network *net, const float *x, const float *d_out, float weight)
{
    struct operand_rows *to = net->operands;
    size_t at = to->rows * net->width;

    memcpy(to->x + to->rows * net->hidden, x, net->hidden * sizeof(float));
    memcpy(to->d_out + to->rows * net->hidden, d_out, net->hidden * sizeof(float));
    memcpy(to->d_a + at, net->d_a, net->width * sizeof(float));
    memcpy(to->d_b + at, net->d_b, net->width * sizeof(float));
    for (size_t i = 0; i < net->width; i++)
        to->h[at + i] = weight * net->full_h[i];
    round_operand(net, to->h + at, net->width);
    to->rows++;
}

static float backward_row(struct float_network *net, const float *x, const float *d_out, float weight)
{
    float d_weight = swiglu_backward(net, d_out, weight);

    for (size_t j = 0; j < net->hidden; j++) {
        float d_x = 0;
        for (size_t i = 0; i < net->width; i++) {
            d_x += net->d_a[i] * load(net->gate, i * net->hidden + j);
            d_x += net->d_b[i] * load(net->up, i * net->hidden + j);
        }
        net->d_x[j] = bf16_round(d_x);
    }
    if (net->operands) {
        keep_operands(net, x, d_out, weight);
        return d_weight;
    }
    for (size_t i = 0; i < net->width; i++) {
        float weighted = bf16_round(weight * net->h[i]);
        for (size_t j = 0; j < net->hidden; j++) {
            add_float(&net->d_gate[i * net->hidden + j], net->d_a[i] * x[j]);
            add_float(&net->d_up[i * net->hidden + j], net->d_b[i] * x[j]);
            add_float(&net->d_down[j * net->width + i], weighted * d_out[j]);
        }
    }
    return d_weight;
}

static void network_open(struct float_network *net, const struct problem *p, size_t width)
{
    *net = (struct float_network){ .hidden = p->hidden, .width = width, .clamp = p->clamp };
    float **widths[] = { &net->a, &net->b, &net->h, &net->full_h, &net->d_a, &net->d_b, &net->a_moves, &net->b_moves };
    float **rows[] = { &net->y, &net->d_x };
    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++)
        *widths[i] = must_floats(width);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        *rows[i] = must_floats(p->hidden);
}

static void network_close(struct float_network *net)
{
    float *all[] = { net->a,       net->b,       net->h, net->full_h, net->d_a, net->d_b,
                     net->a_moves, net->b_moves, net->y, net->d_x };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}

static void point_at_expert(struct float_network *net, const struct problem *p, struct result *ret, size_t expert)
{
    size_t at = expert * problem_expert_elements(p);

    net->gate = p->gate + at;
    net->up = p->up + at;
    net->down = p->down + at;
    net->d_gate = ret->array[RESULT_D_GATE] + at;
    net->d_up = ret->array[RESULT_D_UP] + at;
    net->d_down = ret->array[RESULT_D_DOWN] + at;
}

static void point_at_shared(struct float_network *net, const struct problem *p, struct result *ret)
{
    net->gate = p->shared_gate;
    net->up = p->shared_up;
    net->down = p->shared_down;
    net->d_gate = ret->array[RESULT_D_SHARED_GATE];
    net->d_up = ret->array[RESULT_D_SHARED_UP];
    net->d_down = ret->array[RESULT_D_SHARED_DOWN];
}

/* One token's rows as an expert's operands; the shared expert is BF16 in every layer. */
struct rows {
    float *x, *d_out, *shared_x, *shared_d_out, *out, *d_x;
};

static void load_rows(const struct problem *p, uint32_t t, const struct float_network *expert, struct rows *rows)
{
    size_t H = p->hidden;

    for (size_t j = 0; j < H; j++) {
        rows->x[j] = rows->shared_x[j] = load(p->x, t * H + j);
        rows->d_out[j] = rows->shared_d_out[j] = load(p->d_out, t * H + j);
        rows->out[j] = rows->d_x[j] = 0;
    }
    round_operand(expert, rows->x, H);
    round_operand(expert, rows->d_out, H);
}

static void run_token(const struct problem *p, struct result *ret, uint32_t t, struct float_network *expert,
                      struct float_network *shared, struct operand_rows *operands, struct rows *rows)
{
    size_t H = p->hidden;

    load_rows(p, t, expert, rows);
    if (p->shared_intermediate) {
        forward_row(shared, rows->shared_x);
        backward_row(shared, rows->shared_x, rows->shared_d_out, 1);
        for (size_t j = 0; j < H; j++) {
            rows->out[j] += shared->y[j];
            rows->d_x[j] += shared->d_x[j];
        }
    }
    for (uint32_t k = 0; k < p->topk; k++) {
        size_t slot = (size_t)t * p->topk + k;
        float weight = p->topk_weight[slot];
        if (p->ids[slot] < 0)
            continue;
        point_at_expert(expert, p, ret, (size_t)p->ids[slot]);
        expert->operands = operands ? &operands[p->ids[slot]] : NULL;
        forward_row(expert, rows->x);
        ret->array[RESULT_D_TOPK_WEIGHT][slot] = (double)backward_row(expert, rows->x, rows->d_out, weight);
        for (size_t j = 0; j < H; j++) {
            rows->out[j] += weight * expert->y[j];
            rows->d_x[j] += expert->d_x[j];
        }
    }
    for (size_t j = 0; j < H; j++) {
        ret->array[RESULT_OUT][t * H + j] = (double)bf16_round(rows->out[j]);
        ret->array[RESULT_D_X][t * H + j] = (double)bf16_round(rows->d_x[j]);
    }
}

static struct operand_rows *operands_open(const struct problem *p)
{
    struct operand_rows *all = calloc(p->experts, sizeof(*all));

    for (uint32_t e = 0; all && e < p->experts; e++) {
        size_t rows = 0;
        for (size_t slot = 0; slot < problem_slots(p); slot++)
            rows += p->ids[slot] == (int32_t)e;
        all[e] = (struct operand_rows){ .x = must_floats(rows * p->hidden),
                                        .d_out = must_floats(rows * p->hidden),
                                        .d_a = must_floats(rows * p->intermediate),
                                        .d_b = must_floats(rows * p->intermediate),
                                        .h = must_floats(rows * p->intermediate) };
    }
    return all;
}

static void operands_close(const struct problem *p, struct operand_rows *all)
{
    for (uint32_t e = 0; all && e < p->experts; e++) {
        float *part[] = { all[e].x, all[e].d_out, all[e].d_a, all[e].d_b, all[e].h };
        for (size_t i = 0; i < sizeof(part) / sizeof(part[0]); i++)
            free(part[i]);
    }
    free(all);
}

/* sum[m][n] += a^T b over all rows */
static void add_product(double *sum, const float *a, size_t m, const float *b, size_t n, size_t rows)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < m; i++)
            for (size_t j = 0; j < n; j++)
                add_float(&sum[i * n + j], a[r * m + i] * b[r * n + j]);
}

/* Weight gradients of E4M3 operands with scales along the token axis. */
static void add_operands(const struct problem *p, struct float_network *expert, struct operand_rows *all,
                         struct result *ret)
{
    size_t H = p->hidden, I = p->intermediate;

    for (uint32_t e = 0; e < p->experts; e++) {
        struct operand_rows *o = &all[e];
        mx_model_round_tiles(o->x, o->rows, H, expert->group);
        mx_model_round_tiles(o->d_out, o->rows, H, expert->group);
        mx_model_round_tiles(o->d_a, o->rows, I, expert->group);
        mx_model_round_tiles(o->d_b, o->rows, I, expert->group);
        mx_model_round_tiles(o->h, o->rows, I, expert->group);
        point_at_expert(expert, p, ret, e);
        add_product(expert->d_gate, o->d_a, I, o->x, H, o->rows);
        add_product(expert->d_up, o->d_b, I, o->x, H, o->rows);
        add_product(expert->d_down, o->d_out, H, o->h, I, o->rows);
    }
}

void reference_run_mx(const struct problem *p, uint32_t group, bool mxfp8_wgrad, struct result *ret)
{
    struct operand_rows *operands = mxfp8_wgrad ? operands_open(p) : NULL;
    struct float_network expert, shared;
    struct rows rows;
    float **all[] = { &rows.x, &rows.d_out, &rows.shared_x, &rows.shared_d_out, &rows.out, &rows.d_x };

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        *all[i] = must_floats(p->hidden);
    result_alloc(p, ret);
    network_open(&expert, p, p->intermediate);
    network_open(&shared, p, p->shared_intermediate);
    expert.group = group;
    point_at_shared(&shared, p, ret);
    for (uint32_t t = 0; t < p->tokens; t++)
        run_token(p, ret, t, &expert, &shared, operands, &rows);
    if (operands)
        add_operands(p, &expert, operands, ret);
    operands_close(p, operands);
    network_close(&expert);
    network_close(&shared);
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(*all[i]);
}

void reference_run(const struct problem *p, struct result *ret)
{
    reference_run_mx(p, 0, false, ret);
}

static void quantise_rows(uint16_t *values, size_t rows, size_t columns, uint32_t group)
{
    float *row = must_floats(columns);

    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < columns; i++)
            row[i] = load(values, r * columns + i);
        mx_model_round(row, columns, group);
        for (size_t i = 0; i < columns; i++)
            values[r * columns + i] = bf16_from_float(row[i]); /* exact: 4 significant bits */
    }
    free(row);
}

void problem_quantise_weights(struct problem *p, uint32_t group)
{
    size_t H = p->hidden, I = p->intermediate;

    quantise_rows(p->gate, p->experts * I, H, group);
    quantise_rows(p->up, p->experts * I, H, group);
    quantise_rows(p->down, p->experts * H, I, group);
}
