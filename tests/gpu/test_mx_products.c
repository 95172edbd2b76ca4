/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each product of an MXFP8 layer on the CUDA engine beside FP64 sums of the values that it multiplied, which are read
 * from the engine's memory: so nothing differs but the accumulation. Skipped where there is no GPU.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "cuda/layout.h"
#include "device.h"
#include "hd.h"
#include "mok/ring_abi.h"
#include "mx/bf16.h"
#include "mx/mx.h"

#ifdef MAX_EP
#define FEWER(many, few) few
#else
#define FEWER(many, few) many
#endif

/*
 * How far a sum may be from the exact one, in parts of the sum of its terms' magnitudes. Hopper's tensor cores keep some 14 bits
 * of a sum of E4M3 products and drop what is below, 32 terms at a time: an H200 has been seen 2^-11.3 away.
 */
#define E4M3_BOUND 0x1p-10
#define BF16_BOUND 0x1p-16
#define BF16_HALF_ULP 0x1p-8 /* of a result that is stored as BF16: at most, in parts of it */

/* A sum and the magnitudes of its terms. */
struct sum {
    double exact, magnitude;
};

static void add(struct sum *s, double value, double magnitude)
{
    s->exact += value;
    s->magnitude += magnitude;
}

static struct sum dot(const double *a, const double *b, uint64_t count)
{
    struct sum s = { 0 };

    for (uint64_t i = 0; i < count; i++)
        add(&s, a[i] * b[i], fabs(a[i] * b[i]));
    return s;
}

static double worst; /* in parts of what is allowed, over a product */

static void check(const char *what, uint64_t row, uint64_t column, double got, struct sum want, double bound, double rounding)
{
    const double allowed = bound * want.magnitude + rounding * (fabs(want.exact) + bound * want.magnitude);

    worst = fmax(worst, allowed > 0 ? fabs(got - want.exact) / allowed : 0);
    if (!(fabs(got - want.exact) <= allowed))
        fail_msg("%s, row %llu, column %llu: %.9g, must be %.9g within %.3g", what, (unsigned long long)row,
                 (unsigned long long)column, got, want.exact, allowed);
}

static void checked(const char *what)
{
    if (getenv("MOK_TEST_PRINT_ERRORS"))
        print_message("%s: at most %.3f of what is allowed\n", what, worst);
    worst = 0;
}

static void *copy_of(const void *device, uint64_t bytes)
{
    void *copy = malloc(bytes);

    assert_non_null(copy);
    assert_int_equal(cudaMemcpy(copy, device, bytes, cudaMemcpyDeviceToHost), 0);
    return copy;
}

static double *doubles(uint64_t count)
{
    double *d = malloc(count * sizeof(*d));

    assert_non_null(d);
    return d;
}

static double *of_bf16(const void *device, uint64_t count)
{
    uint16_t *bits = copy_of(device, count * sizeof(*bits));
    double *d = doubles(count);

    for (uint64_t i = 0; i < count; i++)
        d[i] = (double)mok_bf16_to_f32(bits[i]);
    free(bits);
    return d;
}

/* Codes [rows][columns], a row every `pitch` bytes, and scales, a row every `scale_pitch` and one for 32 columns. */
static double *of_codes(const void *codes, uint64_t pitch, const void *scales, uint64_t scale_pitch, uint64_t rows,
                        uint64_t columns)
{
    double *d = doubles(rows * columns);

    for (uint64_t r = 0; r < rows; r++) {
        uint8_t *code = copy_of((const uint8_t *)codes + r * pitch, columns);
        uint8_t *scale = copy_of((const uint8_t *)scales + r * scale_pitch, (columns + 31) / 32);

        for (uint64_t i = 0; i < columns; i++)
            d[r * columns + i] = (double)mok_mx_decode(code[i], scale[i / 32]);
        free(code);
        free(scale);
    }
    return d;
}

