/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks that give up their places: how many a grid has, and how much each does before it retires. Their number is an
 * estimate that changes no result: the last blocks of a grid never retire and do what is left, and those that come too late
 * find no task.
 */
#include "../hd.h"
#include "engine_layer.h"

#define MOST_RETIRING 65536u

/* What an operation's tasks come to, about. */
struct expected {
    uint64_t tasks, k_blocks;
};

static void expect(struct expected *all, struct mok_cuda_common *ret, enum mok_cuda_task_type type, uint64_t tasks,
                   uint64_t k_blocks)
{
    ret->work[type] = (uint32_t)mok_max_u64(k_blocks, 1);
    all->tasks += tasks;
    all->k_blocks += tasks * ret->work[type];
}

static void expect_forward(const struct mok_engine_layer *l, uint64_t units, struct expected *all,
                           struct mok_cuda_common *ret)
{
    expect(all, ret, MOK_TASK_GATE_UP, units * l->layout.gate_up_tiles, ret->k_blocks);
    expect(all, ret, MOK_TASK_DOWN, units * l->layout.down_tiles, l->main.set[0].k_blocks);
}

static void expect_backward(const struct mok_engine_layer *l, const struct mok_op_args *args, uint64_t rows,
                            uint64_t units, struct expected *all, struct mok_cuda_common *ret)
{
    const uint64_t tiles = (uint64_t)l->layout.hidden_tiles * l->layout.down_tiles;
    const uint64_t remade = args->context_mode == MOK_CONTEXT_FULL ? 0 : units;
    const bool stored = !(args->flags & MOK_OPF_OVERWRITE_WGRAD);

    expect(all, ret, MOK_TASK_GATE_UP, remade * l->layout.gate_up_tiles, ret->k_blocks);
    expect(all, ret, MOK_TASK_D_HIDDEN, units * l->layout.hidden_tiles, ret->k_blocks + 4);
    expect(all, ret, MOK_TASK_D_INPUT, units * l->layout.down_tiles, 2ull * l->main.set[0].k_blocks);
    expect(all, ret, MOK_TASK_WGRAD, 3 * tiles * l->plan.local_experts,
           rows / l->plan.local_experts / MOK_TILE_K + (stored ? 4 : 0));
}

/* Tokens of the shared expert count as rows of the others, by its width. */
static uint64_t rows_of(const struct mok_engine_layer *l, const struct mok_op_args *args, uint64_t slots)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    uint64_t shared = (uint64_t)args->tokens * spec->shared_intermediate / spec->intermediate;

    /* of several ranks one may get more rows than its share */
    return spec->ep == 1 ? slots + shared : slots / spec->ep * 5 / 4 + shared;
}

void mok_cuda_retire(const struct mok_engine_layer *l, const struct mok_op_args *args, uint64_t slots,
                     struct mok_cuda_common *ret)
{
    const uint64_t rows = rows_of(l, args, slots), units = mok_div_up(rows, MOK_UNIT_ROWS) + l->plan.local_experts / 2;
    struct expected all = { 0, 0 };
    uint64_t task, clusters;

    ret->retiring_blocks = 0;
    if (l->engine->config.yield_us == 0)
        return;
    ret->retire_after = (uint32_t)mok_max_u64(1000ull * l->engine->config.yield_us / MOK_K_BLOCK_NS, 1);
    if (args->kind == MOK_KIND_FORWARD)
        expect_forward(l, units, &all, ret);
    else
        expect_backward(l, args, rows, units, &all, ret);
    if (l->schedule.unit_pulls)
        expect(&all, ret, MOK_TASK_PULL, units * l->schedule.unit_pulls, ret->k_blocks / 4 / l->schedule.unit_pulls);
    task = all.k_blocks / mok_max_u64(all.tasks, 1);
    /* a block ends the task in which its time is over */
    clusters = all.k_blocks / mok_max_u64(ret->retire_after + task / 2, mok_max_u64(task, 1));
    clusters = mok_min_u64(clusters, MOST_RETIRING);
    if (clusters > l->engine->blocks / MOK_CLUSTER)
        ret->retiring_blocks = (uint32_t)(clusters * MOK_CLUSTER) - l->engine->blocks;
}
