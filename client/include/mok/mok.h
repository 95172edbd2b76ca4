/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file mok.h
 * libmok: MoE layers as a service of the node.
 *
 * What it needs of the words and bounds that all parts share is in mok/types.h; BF16 from and to float: mok/bf16.h.
 *
 * A process opens a session with mokd, joins a group (the ranks of one job that share experts), allocates buffers
 * that mokd owns, creates layers, and submits forward and backward passes that the device's worker executes.
 *
 *     mok_session_open -> mok_group_join -> mok_buffer_alloc ... -> mok_layer_create -> mok_layer_bind
 *         -> { mok_layer_forward, mok_layer_backward, mok_wait } ... -> mok_session_close
 *
 * Return values: 0 (or a count) on success, -MOK_E* (mok/types.h) on failure; mok_strerror() names the code and
 * mok_last_error() gives the sentence with argument, value and bound. Output parameters called ret_ are written
 * only on success, unless a function says otherwise.
 *
 * Threads: every function may be called from any thread. Calls on one session exclude each other for short
 * moments only: mok_wait and the collective calls release the session while they sleep. Objects of a session must
 * not be used during or after mok_session_close. mok_last_error() is a thread's own.
 *
 * fork: a child must not use its parent's sessions; every call then returns -MOK_EFORK and changes nothing. Buffers
 * are not mapped in a child, and its parent's session ends with its parent. It may open a session of its own.
 *
 * Letters: T tokens of this rank, H hidden, I intermediate, E experts, K top-k, E_l = E / group size.
 * Rank r holds experts r*E_l .. (r+1)*E_l-1, in this order, in its weights.
 * Tensors are dense, row-major. BF16 is the upper half of an IEEE 754 binary32.
 */
#ifndef MOK_MOK_H
#define MOK_MOK_H

#include <stddef.h>
#include <stdint.h>

#include "mok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOK_VERSION_MAJOR 0
#define MOK_VERSION_MINOR 1
#define MOK_VERSION_PATCH 0

typedef struct mok_session mok_session;
typedef struct mok_group mok_group;
typedef struct mok_buffer mok_buffer;
typedef struct mok_layer mok_layer;

/** Names one submitted operation of a session; never 0, never used twice. */
typedef uint64_t mok_ticket;

/** "major.minor.patch" of the library that is loaded. */
const char *mok_version(void);
/** Short text of a code (either sign); never NULL. */
const char *mok_strerror(int code);
/** "MOK_ERANGE" for a code (either sign), "0" for 0, "MOK_E?" for an unknown one; never NULL. */
const char *mok_error_name(int code);
/** Sentence of this thread's last failed call, one line of plain text; "" if none failed. Valid until its next call. */
const char *mok_last_error(void);

/* ------------------------------------------------------------------ names */

/**
 * What people write for the values of an enumeration: "bf16", "mxfp8-per32", "mxfp8-per128" for enum mok_precision,
 * "bf16", "mxfp8" for enum mok_wgrad, "bf16", "f32" for enum mok_dtype, "host", "cuda" for enum mok_device_kind.
 * A name is never NULL; "?" for a value that has none, 0 among them. From a name: exactly this one.
 * Errors: MOK_EARG a NULL, or a name that is none; the sentence lists those that are.
 */
const char *mok_precision_name(uint32_t precision);
int mok_precision_from_name(const char *name, uint32_t *ret_precision);
const char *mok_wgrad_name(uint32_t wgrad);
int mok_wgrad_from_name(const char *name, uint32_t *ret_wgrad);
const char *mok_dtype_name(uint32_t dtype);
int mok_dtype_from_name(const char *name, uint32_t *ret_dtype);
const char *mok_device_kind_name(uint32_t kind);
int mok_device_kind_from_name(const char *name, uint32_t *ret_kind);

/* ------------------------------------------------------------------ session */

typedef struct mok_session_options {
    size_t size;             /**< sizeof(mok_session_options) */
    const char *socket_path; /**< NULL: $MOK_SOCKET, else /run/mok/mokd.sock */
    const char *job;         /**< name for people, [A-Za-z0-9._-]{1,63}; NULL: the program's name */
    uint32_t queue_entries;  /**< operations a device may have in flight, power of two in 4..4096; 0: 64 */
    uint64_t timeout_ms;     /**< for the connection and each plain answer; 0: 30,000 */
    uint32_t weight;         /**< share of devices among the user's own sessions, 1..1000; 0: 1. Over a rack, by job */
    uint64_t resume_ms;      /**< how long to look for a mokd that went away, see mok_session_recover; 0: 30,000 */
} mok_session_options;

