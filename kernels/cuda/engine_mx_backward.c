/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backward of MXFP8 layers, host side: weights turned if the client has not, the shared expert by itself, then for each
 * macrobatch one kernel for all but its weight gradients, and the BF16 backward's kernel for these, or, where these are
 * MXFP8, one that turns the rows and one for the products. How many macrobatches there are only the device knows: kernels
 * of those that are not there find no task.
 */
#include <string.h>

#include "../hd.h"
#include "engine_layer.h"
#include "mx.h"

/* MXFP8 weight gradients: what is turned of each macrobatch, and where to. */
static void fill_tokenwise(struct mok_engine_layer *l)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    const struct mok_cuda_mx_backward_args *a = &l->mx_backward;
    struct mok_cuda_tokenwise_args *t = &l->tokenwise;
    struct mok_cuda_mx_wgrad_args *w = &l->mx_wgrad;
    const uint32_t values = mok_cuda_tokenwise_values(&l->plan);
    uint8_t *m = l->private_memory;

    t->operand[MOK_TOKENWISE_X] = (struct mok_cuda_tokenwise){ .rows = l->schedule.row_src, .columns = spec->hidden };
    t->operand[MOK_TOKENWISE_G] =
        (struct mok_cuda_tokenwise){ .rows = a->row_g, .ring = a->g_ring, .columns = spec->hidden };
    t->operand[MOK_TOKENWISE_D_A] =
        (struct mok_cuda_tokenwise){ .code = a->d_a_code, .scale = a->d_a_scale, .columns = spec->intermediate };
    t->operand[MOK_TOKENWISE_D_B] =
        (struct mok_cuda_tokenwise){ .code = a->d_b_code, .scale = a->d_b_scale, .columns = spec->intermediate };
    t->operand[MOK_TOKENWISE_H] =
        (struct mok_cuda_tokenwise){ .code = l->mx.h, .scale = l->mx.h_scale, .columns = spec->intermediate };
    for (unsigned i = 0; i < MOK_TOKENWISE; i++) {
        t->operand[i].to = m + l->layout.tokenwise[i];
        t->operand[i].to_scale = (float *)(m + l->layout.tokenwise_scale[i]);
        w->scale[i] = t->operand[i].to_scale;
    }
    t->head = l->schedule.head;
    t->runs = l->schedule.runs;
    t->ring_rows = w->ring_rows = (uint32_t)l->plan.ring_rows;
    t->x_row_bytes = l->mx.x_row_bytes;
    t->h_scale_bytes = l->mx.h_scale_bytes;
    t->per32 = w->per32 = mok_cuda_is_per32(l);
    w->hidden_blocks = (uint32_t)mok_div_up(spec->hidden, values);
    w->inter_blocks = (uint32_t)mok_div_up(spec->intermediate, values);
}

static int map_tokenwise(struct mok_engine_layer *l)
{
    int r = 0;

    for (unsigned i = 0; i < MOK_TOKENWISE && r == 0; i++)
        r = mok_cuda_make_map(&l->engine->driver, &l->mx_wgrad.operand[i], l->tokenwise.operand[i].to, 2,
                              l->plan.ring_rows / 2, l->tokenwise.operand[i].columns, 1, MOK_TILE_M, 3);
    return r;
}

void mok_cuda_mx_backward_fill(struct mok_engine_layer *l)
{
    const struct mok_cuda_layout *layout = &l->layout;
    struct mok_cuda_mx_backward_args *a = &l->mx_backward;
    const bool remote = l->plan.spec.ep > 1;
    uint8_t *m = l->private_memory;

    if (!mok_cuda_is_mx(l))
        return;
    a->common = l->mx.common;
    a->mx = l->mx;
    a->gate_t_scale = m + layout->gate_t_scale;
    a->up_t_scale = m + layout->up_t_scale;
    a->down_t_scale = m + layout->down_t_scale;
    a->d_a_code = m + layout->d_a_code;
    a->d_b_code = m + layout->d_b_code;
    a->d_a_scale = m + layout->d_a_scale;
    a->d_b_scale = m + layout->d_b_scale;
    a->d_a_factor = (float *)(m + layout->d_a_factor);
    a->d_b_factor = (float *)(m + layout->d_b_factor);
    a->a_rows = m + layout->a;
    a->b_rows = m + layout->b;
    a->d_a_rows = m + layout->d_a;
    a->d_b_rows = m + layout->d_b;
    a->h_rows = m + layout->h_wide;
    a->gates_done = l->schedule.gates_done;
    a->row_g = l->schedule.row_g;
    a->row_x_wide = (uint64_t *)(m + layout->row_x_wide);
    a->row_g_wide = (uint64_t *)(m + layout->row_g_wide);
    a->g_ring = remote ? m + layout->g : NULL;
    a->x_wide_ring = remote ? m + layout->x_wide_ring : NULL;
    a->g_wide_ring = remote ? m + layout->g_wide_ring : NULL;
    a->row_weight_dst = l->schedule.row_weight_dst;
    a->row_weight = l->schedule.row_weight;
    a->partial = (float *)(m + layout->partial);
    a->hidden_tiles = layout->hidden_tiles;
    a->tokenwise = mok_spec_mxfp8_wgrad(&l->plan.spec);
    if (a->tokenwise)
        fill_tokenwise(l);
}

