/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Phases that say by themselves that they are over. An operation of one rank as a graph: one launch for all its
 * kernels, where a layer sees the same arguments again, as it does in every step of a job that keeps its buffers. What
 * differs from one operation to the next the kernels read. A graph names addresses and never holds what lies there.
 */
#include <cuda_runtime_api.h>
#include <string.h>

#include "engine.h"
#include "engine_layer.h"

static int queue_kernels(struct mok_cuda_run_entry *entry, const struct mok_op_args *args, cudaStream_t stream)
{
    const struct mok_cuda_tell_args tell = { .bad_id = entry->bad_id, .report = entry->report };

    int r = mok_cuda_queue(entry->layer, args, entry->phase, stream);
    return r < 0 ? r : mok_cuda_launch_tell(&tell, stream) == 0 ? 0 : -MOK_EDEVICE;
}

static void let_go(struct mok_engine *e, struct mok_cuda_graph *g)
{
    if (g->graph) {
        cudaGraphExecDestroy(g->graph);
        __atomic_sub_fetch(&e->graphs, 1, __ATOMIC_RELAXED);
    }
    *g = (struct mok_cuda_graph){ 0 };
}

/* Nothing has been queued if it fails. */
static void make(struct mok_cuda_graph *g, struct mok_cuda_run_entry *entry, const struct mok_op_args *args)
{
    struct mok_engine *e = entry->layer->engine;
    cudaGraph_t graph = NULL;

    g->refused = true;
    if (cudaStreamBeginCapture(e->capture, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
        return;
    int r = queue_kernels(entry, args, e->capture);
    if (cudaStreamEndCapture(e->capture, &graph) != cudaSuccess || !graph)
        return;
    g->refused = r < 0 || cudaGraphInstantiate(&g->graph, graph, 0) != cudaSuccess;
    cudaGraphDestroy(graph);
    if (g->refused)
        g->graph = NULL;
    else
        __atomic_add_fetch(&e->graphs, 1, __ATOMIC_RELAXED);
}

static bool same(const struct mok_cuda_graph *g, const struct mok_op_args *args)
{
    struct mok_op_args key = *args;

    key.peer = NULL;
    return memcmp(&g->args, &key, sizeof(key)) == 0 && g->peer.x == args->peer->x &&
           g->peer.d_out == args->peer->d_out && g->peer.tokens == args->peer->tokens;
}

/* The graph of these arguments; NULL: there is none, or not yet. The entry is free, so none of its graphs runs. */
static cudaGraphExec_t find(struct mok_cuda_run_entry *entry, const struct mok_op_args *args)
{
    struct mok_engine_layer *l = entry->layer;
    struct mok_cuda_graph *g = &l->graph[entry - l->engine->entry][args->kind];

    if (entry->phase != MOK_PHASE_WHOLE || entry->traced || l->engine->config.chaos_delay_us) /* its kernels, or delays, are its own */
        return NULL;
    if (!same(g, args)) {
        let_go(l->engine, g);
        g->args = *args;
        g->args.peer = NULL;
        g->peer = *args->peer;
        return NULL;
    }
    if (!g->graph && !g->refused && __atomic_load_n(&l->engine->graphs, __ATOMIC_RELAXED) < MOK_CUDA_GRAPHS)
        make(g, entry, args);
    return g->graph;
}

void mok_cuda_graph_ready(struct mok_cuda_run_entry *entry, const struct mok_op_args *args)
{
    entry->graph = find(entry, args);
}

int mok_cuda_graph_queue(struct mok_cuda_run_entry *entry, const struct mok_op_args *args)
{
    cudaStream_t stream = entry->layer->engine->stream;

    if (entry->graph)
        return cudaGraphLaunch(entry->graph, stream) == cudaSuccess ? 0 : -MOK_EDEVICE;
    return queue_kernels(entry, args, stream);
}

void mok_cuda_graph_free(struct mok_engine_layer *layer)
{
    for (unsigned i = 0; i < MOK_CUDA_ENTRIES; i++)
        for (unsigned kind = 0; kind <= MOK_KIND_BACKWARD; kind++)
            let_go(layer->engine, &layer->graph[i][kind]);
}