/* A layer that is being run, and where its rows belong. */
struct layer {
    struct problem p;
    struct device_group group;
    struct mok_cuda_layout layout;
    uint64_t rows;              /* padded ones */
    uint32_t *expert, *slot;    /* of a padded row; slot ~0: it is padding */
    double *gate, *up, *down;   /* [E][I][H], [E][I][H], [E][H][I] */
    double *across[3];          /* the same with their last two axes exchanged */
};

static const uint8_t *own(const struct layer *l)
{
    return l->group.private_memory[0].at;
}

static const uint8_t *symmetric(const struct layer *l)
{
    return l->group.symmetric[0].at;
}

static double *turned(const double *from, uint64_t experts, uint64_t rows, uint64_t columns)
{
    double *to = doubles(experts * rows * columns);

    for (uint64_t e = 0; e < experts; e++)
        for (uint64_t r = 0; r < rows; r++)
            for (uint64_t c = 0; c < columns; c++)
                to[(e * columns + c) * rows + r] = from[(e * rows + r) * columns + c];
    return to;
}

static double *weights_of(const uint16_t *bits, uint64_t count)
{
    double *d = doubles(count);

    for (uint64_t i = 0; i < count; i++)
        d[i] = (double)mok_bf16_to_f32(bits[i]);
    return d;
}

/* Of scales of 128 values: rows have the same in each tile, so that tiles keep their values. */
static void even_scales(struct problem *p)
{
    const uint64_t count = (uint64_t)p->experts * problem_expert_elements(p);

    for (uint64_t i = 0; i < count; i++) {
        if (i % p->hidden % 128 == 0)
            p->gate[i] = p->up[i] = 0x3f80; /* 1 */
        if (i % p->intermediate % 128 == 0)
            p->down[i] = 0x3f80;
    }
}

static void open_layer(struct layer *l, bool mxfp8_wgrad)
{
    static const struct problem_options options = { .hidden = 272,
                                                    .intermediate = 144,
                                                    .experts = 3,
                                                    .topk = 2,
                                                    .tokens = FEWER(300, 24),
                                                    .masked = 0.1,
                                                    .seed = 51 };
    struct problem *p = &l->p;

    *l = (struct layer){ 0 };
    problem_make(p, &options);
    const uint64_t count = (uint64_t)p->experts * problem_expert_elements(p);
    if (MX_SCALE == 128)
        even_scales(p);
    problem_quantise_weights(p, MX_SCALE);
    l->gate = weights_of(p->gate, count);
    l->up = weights_of(p->up, count);
    l->down = weights_of(p->down, count);
    l->across[0] = turned(l->gate, p->experts, p->intermediate, p->hidden);
    l->across[1] = turned(l->up, p->experts, p->intermediate, p->hidden);
    l->across[2] = turned(l->down, p->experts, p->hidden, p->intermediate);
    device_group_open(&l->group, p,
                      &(struct device_options){ .ranks = 1,
                                                .precision = MX,
                                                .tiles = MX_SCALE == 128,
                                                .mxfp8_wgrad = mxfp8_wgrad,
                                                .context_mode = MOK_CONTEXT_FULL,
                                                .flags = MOK_OPF_OVERWRITE_WGRAD },
                      &p->tokens);
    mok_cuda_layout_make(&l->group.plan[0], &l->layout);
}

static void close_layer(struct layer *l)
{
    free(l->expert);
    free(l->slot);
    free(l->gate);
    free(l->up);
    free(l->down);
    for (unsigned i = 0; i < 3; i++)
        free(l->across[i]);
    device_group_close(&l->group);
    problem_free(&l->p);
}