/* `a`, `b`: gate and up as the context keeps them, or the rows that are made again. */
static int map_kept(struct mok_engine_layer *l, const uint8_t *ring)
{
    const struct mok_cuda_driver *d = &l->engine->driver;
    struct mok_cuda_mx_backward_args *a = &l->mx_backward;
    const void *rows[4] = { ring ? ring + l->kept.a : a->a_rows, ring ? ring + l->kept.b : a->b_rows, a->a_rows,
                            a->b_rows };
    CUtensorMap *map[4] = { &a->a[0], &a->b[0], &a->a[1], &a->b[1] };
    int r = 0;

    for (unsigned i = 0; i < 4 && r == 0; i++)
        r = mok_cuda_make_map(d, map[i], rows[i], 2, l->plan.spec.intermediate, l->plan.ring_rows, 1, 64, 3);
    return r;
}

/* Where a turned weight lies: with the client, or in the workspace. */
static const uint8_t *turned(const struct mok_engine_layer *l, const void *given, uint64_t own)
{
    return l->plan.spec.transposed_weights ? given : l->private_memory + own;
}

/* Pairs of codes are mapped as BF16 elements, see mok_cuda_mx_make_maps. */
static int map_codes(struct mok_engine_layer *l, const struct mok_expert_params *p)
{
    const uint64_t hidden = l->plan.spec.hidden, inter = l->plan.spec.intermediate, experts = l->plan.local_experts;
    const struct mok_cuda_layout *layout = &l->layout;
    struct mok_cuda_mx_backward_args *a = &l->mx_backward;
    const struct {
        CUtensorMap *map;
        const void *codes;
        uint64_t columns, rows, planes;
    } all[] = {
        { &a->gate_t, turned(l, p->gate_transposed, layout->gate_t), inter, hidden, experts },
        { &a->up_t, turned(l, p->up_transposed, layout->up_t), inter, hidden, experts },
        { &a->down_t, turned(l, p->down_transposed, layout->down_t), hidden, inter, experts },
        { &a->d_a, a->d_a_code, inter, l->plan.ring_rows, 1 },
        { &a->d_b, a->d_b_code, inter, l->plan.ring_rows, 1 },
    };
    int r = 0;

    for (unsigned i = 0; i < sizeof(all) / sizeof(all[0]) && r == 0; i++)
        r = mok_cuda_make_map(&l->engine->driver, all[i].map, all[i].codes, 2, all[i].columns / 2, all[i].rows,
                              all[i].planes, MOK_TILE_M, 3);
    return r;
}

int mok_cuda_mx_backward_make_maps(struct mok_engine_layer *l, const struct mok_expert_params *p, const uint8_t *ring)
{
    int r = mok_cuda_mx_make_maps(l, p);

    l->maps_made = false; /* forward's, which this has made anew */
    l->mx_backward.mx = l->mx;
    if (r == 0)
        r = map_codes(l, p);
    if (r == 0 && l->mx_backward.tokenwise)
        r = map_tokenwise(l);
    return r == 0 ? map_kept(l, ring) : r;
}

/* Codes and scales; scales alone where the client has turned the codes. */
static int turn_weights(struct mok_engine_layer *l, const struct mok_expert_params *p, void *stream)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    const struct mok_cuda_layout *layout = &l->layout;
    uint8_t *m = l->private_memory;
    const struct mok_cuda_turn_args a = {
        .weight = { { p->gate, p->gate_scale, m + layout->gate_t, m + layout->gate_t_scale,
                      spec->intermediate, spec->hidden },
                    { p->up, p->up_scale, m + layout->up_t, m + layout->up_t_scale, spec->intermediate,
                      spec->hidden },
                    { p->down, p->down_scale, m + layout->down_t, m + layout->down_t_scale, spec->hidden,
                      spec->intermediate } },
        .experts = l->plan.local_experts,
        .per32 = mok_cuda_is_per32(l),
        .bad_id = l->engine->now->bad_id,
    };
    int r = spec->transposed_weights ? mok_cuda_launch_tile_scales(&a, stream) : mok_cuda_launch_turn(&a, stream);

    return r == 0 ? 0 : -MOK_EDEVICE;
}

/* What the kernels of weight gradients are told, for the list that `head` names. */
static void tell_wgrad(struct mok_engine_layer *l, const struct mok_op_args *args, struct mok_cuda_head *head)
{
    struct mok_cuda_common *common = &l->backward.common;

    l->backward.kept = 0;
    common->head = head;
    common->x_ring[0] = common->x_ring[1];
    common->abort_word = l->engine->now->abort_word;
    common->report = l->engine->now->report;
    common->marks = l->engine->now->marks_now;
    common->chaos_seed++;
    mok_cuda_retire(l, args, l->schedule.slots, common);
}

