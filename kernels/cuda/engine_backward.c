/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward's part of the engine's host side: its arguments and tensor maps, and what it takes from a context. A context is
 * the client's memory: only the device's copies of its header and routing are ever believed.
 */
#include <string.h>

#include "../args.h"
#include "../hd.h"
#include "engine_layer.h"

#define BOX_ROWS 64u

static void fill_set(struct mok_cuda_backward_set *s, uint32_t inter)
{
    s->inter = inter;
    s->tiles = (uint32_t)mok_div_up(inter, MOK_TILE_N / 2);
    s->hidden_tiles = (uint32_t)mok_div_up(inter, MOK_TILE_N);
    s->k_blocks = (uint32_t)mok_div_up(inter, MOK_TILE_K);
}

void mok_cuda_backward_fill(struct mok_engine_layer *l)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    const struct mok_cuda_layout *layout = &l->layout;
    struct mok_cuda_backward_set *routed = &l->backward.set[0], *shared = &l->backward.set[1];
    uint8_t *m = l->private_memory;

    l->backward.common = l->main.common;
    l->backward.runs = l->schedule.runs;
    l->backward.gates_done = l->schedule.gates_done;
    l->backward.row_g = l->schedule.row_g;
    l->backward.row_weight_dst = l->schedule.row_weight_dst;
    l->backward.row_weight = l->schedule.row_weight;
    l->backward.g_ring = spec->ep > 1 ? m + layout->g : NULL;
    l->backward.partial = (float *)(m + layout->partial);
    l->backward.narrow = mok_spec_bf16_gradients(spec);
    l->backward.sums_rows = layout->sums_count ? (float *)(m + layout->sums) : NULL;
    fill_set(routed, spec->intermediate);
    routed->a_rows = m + layout->a;
    routed->b_rows = m + layout->b;
    routed->d_a_rows = m + layout->d_a;
    routed->d_b_rows = m + layout->d_b;
    routed->h_rows = m + layout->h_wide;
    fill_set(shared, spec->shared_intermediate);
    shared->a_rows = m + layout->shared_a;
    shared->b_rows = m + layout->shared_b;
    shared->d_a_rows = m + layout->shared_d_a;
    shared->d_b_rows = m + layout->shared_d_b;
    shared->h_rows = m + layout->shared_h;
}

/* Three weights [experts][..][..] (NULL: not BF16) and their gradients, in the order gate, up, down. */
struct weights {
    const void *weight[3];
    void *gradient[3];
};

static int map_weights(const struct mok_cuda_driver *d, struct mok_cuda_backward_set *s, const struct weights *w,
                       uint64_t hidden, uint64_t experts, uint32_t gradient_bytes)
{
    CUtensorMap *maps[3] = { &s->gate, &s->up, &s->down };
    int r = 0;

    for (unsigned i = 0; i < 3 && r == 0; i++) {
        uint64_t columns = i < 2 ? hidden : s->inter, rows = i < 2 ? s->inter : hidden;

        s->gradient_rows[i] = w->gradient[i];
        if (w->weight[i])
            r = mok_cuda_make_map(d, maps[i], w->weight[i], 2, columns, rows, experts, BOX_ROWS, 3);
        if (r == 0)
            r = mok_cuda_make_map(d, &s->gradient[i], w->gradient[i], gradient_bytes, columns, rows, experts, BOX_ROWS, 3);
    }
    return r;
}

/* `a`, `b`: gate and up as the context keeps them, or the rows that are made again. */
static int map_rows(const struct mok_cuda_driver *d, struct mok_cuda_backward_set *s, const void *a, const void *b,
                    uint64_t rows)
{
    const struct {
        CUtensorMap *map;
        const void *rows;
    } all[] = {
        { &s->a[0], a },        { &s->b[0], b },        { &s->a[1], s->a_rows }, { &s->b[1], s->b_rows },
        { &s->d_a, s->d_a_rows }, { &s->d_b, s->d_b_rows }, { &s->h, s->h_rows },
    };
    int r = 0;

    for (unsigned i = 0; i < sizeof(all) / sizeof(all[0]) && r == 0; i++)
        r = mok_cuda_make_map(d, all[i].map, all[i].rows, 2, s->inter, rows, 1, BOX_ROWS, 3);
    return r;
}

static int map_sums(struct mok_engine_layer *l)
{
    const uint64_t hidden = l->plan.spec.hidden, inter = l->plan.spec.intermediate, planes = 3 * l->layout.sums_count;
    const struct mok_cuda_driver *d = &l->engine->driver;
    int r = mok_cuda_make_map(d, &l->backward.sums[0], l->backward.sums_rows, 4, hidden, inter, planes, BOX_ROWS, 3);

    return r < 0 ? r : mok_cuda_make_map(d, &l->backward.sums[1], l->backward.sums_rows, 4, inter, hidden, planes, BOX_ROWS, 3);
}