/* Whose rows are whose, from what MAIN said and where it sends them. */
static void find_rows(struct layer *l, const struct mok_op_result *result)
{
    const uint64_t first = (uint64_t)(uintptr_t)symmetric(l) + l->group.plan[0].sym_slots;
    uint64_t *to, row = 0;

    l->rows = result->padded_rows;
    assert_true(l->rows <= l->group.plan[0].ring_rows);
    to = copy_of(own(l) + l->layout.row_dst, l->rows * sizeof(*to));
    l->expert = malloc(l->rows * sizeof(*l->expert));
    l->slot = malloc(l->rows * sizeof(*l->slot));
    assert_true(l->expert && l->slot);
    for (uint32_t e = 0; e < l->p.experts; e++)
        for (uint64_t i = 0; i < mok_round_up(result->expert_rows[e], l->group.plan[0].tile_rows); i++, row++) {
            l->expert[row] = e;
            l->slot[row] = ~0u;
            if (i < result->expert_rows[e])
                l->slot[row] = (uint32_t)((to[row] - first) / (2ull * l->p.hidden));
            if (i < result->expert_rows[e])
                assert_true(l->slot[row] < l->p.tokens * l->p.topk);
        }
    assert_int_equal(row, l->rows);
    free(to);
}

/* This rank's x, or with `behind` its d_out, as experts read them: [tokens][H]. */
static double *quantised_rows(const struct layer *l, bool behind)
{
    const uint64_t pitch = mok_cuda_x_row_bytes(&l->group.plan[0]);
    const uint8_t *at = symmetric(l) + l->group.plan[0].sym_engine + (behind ? l->group.plan[0].spec.max_tokens * pitch : 0);

    return of_codes(at, pitch, at + l->p.hidden, pitch, l->p.tokens, l->p.hidden);
}

/* [rows][I] with a row of scales for each. */
static double *inner_rows(const struct layer *l, uint64_t codes, uint64_t scales)
{
    return of_codes(own(l) + codes, l->p.intermediate, own(l) + scales, mok_cuda_h_scale_bytes(&l->group.plan[0]), l->rows,
                    l->p.intermediate);
}

static double *slots_of(const struct layer *l)
{
    return of_bf16(symmetric(l) + l->group.plan[0].sym_slots, (uint64_t)l->p.tokens * l->p.topk * l->p.hidden);
}

static void check_forward(const struct layer *l)
{
    const uint64_t H = l->p.hidden, I = l->p.intermediate;
    const uint8_t *ring = (const uint8_t *)l->group.args[0].context + l->group.plan[0].ctx_ring;
    struct mok_cuda_kept kept;

    mok_cuda_kept_make(&l->group.plan[0], &kept);
    double *x = quantised_rows(l, false), *h = inner_rows(l, l->layout.h, l->layout.h_scale), *y = slots_of(l);
    double *a = of_bf16(ring + kept.a, l->rows * I), *b = of_bf16(ring + kept.b, l->rows * I);
    for (uint64_t r = 0; r < l->rows; r++) {
        const uint64_t e = l->expert[r], slot = l->slot[r];
        if (slot == ~0u)
            continue;
        const double *row = x + slot / l->p.topk * H;
        for (uint64_t i = 0; i < I; i++) {
            check("gate", r, i, a[r * I + i], dot(row, l->gate + (e * I + i) * H, H), E4M3_BOUND, BF16_HALF_ULP);
            check("up", r, i, b[r * I + i], dot(row, l->up + (e * I + i) * H, H), E4M3_BOUND, BF16_HALF_ULP);
        }
    }
    checked("gate and up");
    for (uint64_t r = 0; r < l->rows; r++)
        for (uint64_t c = 0; l->slot[r] != ~0u && c < H; c++)
            check("down", r, c, y[l->slot[r] * H + c], dot(h + r * I, l->down + (l->expert[r] * H + c) * I, I), E4M3_BOUND,
                  BF16_HALF_ULP);
    checked("down");
    free(x);
    free(h);
    free(y);
    free(a);
    free(b);
}

/*
 * Turned weights of scales of 32 values, which d_hidden and d_input multiply: beside the weights themselves. What a tile of 32 x 32
 * has below 2^-6 of its scale has been rounded to multiples of 2^-9 of it.
 */
