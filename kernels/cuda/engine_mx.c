/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8's part of the engine's host side: arguments and tensor maps of its forward, and what quantises x. A shared
 * expert is BF16: it runs first, with the other forward's kernels and a schedule of its own.
 */
#include <string.h>

#include "../hd.h"
#include "engine_layer.h"
#include "mx.h"

bool mok_cuda_is_mx(const struct mok_engine_layer *l)
{
    return l->plan.spec.precision != MOK_BF16;
}

bool mok_cuda_is_per32(const struct mok_engine_layer *l)
{
    return l->plan.spec.precision == MOK_MXFP8_PER32;
}

int mok_cuda_mx_ready(void)
{
    int (*const setup[])(void) = { mok_cuda_mx_setup, mok_cuda_mx_backward_setup, mok_cuda_mx_wgrad_setup,
                                   mok_cuda_mx_setup_32, mok_cuda_mx_backward_setup_32 };
    int r = 0;

    for (unsigned i = 0; i < sizeof(setup) / sizeof(setup[0]) && r == 0; i++)
        r = setup[i]();
    return r;
}

void mok_cuda_mx_fill(struct mok_engine_layer *l)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    struct mok_cuda_mx_args *mx = &l->mx;
    uint8_t *m = l->private_memory;

    mx->common = l->main.common;
    mx->common.k_blocks = (uint32_t)mok_div_up(spec->hidden, MOK_MX_TILE_K);
    mx->h = m + l->layout.h;
    mx->h_scale = m + l->layout.h_scale;
    mx->x_factor = (float *)(m + l->layout.x_factor);
    mx->h_factor = (float *)(m + l->layout.h_factor);
    mx->gate_up_pairs = (struct mok_cuda_mx_pair *)(m + l->layout.gate_up_pairs);
    mx->down_pairs = (struct mok_cuda_mx_pair *)(m + l->layout.down_pairs);
    mx->factor_rows = (uint32_t)mok_cuda_factor_rows(&l->plan);
    mx->x_rows[1] = m + l->layout.x;
    mx->inter = spec->intermediate;
    mx->tiles = l->layout.gate_up_tiles;
    mx->h_blocks = (uint32_t)mok_div_up(spec->intermediate, MOK_MX_TILE_K);
    mx->x_row_bytes = (uint32_t)mok_cuda_x_row_bytes(&l->plan);
    mx->h_scale_bytes = (uint32_t)mok_cuda_h_scale_bytes(&l->plan);
    if (mok_cuda_is_mx(l)) /* what a block does before it retires is counted with these */
        l->main.set[0].k_blocks = mx->h_blocks;
}

/* What lies behind a row's codes, its scales, is past the map's edge. */
static int map_x(struct mok_engine_layer *l, unsigned i)
{
    return mok_cuda_make_row_map(&l->engine->driver, &l->mx.x_map[i], l->mx.x_rows[i], 2, l->plan.spec.hidden / 2,
                                 l->plan.ring_rows, 1, MOK_TILE_M, 2, l->mx.x_row_bytes);
}

/* Pairs of codes are mapped as BF16 elements: boxes are 128 bytes wide all the same, and what is past an edge is zero.
 */
int mok_cuda_mx_make_maps(struct mok_engine_layer *l, const struct mok_expert_params *p)
{
    const struct mok_cuda_driver *d = &l->engine->driver;
    const uint64_t hidden = l->plan.spec.hidden, inter = l->plan.spec.intermediate, experts = l->plan.local_experts;
    struct mok_cuda_mx_args *mx = &l->mx;
    int r = mok_cuda_make_map(d, &mx->gate, p->gate, 2, hidden / 2, inter, experts, MOK_TILE_N / 2, 3);

    if (r == 0)
        r = mok_cuda_make_map(d, &mx->up, p->up, 2, hidden / 2, inter, experts, MOK_TILE_N / 2, 3);
    if (r == 0)
        r = mok_cuda_make_map(d, &mx->down, p->down, 2, inter / 2, hidden, experts, MOK_TILE_N / 2, 3);
    if (r == 0)
        r = mok_cuda_make_map(d, &mx->h_map, mx->h, 2, inter / 2, l->plan.ring_rows, 1, MOK_TILE_M, 2);
    if (r == 0)
        r = map_x(l, 1);
    mx->gate_scale = p->gate_scale;
    mx->up_scale = p->up_scale;
    mx->down_scale = p->down_scale;
    return r;
}

bool mok_cuda_mx_beside(const struct mok_engine_layer *l, const struct mok_op_args *args)
{
    return l->engine->now->phase == MOK_PHASE_WHOLE && args->kind == MOK_KIND_FORWARD;
}