/**
 * Connects to mokd and opens a session. `options` NULL: all defaults.
 * Errors: MOK_EDAEMON nobody listens; MOK_EVERSION; MOK_EQUOTA sessions of the user; MOK_ENAME job; MOK_ERANGE
 * queue_entries, weight, socket_path; MOK_EACCESS the socket is not ours to open; MOK_ETIMEDOUT mokd does not answer;
 * MOK_EFDS.
 *
 * Any call that asks mokd something can also fail with MOK_EDAEMON (mokd is gone, see mok_session_recover),
 * MOK_ESESSION (mokd ended this session; the sentence says why), MOK_ETIMEDOUT, MOK_EPROTO, MOK_ENOMEM, MOK_EARG (a
 * NULL).
 */
int mok_session_open(const mok_session_options *options, mok_session **ret_session);
/**
 * After mokd went away (MOK_EDAEMON), makes the session's groups usable again; collective over the ranks of each of
 * them. Returns 0 once they are, at once if nothing was lost.
 *
 * Where mokd runs under a service manager that keeps its descriptors, a session outlives a crash, a restart and an
 * upgrade of mokd. The library finds the next one by itself. Groups, buffers, layers and their bindings stay as they
 * are, with their handles and addresses; buffers keep what is in them. What was in flight is over: operations complete
 * with MOK_EDAEMON, and so do calls that waited for an answer; whether mokd still did what such a call asked is not
 * known, what it made and this process does not know of is freed, and a layer whose mok_layer_bind failed so has to be
 * bound again. Other calls, and mok_nop, wait until mokd is back. Operations of layers are refused with MOK_EDAEMON on
 * every rank, also one that has seen no failure, until it has recovered. So ranks can agree on what is to be done
 * again; the first operation after it is the first of its layer's sequence on all of them.
 *
 * What an operation that completed with MOK_EDAEMON may have written is undefined: out, context, d_x, d_topk_weight,
 * and the weight gradients that it accumulates into. It never writes what it reads: x, ids, topk_weight, d_out,
 * parameters. All of it is this process's again only when this call has returned, since until then the old worker may
 * still be writing. An operation that completed with 0 has written everything. So a step can be done again whose first
 * backward says MOK_BACKWARD_OVERWRITE_WGRAD.
 *
 * `timeout_ms` until mokd is back and all ranks have called; 0: for ever. May be called again after MOK_ETIMEDOUT.
 * Errors: MOK_EDAEMON the session is over: mokd keeps nothing, was not found within resume_ms, or does not know the
 * session any more (it waits for a while after its start); MOK_ETIMEDOUT names a group and the missing ranks;
 * MOK_EPEER, and any other code with a group's name: that group did not come back, because a rank did not, or spans
 * several nodes; it can only be left, the others are usable.
 */
int mok_session_recover(mok_session *session, uint64_t timeout_ms);
/** Closes the session; mokd frees all it owned. Operations in flight are dropped. NULL is fine. */
void mok_session_close(mok_session *session);

typedef struct mok_device_info {
    uint32_t index;
    uint32_t kind;         /**< enum mok_device_kind */
    char name[MOK_MAX_NAME + 1];
    uint32_t units;        /**< host: threads; CUDA: SMs */
    uint32_t up;           /**< 1: usable now */
    uint64_t memory_bytes; /**< what mokd may hand out on it */
    uint64_t memory_used;
} mok_device_info;

/** Fills up to `capacity` entries; returns the number of devices of the node (may exceed capacity). */
int mok_device_list(mok_session *session, mok_device_info *ret_devices, size_t capacity);

typedef struct mok_limits {
    uint64_t bytes, bytes_used;       /**< of the user, over all sessions and devices */
    uint32_t sessions, sessions_used; /**< of the user */
    uint32_t groups, groups_used;     /**< of the user: ranks of groups */
    uint32_t queue_entries;
    uint32_t layers;                  /**< of the user */
    uint32_t buffers;                 /**< of the user */
} mok_limits;

/** What the user may have, and has. */
int mok_limits_query(mok_session *session, mok_limits *ret_limits);

/* ------------------------------------------------------------------ group */