static double *turned_as_it_is(const struct layer *l, const double *across, uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns)
{
    const uint64_t all = l->p.experts * columns, count = mok_mx_scales(rows);
    double *got = of_codes(own(l) + codes, rows, own(l) + scales, count, all, rows);
    uint8_t *scale = copy_of(own(l) + scales, all * count);

    for (uint64_t c = 0; c < all; c++)
        for (uint64_t r = 0; r < rows; r++) {
            const double want = across[c * rows + r], unit = (double)mok_e8m0_to_f32(scale[c * count + r / 32]);
            if (!(fabs(got[c * rows + r] - want) <= (fabs(want) < 0x1p-6 * unit ? 0x1p-10 * unit : 0)))
                fail_msg("turned column %llu, row %llu: %g of scale %g, must be %g", (unsigned long long)c, (unsigned long long)r,
                         got[c * rows + r], unit, want);
        }
    free(scale);
    return got;
}

static void take_turned(struct layer *l)
{
    const uint64_t codes[] = { l->layout.gate_t, l->layout.up_t, l->layout.down_t };
    const uint64_t scales[] = { l->layout.gate_t_scale, l->layout.up_t_scale, l->layout.down_t_scale };

    for (unsigned i = 0; i < 3; i++) {
        const bool down = i == 2;
        double *got = turned_as_it_is(l, l->across[i], codes[i], scales[i], down ? l->p.hidden : l->p.intermediate,
                                      down ? l->p.intermediate : l->p.hidden);
        free(l->across[i]);
        l->across[i] = got;
    }
}

/* u = d_out down is stored nowhere; <u, h> is. `h`: codes' values, as forward left them. */
static void check_d_hidden(const struct layer *l, const double *g, const double *h)
{
    const uint64_t H = l->p.hidden, I = l->p.intermediate;
    float *got = copy_of(l->group.args[0].d_topk_weight, (uint64_t)l->p.tokens * l->p.topk * sizeof(*got));

    for (uint64_t r = 0; r < l->rows; r++) {
        struct sum s = { 0 };
        if (l->slot[r] == ~0u)
            continue;
        for (uint64_t i = 0; i < I; i++) {
            struct sum u = dot(g + l->slot[r] / l->p.topk * H, l->across[2] + (l->expert[r] * I + i) * H, H);
            add(&s, u.exact * h[r * I + i], u.magnitude * fabs(h[r * I + i]));
        }
        check("d_hidden times h", r, 0, (double)got[l->slot[r]], s, E4M3_BOUND, 0);
    }
    checked("d_hidden");
    free(got);
}

static void check_d_input(const struct layer *l, const double *d_a, const double *d_b)
{
    const uint64_t H = l->p.hidden, I = l->p.intermediate;
    double *d_x = slots_of(l);

    for (uint64_t r = 0; r < l->rows; r++)
        for (uint64_t c = 0; l->slot[r] != ~0u && c < H; c++) {
            struct sum s = dot(d_a + r * I, l->across[0] + (l->expert[r] * H + c) * I, I);
            struct sum up = dot(d_b + r * I, l->across[1] + (l->expert[r] * H + c) * I, I);
            add(&s, up.exact, up.magnitude);
            check("d_input", r, c, d_x[l->slot[r] * H + c], s, E4M3_BOUND, BF16_HALF_ULP);
        }
    checked("d_input");
    free(d_x);
}

/* gradient [E][rows][columns]: sums over an expert's rows of `left` times `right`, either one row a token or a padded row. */
static void check_wgrad(const char *what, const struct layer *l, const float *gradient, const double *left, uint64_t rows,
                        bool left_of_token, const double *right, uint64_t columns, bool right_of_token, double bound)
{
    float *got = copy_of(gradient, l->p.experts * rows * columns * sizeof(*got));
    struct sum *want = calloc(l->p.experts * rows * columns, sizeof(*want));

    assert_non_null(want);
    for (uint64_t n = 0; n < l->rows; n++) {
        const uint64_t token = l->slot[n] / l->p.topk;
        if (l->slot[n] == ~0u)
            continue;
        for (uint64_t r = 0; r < rows; r++)
            for (uint64_t c = 0; c < columns; c++) {
                const double term = left[(left_of_token ? token : n) * rows + r] * right[(right_of_token ? token : n) * columns + c];
                add(&want[(l->expert[n] * rows + r) * columns + c], term, fabs(term));
            }
    }
    for (uint64_t i = 0; i < l->p.experts * rows * columns; i++)
        check(what, i / columns, i % columns, (double)got[i], want[i], bound, 0);
    checked(what);
    free(got);
    free(want);
}