static const uint8_t *kept_ring(const struct mok_engine_layer *l, const struct mok_op_args *args)
{
    return args->context_mode == MOK_CONTEXT_FULL ? (const uint8_t *)args->context + l->plan.ctx_ring : NULL;
}

int mok_cuda_backward_make_maps(struct mok_engine_layer *l, const struct mok_op_args *args)
{
    const struct mok_cuda_driver *d = &l->engine->driver;
    const struct mok_expert_params *p = &args->params;
    const bool mx = mok_cuda_is_mx(l);
    const struct weights routed = { { mx ? NULL : p->gate, mx ? NULL : p->up, mx ? NULL : p->down },
                                    { p->d_gate, p->d_up, p->d_down } };
    const struct weights shared = { { p->shared_gate, p->shared_up, p->shared_down },
                                    { p->d_shared_gate, p->d_shared_up, p->d_shared_down } };
    struct mok_cuda_backward_set *s = l->backward.set;
    const uint8_t *ring = kept_ring(l, args);
    const struct mok_layer_spec *spec = &l->plan.spec;
    const uint32_t gradient_bytes = mok_spec_bf16_gradients(spec) ? 2 : sizeof(float);
    int r;

    if (l->backward_maps_made && l->backward_context == ring && memcmp(&l->backward_mapped, p, sizeof(*p)) == 0)
        return 0;
    l->backward_maps_made = false;
    r = map_weights(d, &s[0], &routed, spec->hidden, l->plan.local_experts, gradient_bytes);
    if (r == 0)
        r = map_rows(d, &s[0], ring ? ring + l->kept.a : s[0].a_rows, ring ? ring + l->kept.b : s[0].b_rows,
                     l->plan.ring_rows);
    if (r == 0 && spec->shared_intermediate)
        r = map_weights(d, &s[1], &shared, spec->hidden, 1, gradient_bytes);
    if (r == 0 && spec->shared_intermediate)
        r = map_rows(d, &s[1], s[1].a_rows, s[1].b_rows, l->layout.shared_rows);
    if (r == 0 && l->backward.sums_rows)
        r = map_sums(l);
    if (r == 0 && mx)
        r = mok_cuda_mx_backward_make_maps(l, p, ring);
    if (r == 0) {
        l->backward_mapped = *p;
        l->backward_context = ring;
        l->backward_maps_made = true;
    }
    return r;
}

void mok_cuda_backward_prepare(const struct mok_engine_layer *l, const struct mok_op_args *args,
                               struct mok_cuda_prepare_args *ret)
{
    const uint8_t *context = args->context;

    ret->ids = (const int32_t *)(context + l->plan.ctx_ids);
    ret->weight = (const float *)(context + l->plan.ctx_topk_weight);
    ret->header = args->context;
    ret->want = (struct mok_context_header){
        .magic = MOK_CONTEXT_MAGIC,
        .layer_hash = l->hash,
        .mode = args->context_mode,
        .tokens = args->tokens,
        .ring_rows_kept = args->context_mode == MOK_CONTEXT_FULL ? l->plan.ring_rows : UINT64_MAX,
    };
}

int mok_cuda_backward_check_context(const struct mok_engine_layer *l, const struct mok_cuda_run_entry *entry,
                                    struct mok_op_result *ret)
{
    const struct mok_cuda_asked *asked = &entry->args;
    struct mok_context_header header = entry->report->header;

    return mok_args_check_context(&l->plan, l->hash, &header, asked->context_mode, asked->tokens, ret);
}

int mok_cuda_backward_launch(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    const uint8_t *ring = kept_ring(l, args);
    struct mok_cuda_common *common = &l->backward.common;

    if (mok_cuda_is_mx(l))
        return mok_cuda_mx_backward_launch(l, args, ring, stream);
    /* remote x of macrobatch 0, which this direction only reads */
    common->x_ring[0] = common->x_ring[1];
    if (ring && l->plan.spec.ep > 1)
        common->x_ring[0] = (void *)(uintptr_t)(ring + l->kept.x);
    l->backward.kept = ring != NULL;
    common->abort_word = l->engine->now->abort_word;
    common->report = l->engine->now->report;
    common->marks = l->engine->now->marks_now;
    common->chaos_seed++;
    mok_cuda_retire(l, args, l->schedule.slots, common);
    return mok_cuda_launch_backward(&l->backward, l->engine->blocks, stream) == 0 ? 0 : -MOK_EDEVICE;
}