typedef struct mok_group_options {
    size_t size;         /**< sizeof(mok_group_options) */
    const char *name;    /**< [A-Za-z0-9._-]{1,63}; the user's own name space */
    uint32_t ranks;      /**< group size = EP degree, 1..MOK_MAX_EP */
    uint32_t rank;       /**< of this process, 0..ranks-1 */
    uint32_t device;     /**< index of the device; each rank has another one */
    uint64_t timeout_ms; /**< until all have joined; 0: wait for ever */
    uint32_t flags;      /**< MOK_GROUP_*, the same on all ranks */
} mok_group_options;

/** Nobody else on the devices of the group's ranks, until each has left. mokd's configuration says who may ask. */
#define MOK_GROUP_EXCLUSIVE (1u << 0)

/**
 * Joins; collective, in any order of arrival. Sleeps until all ranks have joined.
 * Errors: MOK_ENAME; MOK_ERANGE ranks, device; MOK_ERANK rank outside 0..ranks-1 or taken; MOK_EMISMATCH ranks differ
 * on the size; MOK_EBUSY the device has a rank of this group already; MOK_EEXIST this session is a rank of it already;
 * MOK_ETIMEDOUT (the sentence names the missing ranks, nodes that this one does not reach, with the reason, and a node
 * whose inventory is another one);
 * MOK_EQUOTA; MOK_ENODEV; MOK_EDEVICE; MOK_EACCESS not a device for this user, or not for him alone; MOK_EDRAIN;
 * MOK_EEXCLUSIVE another group has the device alone, or others use what this one wants alone.
 * Groups of one name: names are a user's own. A join that returns 0 is in one group, which all its ranks have joined,
 * each once, or which ends for all of them (MOK_EPEER); two groups of a name never mix. At one mokd there is one at a
 * time; the name of one that has failed is free. Between nodes a rank of a group that stands is taken at every node; at
 * one that has no rank of it, that is said half a second later. While all nodes see each other, none comes or goes, and
 * their inventories are the same, one group over several nodes has the name, and of two ranks of one number the second
 * is refused. But a node at which all ranks of a group come together, within that half second, forms it without the
 * word of others: ranks that race at several nodes may make a group at each, beside one over nodes. And nodes that do
 * not see each other, or differ on who is there, may make one each, or a rank waits for others in vain: set timeout_ms.
 * A job that may be started twice wants another name each time. (ABI.md, section 15, says how names are kept.)
 */
int mok_group_join(mok_session *session, const mok_group_options *options, mok_group **ret_group);
/**
 * Leaves; frees the layers and symmetric buffers of this rank. Other ranks' operations that need this rank end with
 * MOK_EPEER. NULL is fine. The group, its layers and its symmetric buffers are gone afterwards, also when mokd
 * answered with an error; operations in flight keep their tickets.
 */
int mok_group_leave(mok_group *group);

/* ------------------------------------------------------------------ buffers */

/**
 * Allocates `bytes` (> 0) of symmetric memory; collective: every rank asks for the same size in the same order.
 * Zeroed. `timeout_ms` until all ranks have asked; 0: waits for ever.
 * Errors: MOK_EMISMATCH (sizes differ; all ranks get it), MOK_EQUOTA, MOK_ENOMEM, MOK_ETIMEDOUT, MOK_EPEER, MOK_EFDS
 * this process can take no more descriptors. On a CUDA device also MOK_ENOTSUP libcuda.so.1 is not here or too old;
 * MOK_ENODEV the process does not see the GPU; MOK_ESHARING CUDA runs in this process without the MPS that mokd's
 * workers run under (the sentence has the remedy); MOK_EDEVICE.
 */
int mok_buffer_alloc_symmetric(mok_group *group, uint64_t bytes, uint64_t timeout_ms, mok_buffer **ret_buffer);
/** Allocates `bytes` (> 0) that only this rank's device reads and writes. Zeroed. Not collective. */
int mok_buffer_alloc_private(mok_session *session, uint32_t device, uint64_t bytes, mok_buffer **ret_buffer);
/** Frees; -MOK_EBUSY while an operation or a layer's binding uses it; gone after any other error. NULL is fine. */
int mok_buffer_free(mok_buffer *buffer);
/**
 * Address here, NULL in a forked child. Host devices: ordinary memory. CUDA devices: device memory in the GPU's primary
 * context, which the CUDA runtime uses too. 2 MiB-aligned is not promised, 4 KiB is.
 */