int mok_cuda_mx_quantize(struct mok_engine_layer *l, const struct mok_op_args *args, const uint32_t *bad_id,
                         void *stream)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    const bool backward = args->kind == MOK_KIND_BACKWARD, wide = backward && !mok_spec_mxfp8_wgrad(spec);
    struct mok_cuda_quantize_args a = {
        .x = args->peer[spec->rank].x,
        .bad_id = bad_id,
        .to = l->symmetric[spec->rank] + l->plan.sym_engine,
        .wide = wide ? l->private_memory + l->layout.x_wide : NULL,
        .row_bytes = l->mx.x_row_bytes,
        .tokens = args->tokens,
        .hidden = spec->hidden,
        .beside = mok_cuda_mx_beside(l, args),
    };
    int (*launch)(const struct mok_cuda_quantize_args *, void *) =
        mok_cuda_is_per32(l) ? mok_cuda_launch_quantize_32 : mok_cuda_launch_quantize;
    int r = launch(&a, stream);

    if (r == 0 && backward) {
        a.x = args->peer[spec->rank].d_out;
        a.to += (uint64_t)spec->max_tokens * a.row_bytes;
        a.wide = wide ? l->private_memory + l->layout.g_wide : NULL;
        r = launch(&a, stream);
    }
    return r == 0 ? 0 : -MOK_EDEVICE;
}

/* Beside the schedule: nobody says when weights have changed. */
static int launch_pairs(struct mok_engine_layer *l, void *stream)
{
    const struct mok_cuda_mx_args *mx = &l->mx;
    const struct mok_cuda_pairs_args a = {
        .gate_scale = mx->gate_scale,
        .up_scale = mx->up_scale,
        .down_scale = mx->down_scale,
        .gate_up = mx->gate_up_pairs,
        .down = mx->down_pairs,
        .bad_id = l->schedule.bad_id,
        .experts = l->plan.local_experts,
        .hidden = l->plan.spec.hidden,
        .inter = mx->inter,
        .tiles = mx->tiles,
        .down_tiles = mx->common.down_tiles,
    };

    return mok_cuda_launch_pairs(&a, stream) == 0 ? 0 : -MOK_EDEVICE;
}

/* The shared expert alone, of this rank's own tokens. */
static int launch_shared(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    struct mok_cuda_schedule_args s = l->schedule;

    s.slots = 0;
    memset(s.slot_first, 0, sizeof(s.slot_first));
    s.shared_tokens = args->tokens;
    if (mok_cuda_launch_schedule(&s, stream) != 0)
        return -MOK_EDEVICE;
    l->main.common.x_ring[0] = l->main.common.x_ring[1];
    l->main.common.abort_word = l->engine->now->abort_word;
    l->main.common.report = l->engine->now->report;
    l->main.common.marks = l->engine->now->marks_now;
    l->main.common.chaos_seed++;
    return mok_cuda_launch_main(&l->main, l->engine->blocks, stream) == 0 ? 0 : -MOK_EDEVICE;
}

int mok_cuda_mx_schedule(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    struct mok_cuda_schedule_args *s = &l->schedule;

    if (s->shared_tokens && launch_shared(l, args, stream) < 0)
        return -MOK_EDEVICE;
    s->shared_tokens = 0;
    for (uint32_t i = 0; i < l->plan.spec.ep; i++)
        s->x[i] = l->symmetric[i] + l->plan.sym_engine;
    if (mok_cuda_launch_schedule(s, stream) != 0)
        return -MOK_EDEVICE;
    if (l->plan.spec.precision == MOK_MXFP8_PER128 && launch_pairs(l, stream) < 0)
        return -MOK_EDEVICE;
    return mok_cuda_mx_beside(l, args) ? mok_cuda_mx_quantize(l, args, s->bad_id, stream) : 0;
}

int mok_cuda_mx_launch(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    const struct mok_cuda_kept *kept = &l->kept;
    uint8_t *ring = args->context_mode == MOK_CONTEXT_FULL ? (uint8_t *)args->context + l->plan.ctx_ring : NULL;
    struct mok_cuda_mx_args *mx = &l->mx;
    int (*launch)(const struct mok_cuda_mx_args *, uint32_t, void *) =
        mok_cuda_is_per32(l) ? mok_cuda_launch_mx_main_32 : mok_cuda_launch_mx_main;

    mx->common.x_ring[0] = ring && l->plan.spec.ep > 1 ? ring + kept->x : mx->common.x_ring[1];
    mx->x_rows[0] = mx->common.x_ring[0] ? mx->common.x_ring[0] : mx->x_rows[1];
    if (mx->x_rows[0] == mx->x_rows[1])
        mx->x_map[0] = mx->x_map[1];
    else if (map_x(l, 0) < 0)
        return -MOK_EDEVICE;
    mx->context_a = ring ? ring + kept->a : NULL;
    mx->context_b = ring ? ring + kept->b : NULL;
    mx->common.abort_word = l->engine->now->abort_word;
    mx->common.report = l->engine->now->report;
    mx->common.marks = l->engine->now->marks_now;
    mx->common.chaos_seed++;
    mok_cuda_retire(l, args, l->schedule.slots, &mx->common);
    return launch(mx, l->engine->blocks, stream) == 0 ? 0 : -MOK_EDEVICE;
}
