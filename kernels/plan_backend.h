/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What plan.c asks of the engine of a device kind: its granules, and the bytes of the memory whose inner map is its own.
 * Pure functions of the plan made so far; they allocate nothing.
 */
#ifndef MOK_KERNELS_PLAN_BACKEND_H
#define MOK_KERNELS_PLAN_BACKEND_H

#include "layer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct mok_plan_choice {
    uint64_t value;
    const char *reason;
};

struct mok_plan_backend {
    /* an expert's rows begin at multiples of it, and so do macrobatches and minibatches */
    struct mok_plan_choice (*tile_rows)(const struct mok_plan *plan);
    /* comm units where the spec does not say; `units` of the device are at hand */
    struct mok_plan_choice (*comm_units)(const struct mok_plan *plan);
    /* largest legal number of comm units, and the units left to compute with `comm` of them */
    uint32_t (*max_comm_units)(const struct mok_plan *plan);
    uint32_t (*compute_units)(const struct mok_plan *plan, uint32_t comm);
    /* ring where the spec does not say */
    struct mok_plan_choice (*ring_bytes)(const struct mok_plan *plan);
    /* bytes that one row of the ring takes, all its parts together */
    uint64_t (*ring_row_bytes)(const struct mok_plan *plan);
    /* rows of a minibatch where the spec does not say, before rounding to tiles and the ring */
    struct mok_plan_choice (*minibatch_rows)(const struct mok_plan *plan);
    /* bytes of the ring as a full context keeps it; needs ring_rows */
    uint64_t (*context_ring_bytes)(const struct mok_plan *plan);
    /* bytes of the private workspace; needs everything else */
    uint64_t (*private_bytes)(const struct mok_plan *plan);
    /* bytes of the engine's own part of the symmetric workspace; NULL: none */
    uint64_t (*symmetric_bytes)(const struct mok_plan *plan);
};

extern const struct mok_plan_backend mok_host_plan_backend;
#if defined(MOK_HAVE_CUDA)
extern const struct mok_plan_backend mok_cuda_plan_backend;
#endif

#ifdef __cplusplus
}
#endif
#endif