/* FP64 values of what weight gradients are products of; all of one layer's rows. */
struct wgrad_operands {
    double *x, *g, *d_a, *d_b, *weighted;
};

/* All three; frees the operands. x and g may lie in the order of tokens. */
static void check_wgrads(const struct layer *l, struct wgrad_operands *o, bool of_token, double bound)
{
    const struct mok_expert_params *params = &l->group.args[0].params;
    const uint64_t H = l->p.hidden, I = l->p.intermediate;

    check_wgrad("gradient of gate", l, params->d_gate, o->d_a, I, false, o->x, H, of_token, bound);
    check_wgrad("gradient of up", l, params->d_up, o->d_b, I, false, o->x, H, of_token, bound);
    check_wgrad("gradient of down", l, params->d_down, o->g, H, of_token, o->weighted, I, false, bound);
    free(o->x);
    free(o->g);
    free(o->d_a);
    free(o->d_b);
    free(o->weighted);
}

/* Runs MAIN of a forward and a backward, and knows then whose rows are whose; forward's h too, if it is wanted. */
static void run_layer(struct layer *l, double **ret_h)
{
    uint64_t rows[MOK_MAX_EXPERTS];
    struct mok_op_result result;

    assert_int_equal(device_phase(&l->group, 0, MOK_PHASE_PREPARE).status, 0);
    result = device_phase(&l->group, 0, MOK_PHASE_MAIN);
    assert_int_equal(result.status, 0);
    memcpy(rows, result.expert_rows, l->p.experts * sizeof(rows[0]));
    result.expert_rows = rows;
    find_rows(l, &result);
    check_forward(l);
    *ret_h = inner_rows(l, l->layout.h, l->layout.h_scale);
    device_backward(&l->group, 0);
}

static void products_are_exact_but_for_accumulation(void **state)
{
    struct layer l;
    double *h;

    (void)state;
    open_layer(&l, false);
    run_layer(&l, &h);
    if (MX_SCALE == 32)
        take_turned(&l);
    struct wgrad_operands o = { .x = quantised_rows(&l, false), .g = quantised_rows(&l, true) };
    o.d_a = inner_rows(&l, l.layout.d_a_code, l.layout.d_a_scale);
    o.d_b = inner_rows(&l, l.layout.d_b_code, l.layout.d_b_scale);
    o.weighted = of_bf16(own(&l) + l.layout.h_wide, l.rows * l.p.intermediate);
    check_d_hidden(&l, o.g, h);
    check_d_input(&l, o.d_a, o.d_b);
    check_wgrads(&l, &o, true, BF16_BOUND);
    free(h);
    close_layer(&l);
}

/* ---- MXFP8 weight gradients ---- */

/* Where rows' codes and scales lie: one row a token, or a padded row. */
struct row_codes {
    const uint8_t *code, *scale;
    uint64_t pitch, scale_pitch;
    bool of_token;
};

static uint8_t scale_of_row(const struct layer *l, const struct row_codes *rows, uint64_t row, uint64_t column)
{
    uint8_t scale;
    const uint64_t at = rows->of_token ? l->slot[row] / l->p.topk : row;

    assert_int_equal(cudaMemcpy(&scale, rows->scale + at * rows->scale_pitch + column / 32, 1, cudaMemcpyDeviceToHost), 0);
    return scale;
}