void *mok_buffer_data(const mok_buffer *buffer);
/** Bytes as they were asked for. */
uint64_t mok_buffer_size(const mok_buffer *buffer);

/** A region of a buffer, see MOK_VIEW. {NULL, 0, 0} means absent. `bytes` 0 with a buffer: up to the buffer's end. */
typedef struct mok_view {
    mok_buffer *buffer;
    uint64_t offset; /**< bytes; multiple of 16 */
    uint64_t bytes;
} mok_view;

/** A whole buffer, and a part of one, as expressions of type mok_view. */
#ifdef __cplusplus
#define MOK_VIEW_AT(buffer, offset, bytes) \
    (mok_view{ (buffer), static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes) })
#else
#define MOK_VIEW_AT(buffer, offset, bytes) ((mok_view){ (buffer), (uint64_t)(offset), (uint64_t)(bytes) })
#endif
#define MOK_VIEW(buffer) MOK_VIEW_AT(buffer, 0, 0)

/* ------------------------------------------------------------------ MXFP8 tensors */

#define MOK_QUANTIZE_TRANSPOSE (1u << 0) /**< quantise and store the transpose of each matrix */
#define MOK_QUANTIZE_TILES (1u << 1)     /**< MOK_MXFP8_PER128: tiles of 128 x 128 values share a scale, for weights */

typedef struct mok_mxfp8_options {
    size_t size;        /**< sizeof(mok_mxfp8_options) */
    uint64_t matrices;  /**< M matrices of R x C values, one after the other (experts); 0: 1 */
    uint64_t rows;      /**< R, > 0 */
    uint64_t columns;   /**< C, > 0; scales lie along the columns of a row */
    uint32_t dtype;     /**< of the values, enum mok_dtype */
    uint32_t precision; /**< MOK_MXFP8_PER32 or MOK_MXFP8_PER128: the scale rule, enum mok_precision */
    uint32_t flags;     /**< MOK_QUANTIZE_* */
} mok_mxfp8_options;

/**
 * Quantises tensors to MXFP8 (OCP Microscaling) on the calling thread; for weights. Layers quantise activations.
 *
 *     values      [M][R][C] of `dtype`
 *     ret_data    E4M3, M * R * C bytes: [M][R][C]
 *     ret_scales  E8M0, mok_mxfp8_scale_bytes(M * R, C) bytes: [M][R][ceil(C / 32)]
 *
 * and with MOK_QUANTIZE_TRANSPOSE ret_data [M][C][R], ret_scales mok_mxfp8_scale_bytes(M * C, R) bytes:
 * [M][C][ceil(R / 32)]. An element is worth data * 2^(scale - 127). The scale of a group is the smallest power of two
 * with which its largest finite magnitude is at most 448; the group is a block of 32 values of a stored row (PER32), an
 * aligned 128 of it (PER128, its four scales are equal), or 128 such rows by 128 (MOK_QUANTIZE_TILES; tiles begin anew
 * in each matrix). The last group of a row or matrix may be smaller. Data: to nearest even, saturated at +-448; NaN and
 * infinities become NaN. ABI.md, "MX tensors", has the whole rule. A layer takes weights of its own precision; one of
 * MOK_MXFP8_PER32 takes those of MOK_MXFP8_PER128 too.
 *
 * A layer's weights: gate and up are M = E_l, R = I, C = H; down is M = E_l, R = H, C = I. They may be quantised
 * straight into the buffers that mok_layer_bind names. Needs no session.
 * Errors, all before anything is written: MOK_EARG a NULL, or an output that overlaps anything else; MOK_ERANGE rows,
 * columns, matrices (0, or more than 2^62 bytes), flags; MOK_EDTYPE dtype, precision (MOK_BF16), MOK_QUANTIZE_TILES
 * with MOK_MXFP8_PER32; MOK_EALIGN values (not a multiple of its type's size).
 */
