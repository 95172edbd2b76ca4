/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words that every part of MoK shares: error codes, enumerations and hard bounds.
 * Plain C99 and C++; depends on nothing but <stdint.h>. Values are part of the ABI: never renumber.
 */
#ifndef MOK_TYPES_H
#define MOK_TYPES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Public functions return 0 (or a count) on success and one of these, negated, on failure. */
#define MOK_ERROR_MAP(X)                                                                           \
    X(1, ARG, "invalid argument")                                                                  \
    X(2, RANGE, "value out of range")                                                              \
    X(3, SIZE, "wrong size")                                                                       \
    X(4, ALIGN, "wrong alignment")                                                                 \
    X(5, DTYPE, "wrong data type or precision")                                                    \
    X(6, STATE, "not possible in this state")                                                      \
    X(7, NAME, "invalid name")                                                                     \
    X(8, RANK, "invalid or duplicate rank")                                                        \
    X(9, BUFFER, "no such buffer, or not usable for this")                                         \
    X(10, NOENT, "no such object")                                                                 \
    X(11, EXIST, "exists already")                                                                 \
    X(12, NOMEM, "out of memory")                                                                  \
    X(13, QUOTA, "limit of the user reached")                                                      \
    X(14, ACCESS, "permission denied")                                                             \
    X(15, AGAIN, "queue full, reap completions first")                                             \
    X(16, TIMEDOUT, "time-out expired")                                                            \
    X(17, CANCELED, "operation canceled")                                                          \
    X(18, PEER, "another rank of the group is gone")                                               \
    X(19, WORKER, "the device worker restarted; form the group again")                             \
    X(20, DAEMON, "connection to mokd lost")                                                       \
    X(21, PROTO, "malformed message")                                                              \
    X(22, VERSION, "versions do not fit")                                                          \
    X(23, FORK, "session used in a forked child")                                                  \
    X(24, MISMATCH, "ranks of the group disagree")                                                 \
    X(25, EXPERT, "expert id out of range")                                                        \
    X(26, DEVICE, "device unusable")                                                               \
    X(27, NODEV, "no such device")                                                                 \
    X(28, FDS, "descriptor limit reached")                                                         \
    X(29, NOTSUP, "not supported here")                                                            \
    X(30, SESSION, "session closed by mokd")                                                       \
    X(31, OPCODE, "unknown operation")                                                             \
    X(32, RESERVED, "reserved field is not zero")                                                  \
    X(33, BUSY, "in use")                                                                          \
    X(34, IO, "system call failed")                                                                \
    X(35, INTERNAL, "internal error")                                                              \
    X(36, SHARING, "this process does not share the GPU as mokd does")                             \
    X(37, DRAIN, "the device takes nothing new, it is being drained")                              \
    X(38, EXCLUSIVE, "another group has the device alone")

enum mok_error {
#define MOK_ERROR_ENUM(code, name, text) MOK_E##name = code,
    MOK_ERROR_MAP(MOK_ERROR_ENUM)
#undef MOK_ERROR_ENUM
};

/* Precision of a layer's expert GEMMs. */
enum mok_precision {
    MOK_BF16 = 1,          /* BF16 operands, FP32 accumulation */
    MOK_MXFP8_PER32 = 2,   /* E4M3 operands, one E8M0 scale per 32 values */
    MOK_MXFP8_PER128 = 3,  /* E4M3 operands, the four scales of an aligned 128 are equal */
};

/* Type of a tensor's values in memory. */
enum mok_dtype {
    MOK_DTYPE_BF16 = 1,
    MOK_DTYPE_F32 = 2,
};

/* Operands of the weight gradients of an MXFP8 layer's experts. */
enum mok_wgrad {
    MOK_WGRAD_BF16 = 1,  /* what was quantised along rows, as it is worth */
    MOK_WGRAD_MXFP8 = 2, /* quantised along the token axis */
};

/* What forward keeps for backward. */
enum mok_context_mode {
    MOK_CONTEXT_NONE = 0,      /* inference: nothing */
    MOK_CONTEXT_FULL = 1,      /* routing and the first macrobatch's activations */
    MOK_CONTEXT_RECOMPUTE = 2, /* routing only; backward replays everything */
};

/* Class of a user's operations on a device: how much of it a class gets against the others is in ABI.md. */
enum mok_priority {
    MOK_PRIORITY_NORMAL = 0,
    MOK_PRIORITY_HIGH = 1,
    MOK_PRIORITY_LOW = 2,
};

enum mok_device_kind {
    MOK_DEVICE_HOST = 1,
    MOK_DEVICE_CUDA = 2,
};

/* Hard bounds of this version; a request beyond one is refused with MOK_ERANGE naming it. */
#define MOK_MAX_NAME 63             /* bytes of a name, without the terminator */
#define MOK_MAX_EP 128u             /* ranks of a group */
#define MOK_MAX_EXPERTS 4096u       /* experts of a layer */
#define MOK_MAX_TOPK 64u            /* slots of a token */
#define MOK_MAX_DIM (1u << 20)      /* hidden and intermediate size */
#define MOK_DIM_MULTIPLE 16u        /* hidden and intermediate are multiples of this */
#define MOK_MAX_TOKENS (1u << 24)   /* tokens of a rank */
#define MOK_MAX_DEVICES 64u         /* devices of a node */
#define MOK_MAX_WEIGHT 1000u        /* of a user or a session, in the fair share of a device */

#ifdef __cplusplus
}
#endif
#endif
