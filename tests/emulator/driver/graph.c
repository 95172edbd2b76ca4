/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Graphs of the emulated GPU: kernels that were launched on a stream while it was captured, one behind the other, and
 * are launched again. Nothing but kernels can be captured.
 */
#include <stdlib.h>

#include "stream.h"

struct node {
    struct node *next;
    struct emulated_node kernel;
};

struct CUgraph_st {
    struct node *first, **end;
};

struct CUgraphExec_st {
    struct CUgraph_st *graph;
};

/* Of this thread, which captures one stream at a time. */
static _Thread_local struct CUgraph_st *captured;
static _Thread_local cudaStream_t captured_stream;

static void graph_free(struct CUgraph_st *graph)
{
    while (graph && graph->first) {
        struct node *node = graph->first;
        graph->first = node->next;
        node->kernel.drop(node->kernel.cookie);
        free(node);
    }
    free(graph);
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    if (captured || !stream || mode != cudaStreamCaptureModeThreadLocal)
        return cudaErrorInvalidValue;
    captured = calloc(1, sizeof(*captured));
    if (!captured)
        return cudaErrorMemoryAllocation;
    captured->end = &captured->first;
    captured_stream = stream;
    return cudaSuccess;
}

EXPORT bool emulated_stream_captures(cudaStream_t stream)
{
    return captured && captured_stream == stream;
}

EXPORT cudaError_t emulated_capture(const struct emulated_node *kernel)
{
    struct node *node = calloc(1, sizeof(*node));

    if (!node)
        return cudaErrorMemoryAllocation;
    node->kernel = *kernel;
    *captured->end = node;
    captured->end = &node->next;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret)
{
    if (!emulated_stream_captures(stream))
        return cudaErrorInvalidValue;
    *ret = captured;
    captured = NULL;
    return cudaSuccess;
}

/* Takes the kernels over, so that a graph is instantiated once. */
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t graph, unsigned long long flags)
{
    struct CUgraphExec_st *exec = calloc(1, sizeof(*exec));
    struct CUgraph_st *own = calloc(1, sizeof(*own));

    if (!exec || !own || flags) {
        free(exec);
        free(own);
        return flags ? cudaErrorInvalidValue : cudaErrorMemoryAllocation;
    }
    *own = *graph;
    *graph = (struct CUgraph_st){ .end = &graph->first };
    exec->graph = own;
    *ret = exec;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    graph_free(graph);
    return cudaSuccess;
}

/* What has been launched holds its kernels by itself. */
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    graph_free(exec->graph);
    free(exec);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    cudaError_t e = cudaSuccess;

    for (const struct node *node = exec->graph->first; node && e == cudaSuccess; node = node->next)
        e = node->kernel.launch(node->kernel.cookie, stream);
    return e;
}