int mok_mxfp8_quantize(const mok_mxfp8_options *options, const void *values, uint8_t *ret_data, uint8_t *ret_scales);
/** A CUstream or cudaStream_t; this header needs none of CUDA's. */
typedef struct CUstream_st *mok_stream;
/**
 * The same bits from a GPU, in the order of a CUDA stream, of each matrix and of its transpose with one read of the
 * values:
 *
 *     ret_data, ret_scales                        as without MOK_QUANTIZE_TRANSPOSE; or both NULL
 *     ret_transposed, ret_transposed_scales       as with it; or both NULL
 *
 * All memory is such as a kernel on the stream's GPU reaches, the buffers of a CUDA device among it. Returns when the
 * work is queued; a stream that is being captured records it. Fastest where C * the size of a value, R if the transpose
 * is asked for, and all addresses are multiples of 16; any others are fine. stream NULL: the default one of the current
 * context. Compute capability 9.0 or more.
 * Errors: as mok_mxfp8_quantize, MOK_ERANGE for MOK_QUANTIZE_TRANSPOSE too, MOK_EARG where one output of a pair is
 * missing or no pair is given; MOK_ENOTSUP this library was built without nvcc, libcuda.so.1 is not here or too old, or
 * the GPU is; MOK_ESTATE stream is NULL and no context is current; MOK_EDEVICE.
 */
int mok_mxfp8_quantize_on_stream(const mok_mxfp8_options *options, const void *values, uint8_t *ret_data,
                                 uint8_t *ret_scales, uint8_t *ret_transposed, uint8_t *ret_transposed_scales,
                                 mok_stream stream);
/** Bytes of the scales of `rows` rows of `columns` values: rows * ceil(columns / 32); 0 if that is more than 2^62. */
uint64_t mok_mxfp8_scale_bytes(uint64_t rows, uint64_t columns);
/**
 * The values of an MXFP8 tensor: ret_values F32 [rows][columns] from data E4M3 [rows][columns] and scales E8M0
 * [rows][ceil(columns / 32)]. Exact, but for values that F32 has not: beyond its range they are infinite, below it
 * rounded. NaN data, and all data of a block whose scale is 255, are NaN. M matrices are M * R rows.
 * Errors: MOK_EARG, MOK_ERANGE, MOK_EALIGN as above.
 */
int mok_mxfp8_dequantize(uint64_t rows, uint64_t columns, const uint8_t *data, const uint8_t *scales,
                         float *ret_values);

/* ------------------------------------------------------------------ layers */

typedef struct mok_layer_options {
    size_t size;                  /**< sizeof(mok_layer_options) */
    uint32_t hidden;              /**< H, multiple of 16 */
    uint32_t intermediate;        /**< I, multiple of 16 */
    uint32_t experts;             /**< E of the whole group, multiple of the group size */
    uint32_t topk;                /**< K, 1..64; may exceed E */
    uint32_t max_tokens;          /**< no rank submits more tokens than this; the same on all ranks */
    uint32_t precision;           /**< enum mok_precision */
    uint32_t shared_intermediate; /**< width of the shared expert, multiple of 16; 0: none */
    float clamp;                  /**< L > 0: gate <- min(gate, L), up <- min(max(up, -L), L); 0: none */
    uint64_t ring_bytes;          /**< token ring, at least a tile of rows, else MOK_ERANGE; 0: the plan's choice */
    uint32_t minibatch_rows;      /**< rounded up to whole tiles, at most the ring; 0: the plan's choice */
    uint32_t comm_units;          /**< 0: the plan's choice */
    uint32_t gradient_dtype;      /**< of all weight gradients, enum mok_dtype; 0: MOK_DTYPE_F32 */
    uint32_t wgrad_precision;     /**< operands of the experts' weight gradients, enum mok_wgrad; 0: MOK_WGRAD_MXFP8
                                     of MOK_MXFP8_PER128 where mokd knows it, else MOK_WGRAD_BF16 */
    uint32_t transposed_weights;  /**< MOK_MXFP8_PER128, weights by MOK_QUANTIZE_TILES: 1: bound transposed, too;
                                     0: they are not; else MOK_EDTYPE */
} mok_layer_options;

/** Exact bytes. */
typedef struct mok_layer_memory {
    uint64_t symmetric_bytes;         /**< workspace peers map, charged to this rank */
    uint64_t private_bytes;           /**< workspace of this rank */
    uint64_t context_full_bytes;      /**< a saved context, MOK_CONTEXT_FULL */
    uint64_t context_recompute_bytes; /**< a saved context, MOK_CONTEXT_RECOMPUTE */
} mok_layer_memory;