/* The operand's values [padded rows][columns]: those of the rows, for the largest scale of 128, or 32, of them and as many columns. */
static double *tokenwise(const struct layer *l, enum mok_cuda_tokenwise_operand operand, uint64_t columns,
                         const struct row_codes *rows, const double *value)
{
    const uint64_t ring = l->group.plan[0].ring_rows, blocks = mok_div_up(columns, MX_SCALE);
    uint8_t *code = copy_of(own(l) + l->layout.tokenwise[operand], ring * columns);
    float *scale = copy_of(own(l) + l->layout.tokenwise_scale[operand], ring / MX_SCALE * blocks * sizeof(*scale));
    double *got = doubles(l->rows * columns);

    for (uint64_t row = 0; row < l->rows; row += MX_SCALE)
        for (uint64_t column = 0; column < columns; column += MX_SCALE) {
            uint8_t largest = 0;
            for (uint64_t r = row; r < row + MX_SCALE; r++)
                if (l->slot[r] != ~0u)
                    largest = (uint8_t)mok_max_u64(largest, scale_of_row(l, rows, r, column));
            assert_true(scale[row / MX_SCALE * blocks + column / MX_SCALE] == mok_e8m0_to_f32(largest));
            for (uint64_t r = row; r < row + MX_SCALE; r++)
                for (uint64_t c = column; c < mok_min_u64(column + MX_SCALE, columns); c++) {
                    const uint64_t from = rows->of_token ? l->slot[r] / l->p.topk : r;
                    const double want = l->slot[r] == ~0u ? 0 : (double)mok_mx_reround((float)value[from * columns + c], largest);
                    got[r * columns + c] = (double)mok_mx_decode(code[c * ring + r], largest);
                    if (got[r * columns + c] != want)
                        fail_msg("operand %u, row %llu, column %llu: %g, must be %g", operand, (unsigned long long)r,
                                 (unsigned long long)c, got[r * columns + c], want);
                }
        }
    free(code);
    free(scale);
    return got;
}

static double *inner_operand(const struct layer *l, enum mok_cuda_tokenwise_operand operand, uint64_t code, uint64_t scale)
{
    const struct row_codes rows = { own(l) + code, own(l) + scale, l->p.intermediate,
                                    mok_cuda_h_scale_bytes(&l->group.plan[0]), false };
    double *value = inner_rows(l, code, scale), *got = tokenwise(l, operand, l->p.intermediate, &rows, value);

    free(value);
    return got;
}

static double *outer_operand(const struct layer *l, bool d_out)
{
    const uint64_t pitch = mok_cuda_x_row_bytes(&l->group.plan[0]);
    const uint8_t *code = symmetric(l) + l->group.plan[0].sym_engine + (d_out ? l->group.plan[0].spec.max_tokens * pitch : 0);
    const struct row_codes rows = { code, code + l->p.hidden, pitch, pitch, true };
    double *value = quantised_rows(l, d_out);
    double *got = tokenwise(l, d_out ? MOK_TOKENWISE_G : MOK_TOKENWISE_X, l->p.hidden, &rows, value);

    free(value);
    return got;
}

static void mxfp8_weight_gradients_are_products_of_turned_rows(void **state)
{
    struct layer l;
    double *h;

    (void)state;
    open_layer(&l, true);
    run_layer(&l, &h);
    struct wgrad_operands o = { .x = outer_operand(&l, false), .g = outer_operand(&l, true) };
    o.d_a = inner_operand(&l, MOK_TOKENWISE_D_A, l.layout.d_a_code, l.layout.d_a_scale);
    o.d_b = inner_operand(&l, MOK_TOKENWISE_D_B, l.layout.d_b_code, l.layout.d_b_scale);
    o.weighted = inner_operand(&l, MOK_TOKENWISE_H, l.layout.h, l.layout.h_scale);
    check_wgrads(&l, &o, false, E4M3_BOUND);
    free(h);
    close_layer(&l);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_exact_but_for_accumulation),
        cmocka_unit_test(mxfp8_weight_gradients_are_products_of_turned_rows),
    };

    device_or_skip();
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