/* The BF16 backward's kernel. */
static int launch_wide(struct mok_engine_layer *l, const struct mok_op_args *args, struct mok_cuda_head *head,
                       uint64_t *row_x, uint64_t *row_g, void *stream)
{
    tell_wgrad(l, args, head);
    l->backward.row_g = row_g;
    l->backward.common.row_src = row_x;
    return mok_cuda_launch_backward(&l->backward, l->engine->blocks, stream) == 0 ? 0 : -MOK_EDEVICE;
}

/* The macrobatch's rows turned, and the products of E4M3. */
static int launch_tokenwise(struct mok_engine_layer *l, const struct mok_op_args *args, uint32_t macrobatch,
                            struct mok_cuda_head *head, void *stream)
{
    l->tokenwise.operand[MOK_TOKENWISE_X].ring = l->mx_backward.common.x_ring[macrobatch > 0];
    l->tokenwise.bad_id = l->engine->now->bad_id;
    l->tokenwise.macrobatch = macrobatch;
    if (mok_cuda_launch_tokenwise(&l->tokenwise, stream) != 0)
        return -MOK_EDEVICE;
    tell_wgrad(l, args, head);
    l->mx_wgrad.wide = l->backward;
    l->mx_wgrad.common = l->backward.common;
    return mok_cuda_launch_mx_wgrad(&l->mx_wgrad, l->engine->blocks, stream) == 0 ? 0 : -MOK_EDEVICE;
}

/* The shared expert alone, of this rank's own tokens: there are no others for this schedule. */
static int launch_shared(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    struct mok_cuda_schedule_args s = l->schedule;

    s.slots = 0;
    s.local_experts = 0;
    s.kept = 0;
    memset(s.slot_first, 0, sizeof(s.slot_first));
    if (mok_cuda_launch_schedule(&s, stream) != 0)
        return -MOK_EDEVICE;
    return launch_wide(l, args, s.head, s.row_src, s.row_g, stream);
}

int mok_cuda_mx_backward_schedule(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    const uint64_t rows = (uint64_t)l->plan.spec.max_tokens * l->mx.x_row_bytes;
    struct mok_cuda_schedule_args s;
    int r = turn_weights(l, &args->params, stream);

    if (r == 0 && l->plan.spec.shared_intermediate)
        r = launch_shared(l, args, stream);
    if (r < 0)
        return r;
    s = l->schedule;
    s.shared_tokens = s.shared_hidden_tiles = 0;
    for (uint32_t i = 0; i < l->plan.spec.ep; i++) {
        s.x[i] = l->symmetric[i] + l->plan.sym_engine;
        s.g[i] = l->symmetric[i] + l->plan.sym_engine + rows;
    }
    if (!l->mx_backward.tokenwise) {
        s.row_x_wide = l->mx_backward.row_x_wide;
        s.row_g_wide = l->mx_backward.row_g_wide;
        s.x_wide = l->private_memory + l->layout.x_wide;
        s.g_wide = l->private_memory + l->layout.g_wide;
    }
    s.spans = (struct mok_cuda_head *)(l->private_memory + l->layout.spans);
    s.max_macrobatches = (uint32_t)l->layout.max_macrobatches;
    return mok_cuda_launch_schedule(&s, stream) == 0 ? 0 : -MOK_EDEVICE;
}

int mok_cuda_mx_backward_launch(struct mok_engine_layer *l, const struct mok_op_args *args, const uint8_t *ring,
                                void *stream)
{
    struct mok_cuda_head *spans = (struct mok_cuda_head *)(l->private_memory + l->layout.spans);
    struct mok_cuda_mx_backward_args *a = &l->mx_backward;
    struct mok_cuda_common *common = &a->common;
    int (*launch)(const struct mok_cuda_mx_backward_args *, uint32_t, void *) =
        mok_cuda_is_per32(l) ? mok_cuda_launch_mx_backward_32 : mok_cuda_launch_mx_backward;

    common->x_ring[0] = ring && l->plan.spec.ep > 1 ? (void *)(uintptr_t)(ring + l->kept.x) : common->x_ring[1];
    common->abort_word = l->engine->now->abort_word;
    common->report = l->engine->now->report;
    common->marks = l->engine->now->marks_now;
    a->kept = ring != NULL;
    mok_cuda_retire(l, args, l->schedule.slots, common);
    for (uint64_t i = 0; i < l->layout.max_macrobatches; i++) {
        common->chaos_seed++;
        common->head = spans + 2 * i;
        a->mx.common = *common;
        if (launch(a, l->engine->blocks, stream) != 0)
            return -MOK_EDEVICE;
        int r = a->tokenwise ? launch_tokenwise(l, args, (uint32_t)i, spans + 2 * i + 1, stream)
                             : launch_wide(l, args, spans + 2 * i + 1, a->row_x_wide, a->row_g_wide, stream);
        if (r < 0)
            return r;
    }
    return 0;
}