/** What mok_layer_create with these options takes; allocates nothing. Errors as mok_layer_create. */
int mok_layer_memory_query(mok_group *group, const mok_layer_options *options, mok_layer_memory *ret_memory);
/**
 * Creates a layer; collective, same options and same order on all ranks. `timeout_ms` until all ranks have asked; 0:
 * waits for ever. mok_layer_describe tells the tiles, ring and minibatch that the plan came to.
 *
 * Weight gradients are sums in FP32 whatever their type. MOK_DTYPE_BF16: a backward reads the stored value, adds all of
 * the pass to it in FP32 and rounds once, so the result does not depend on ring or minibatch; the workspace keeps the
 * sums of an expert whose rows come in several pieces, private_bytes says how much that takes. Over many backwards that
 * add up FP32 is the better choice: each rounds once more.
 *
 * Weight gradients of an MXFP8 layer's experts are products of E4M3, of rows quantised along the token axis
 * (MOK_WGRAD_MXFP8; ABI.md, MX tensors), or of the BF16 values that the quantised rows are worth (MOK_WGRAD_BF16). The
 * default is what a GPU does faster: the first with MOK_MXFP8_PER128, whose loss stays as near to BF16's, and the
 * second with MOK_MXFP8_PER32. MOK_WGRAD_MXFP8 is MOK_EDTYPE of a BF16 layer. A shared expert's are BF16.
 *
 * A GPU's MXFP8 backward multiplies transposed weights, and turns them anew in each operation, since nobody says when
 * they have changed. With transposed_weights 1 the program binds them beside the others and keeps both alike: no
 * operation turns any, and private_bytes has no room for them. See mok_layer_params for what they must be.
 * Errors: MOK_ERANGE, MOK_EALIGN, MOK_EDTYPE name the option; MOK_ENOTSUP gradient_dtype, wgrad_precision
 * or transposed_weights with an older mokd, or an option that the device's engine does not have; MOK_EMISMATCH names
 * the ranks and the option that differ, on all ranks; MOK_EQUOTA; MOK_ENOMEM; MOK_ETIMEDOUT; MOK_EPEER.
 */
int mok_layer_create(mok_group *group, const mok_layer_options *options, uint64_t timeout_ms, mok_layer **ret_layer);
/**
 * Destroys; -MOK_EBUSY while operations are in flight; after any other error it is gone. NULL is fine. Every rank does
 * it for itself: an operation of another rank that still needs this one, or is submitted to the layer afterwards, ends
 * with MOK_EPEER naming this rank. The group and its other layers go on.
 */
int mok_layer_destroy(mok_layer *layer);
/** Copies the plan, "what = value (reason)" lines, and returns the length without the terminator, as snprintf. */
int mok_layer_describe(mok_layer *layer, char *ret_text, size_t capacity);

/**
 * Parameters and weight gradients; absent ones stay unbound (a forward needs no gradients). Gradients are F32, with
 * gradient_dtype MOK_DTYPE_BF16 all six of them BF16.
 *
 * Transposed weights are the same bytes as gate, up and down, each expert's matrix transposed: what
 * mok_mxfp8_quantize_on_stream with MOK_QUANTIZE_TILES gives as ret_transposed; their scales are not wanted, since a
 * tile of 128 x 128 has one that holds both ways. Weights of other scales have none: a GPU then gives NaN in d_x of
 * every token that uses the expert. With transposed weights in tiles every result has the bits that it has without.
 * Whoever changes a weight changes its transpose before the next backward. A forward and host devices do not read them,
 * but every backward wants them bound. For each of gate, up and down, on the GPU:
 *
 *     mok_mxfp8_options o = { .size = sizeof(o), .matrices = E_l, .rows = I, .columns = H, .dtype = MOK_DTYPE_BF16,
 *                             .precision = MOK_MXFP8_PER128, .flags = MOK_QUANTIZE_TILES };
 *     mok_mxfp8_quantize_on_stream(&o, gate_bf16, gate, gate_scale, gate_transposed, scratch, stream);
 *
 * scratch takes mok_mxfp8_scale_bytes(E_l * H, I) bytes, which nobody reads. Without a GPU: mok_mxfp8_quantize twice,
 * the second time with MOK_QUANTIZE_TILES | MOK_QUANTIZE_TRANSPOSE.
 */
