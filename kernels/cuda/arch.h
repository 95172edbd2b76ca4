/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shapes that belong to one GPU architecture (Hopper, sm_90a). Another architecture brings its own numbers, its own
 * matrix wrapper (wgmma.cuh here) and, where it has one, its own task hand-out; the pipeline around them stays.
 */
#ifndef MOK_CUDA_ARCH_H
#define MOK_CUDA_ARCH_H

#define MOK_TILE_M 128u /* rows of one block's tile */
#define MOK_TILE_N 256u /* columns: 128 gate beside the same 128 up, or 256 of down */
#define MOK_TILE_K 64u  /* one 128-byte swizzle span */
#define MOK_STAGES 4u
#define MOK_CLUSTER 2u /* blocks that share a weight tile by multicast */
#define MOK_UNIT_ROWS (MOK_TILE_M * MOK_CLUSTER)

#define MOK_CONSUMER_GROUPS 2u /* warpgroups; each multiplies 64 rows of the tile */
#define MOK_CONSUMER_WARPS (4u * MOK_CONSUMER_GROUPS)
#define MOK_GATHER_WARPS 2u
#define MOK_THREADS (128u * (MOK_CONSUMER_GROUPS + 1u))
#define MOK_CONSUMER_REGISTERS 208
#define MOK_PRODUCER_REGISTERS 88

/* of an MXFP8 kernel: 128 sums, and 64 that wait for their scales */
#define MOK_MX_CONSUMER_REGISTERS 240
#define MOK_MX_PRODUCER_REGISTERS 24
#define MOK_MX_BACKWARD_CONSUMER_REGISTERS 232
#define MOK_MX_BACKWARD_PRODUCER_REGISTERS 40
#define MOK_MX_TILE_K 128u /* E4M3 values of a 128-byte swizzle span */
#define MOK_MX_PULLS 4u /* tasks that bring a unit's rows of x, so that few clusters are not all that do */

#define MOK_A_BYTES (MOK_TILE_M * MOK_TILE_K * 2u)
#define MOK_B_BYTES (MOK_TILE_N * MOK_TILE_K * 2u)
#define MOK_STAGE_ROW_BYTES 272u /* 128 columns and 16 bytes, so that eight rows fall on different banks */
#define MOK_WARP_STAGE_BYTES (16u * MOK_STAGE_ROW_BYTES)

#define MOK_K_BLOCK_NS 800u /* a cluster's 256 x 256 x 64 takes about so long */

#define MOK_SCHEDULE_CLUSTER 8u /* blocks that make the schedule */
#ifndef MOK_SCHEDULE_STEPS
#define MOK_SCHEDULE_STEPS 8u /* of 32 slots a warp that are looked up at once */
#endif

/* Segments start at multiples of this many rows. */
#define MOK_SEGMENT_ALIGN 64u

#endif