typedef struct mok_layer_params {
    size_t size;    /**< sizeof(mok_layer_params) */
    mok_view gate;  /**< BF16 [E_l][I][H], MXFP8: E4M3 */
    mok_view up;    /**< BF16 [E_l][I][H], MXFP8: E4M3 */
    mok_view down;  /**< BF16 [E_l][H][I], MXFP8: E4M3 */
    mok_view d_gate; /**< [E_l][I][H], accumulated into */
    mok_view d_up;   /**< [E_l][I][H] */
    mok_view d_down; /**< [E_l][H][I] */
    mok_view shared_gate, shared_up; /**< BF16 [Is][H] */
    mok_view shared_down;            /**< BF16 [H][Is] */
    mok_view d_shared_gate, d_shared_up, d_shared_down; /**< this rank's tokens only */
    mok_view gate_scale, up_scale, down_scale;          /**< MXFP8: E8M0 */
    mok_view gate_transposed, up_transposed;            /**< with transposed_weights: E4M3 [E_l][H][I] */
    mok_view down_transposed;                           /**< with transposed_weights: E4M3 [E_l][I][H] */
} mok_layer_params;

/**
 * Binds parameters; replaces the earlier binding whole. -MOK_EBUSY while operations of the layer are in flight.
 * All buffers, private ones too, must be on this rank's device. Forward needs all weights bound. Backward needs all
 * weight gradients too, those of the shared expert included, and transposed weights where the layer has them: else
 * MOK_ESTATE (frozen weights are not supported yet).
 * Errors: MOK_ESIZE, MOK_EALIGN, MOK_ERANGE, MOK_EBUFFER, MOK_EDTYPE (a scale with MOK_BF16), MOK_EARG (a gradient that
 * overlaps another parameter, a shared one without a shared expert, a transposed one without transposed_weights) name
 * the parameter. The earlier binding stays then.
 */
int mok_layer_bind(mok_layer *layer, const mok_layer_params *params);

/* ------------------------------------------------------------------ operations */

#define MOK_FORWARD_ACCUMULATE_OUT (1u << 0)    /**< out += instead of out = */
#define MOK_BACKWARD_OVERWRITE_WGRAD (1u << 1)  /**< weight gradients = instead of += */

/**
 * out[t] = shared(x[t]) + sum over k ascending of topk_weight[t,k] * expert_{ids[t,k]}(x[t])
 * expert(v) = down (silu(gate v) * (up v)); ids -1: no expert. An expert that a token names several times counts once a
 * slot, each with that slot's weight.
 */
typedef struct mok_forward_args {
    size_t size;          /**< sizeof(mok_forward_args) */
    uint32_t tokens;      /**< T, 0..max_tokens; may differ between ranks */
    uint32_t context_mode; /**< enum mok_context_mode, the same on all ranks */
    uint32_t flags;       /**< MOK_FORWARD_*, the same on all ranks */
    uint64_t timeout_ns;  /**< counted from the moment all ranks joined; 0: none */
    mok_view x;           /**< BF16 [T][H], symmetric */
    mok_view ids;         /**< I32 [T][K], -1..E-1 */
    mok_view topk_weight; /**< F32 [T][K] */
    mok_view out;         /**< BF16 [T][H]; must not overlap an input */
    mok_view context;     /**< written; absent with MOK_CONTEXT_NONE */
} mok_forward_args;

/** Gradients of sum(out * d_out). The shared expert's part of d_x is included. */
typedef struct mok_backward_args {
    size_t size;           /**< sizeof(mok_backward_args) */
    uint32_t tokens;       /**< as in the forward that wrote the context */
    uint32_t context_mode; /**< as in that forward: MOK_CONTEXT_FULL or MOK_CONTEXT_RECOMPUTE */
    uint32_t flags;        /**< MOK_BACKWARD_*, the same on all ranks */
    uint64_t timeout_ns;   /**< as in forward */
    mok_view x;            /**< BF16 [T][H], symmetric, unchanged since forward */
    mok_view context;      /**< as forward left it; can be used again */
    mok_view d_out;        /**< BF16 [T][H], symmetric */
    mok_view d_x;          /**< BF16 [T][H], written */
    mok_view d_topk_weight; /**< F32 [T][K], written; exactly 0 at ids -1 */
} mok_backward_args;

/**
 * Submits; never blocks. All ranks of the group submit the same sequence of operations on a layer; layers are
 * independent of each other. The views' memory belongs to the operation until it has completed; once this rank's has
 * completed well, no other rank reads this rank's x or d_out any more. All views are of buffers on this rank's device.
 *
 * A submission that is refused at once is not one of the layer's sequence: correct it and submit it again (MOK_EAGAIN:
 * once results were taken), since the other ranks' operation waits for it and would pair with whatever comes next. A
 * rank that cannot go on leaves the group; the others then get MOK_EPEER.
 *
 * Errors found at once: MOK_EARG, MOK_ESIZE, MOK_EALIGN, MOK_ERANGE, MOK_EBUFFER, MOK_ESTATE (not bound), MOK_EBUSY
 * (being bound), MOK_EAGAIN (queue_entries operations are in flight or have results that nobody asked for yet: reap),
 * and what ended the group or the session. With 0 tokens only the context is needed.
 * Errors that complete the operation: the same, and MOK_EEXPERT (rank, token and slot of the first bad id; nothing is
 * written, all ranks get it), MOK_EMISMATCH, MOK_EPEER, MOK_EWORKER, MOK_ETIMEDOUT, MOK_ECANCELED, MOK_EDAEMON.
 */
int mok_layer_forward(mok_layer *layer, const mok_forward_args *args, mok_ticket *ret_ticket);
int mok_layer_backward(mok_layer *layer, const mok_backward_args *args, mok_ticket *ret_ticket);
/**
 * As mok_layer_forward and mok_layer_backward, in the order of a CUDA stream: the operation begins once the stream has
 * come to this point, and what is queued on the stream later begins once the operation is over. No CPU of this process
 * waits for the GPU or is waited for. If the operation fails, or the worker, mokd or the session goes away, the stream
 * goes on and the ticket has the code; so look at the ticket before its results are relied on.
 * Streams of one process may share a queue of the hardware (there are CUDA_DEVICE_MAX_CONNECTIONS, 8 if that is not
 * set, under MPS two), and then hold each other up: ranks of one process whose streams wait for each other need one
 * each.
 * On all ranks each operation may come by a stream or not. With a host device the stream is one of the current context.
 * Errors found at once, beside those of mok_layer_forward: MOK_ESTATE the stream is being captured into a graph, or no
 * context is current; MOK_ENOTSUP, MOK_ENODEV, MOK_ESHARING, MOK_EDEVICE as mok_buffer_alloc_symmetric. May wait where
 * the stream can hold no more work.
 */
int mok_layer_forward_on_stream(mok_layer *layer, const mok_forward_args *args, mok_stream stream,
                                mok_ticket *ret_ticket);
int mok_layer_backward_on_stream(mok_layer *layer, const mok_backward_args *args, mok_stream stream,
                                 mok_ticket *ret_ticket);
/**
 * Submits an operation that does nothing, to the worker of `device`. The first use of a device, and the first after its
 * worker restarted, asks mokd for a queue and waits for that.
 */
int mok_nop(mok_session *session, uint32_t device, mok_ticket *ret_ticket);

/** What an operation came to. */
typedef struct mok_result {
    int code;             /**< 0 or -MOK_E* */
    uint32_t engine;      /**< enum mok_device_kind that really ran */
    uint32_t precision;   /**< enum mok_precision that really ran; 0 for a no-op */
    uint64_t rows;        /**< rows that this rank's experts processed */
    uint64_t dropped;     /**< always 0 */
    uint64_t device_ns;   /**< device time used */
} mok_result;

/**
 * mok_poll: 1 and *ret_result if the operation has completed, 0 if not yet.
 * mok_wait: sleeps until it has (0) or `timeout_ns` is over (-MOK_ETIMEDOUT: it is still in flight; the sentence
 * names the ranks that are missing, where that is known); timeout_ns < 0: no time-out.
 * A ticket's result can be had once; then, as for any unknown ticket: -MOK_ENOENT. ret_result may be NULL. The
 * operation's own failure is ret_result->code; with ret_result NULL it is returned. mok_last_error() has its sentence.
 */
int mok_poll(mok_session *session, mok_ticket ticket, mok_result *ret_result);
int mok_wait(mok_session *session, mok_ticket ticket, int64_t timeout_ns, mok_result *ret_result);
/**
 * Asks that the operation end early: it then completes with -MOK_ECANCELED on all ranks, as soon as the ranks that have
 * not joined it do. If the last of them joins at the same moment, it may run normally. Waits for the worker's answer.
 * -MOK_EBUSY: too late, all ranks have joined and it will complete by itself. -MOK_ENOENT: completed or unknown.
 */
int mok_cancel(mok_session *session, mok_ticket ticket);

#ifdef __cplusplus
}
#endif
#endif
