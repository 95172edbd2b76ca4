/* SPDX-License-Identifier: Apache-2.0 */
#include "describe.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>

#include "mok/types.h"
#include "names.h"

/* detail of MOK_EEXPERT: rank << 48 | token << 8 | slot */
static uint64_t detail_rank(uint64_t detail)
{
    return detail >> 48;
}

static uint64_t detail_token(uint64_t detail)
{
    return detail >> 8 & ((UINT64_C(1) << 40) - 1);
}

static uint64_t detail_slot(uint64_t detail)
{
    return detail & 0xff;
}

static const char *opcode_text(unsigned opcode)
{
    switch (opcode) {
    case MOK_OP_NOP:
        return "no-op";
    case MOK_OP_FORWARD:
        return "forward";
    case MOK_OP_BACKWARD:
        return "backward";
    case MOK_OP_CANCEL:
        return "cancel";
    }
    return "operation";
}

static bool is_region(unsigned argument)
{
    return argument >= MOK_ARG_REGION0 && argument < MOK_ARG_REGION0 + MOK_REGION_COUNT;
}

static void describe_range(const char *what, const struct mok_cqe *cqe, char *ret, size_t capacity)
{
    if (is_region(cqe->argument))
        snprintf(ret, capacity, "%s ends at byte %" PRIu64 " of its buffer, must end at most at %" PRIu64, what,
                 cqe->value, cqe->bound);
    else if (cqe->argument == MOK_ARG_FLAGS)
        snprintf(ret, capacity, "flags is %#" PRIx64 ", known here are %#" PRIx64, cqe->value, cqe->bound);
    else
        snprintf(ret, capacity, "%s is %" PRIu64 ", must be at most %" PRIu64, what, cqe->value, cqe->bound);
}

static void describe_buffer(const char *what, const struct mok_cqe *cqe, char *ret, size_t capacity)
{
    if (cqe->value == 0)
        snprintf(ret, capacity, "%s is absent, must be given", what);
    else if (cqe->bound != 0)
        snprintf(ret, capacity, "%s is in buffer %" PRIu64 ", must be in a symmetric one of group %" PRIu64, what,
                 cqe->value, cqe->bound);
    else
        snprintf(ret, capacity, "%s is in buffer %" PRIu64 ", which the worker does not have for this session", what,
                 cqe->value);
}

static void describe_state(const char *what, const struct mok_cqe *cqe, char *ret, size_t capacity)
{
    if (cqe->argument == MOK_ARG_PARAMS || cqe->argument == MOK_ARG_WGRADS)
        snprintf(ret, capacity, "%s are not all bound, see mok_layer_bind", what);
    else
        snprintf(ret, capacity, "%s: not possible in this state (value %" PRIu64 ", bound %" PRIu64 ")", what,
                 cqe->value, cqe->bound);
}

static void describe_mismatch(const char *what, const struct mok_cqe *cqe, char *ret, size_t capacity)
{
    if (cqe->argument == MOK_ARG_OPCODE)
        snprintf(ret, capacity, "ranks disagree on the operation: rank %" PRIu64 " submitted %s, rank 0 another",
                 cqe->detail, opcode_text((unsigned)cqe->value));
    else
        snprintf(ret, capacity, "ranks disagree on %s: rank %" PRIu64 " has %" PRIu64 ", rank 0 another", what,
                 cqe->detail, cqe->value);
}

static void describe_size(const char *what, const struct mok_cqe *cqe, char *ret, size_t capacity)
{
    if (cqe->argument == MOK_ARG_TOKENS)
        snprintf(ret, capacity, "tokens must be %" PRIu64 ", as in the forward that left the context", cqe->value);
    else
        snprintf(ret, capacity, "%s has %" PRIu64 " bytes, must have at least %" PRIu64, what, cqe->value, cqe->bound);
}

static void describe_invalid(const char *what, const struct mok_cqe *cqe, char *ret, size_t capacity)
{
    if (cqe->argument == MOK_ARG_CONTEXT)
        snprintf(ret, capacity, "context is not what a forward of this layer and these ranks left there");
    else if (cqe->argument == MOK_ARG_CONTEXT_MODE && cqe->value != 0)
        snprintf(ret, capacity,
                 "context was left by a forward with context_mode %" PRIu64 ", must be used with the same", cqe->value);
    else if (is_region(cqe->argument) && cqe->bound != 0)
        snprintf(ret, capacity,
                 "%s, which is written, begins at byte %" PRIu64 " in a region that ends at byte %" PRIu64, what,
                 cqe->value, cqe->bound);
    else
        snprintf(ret, capacity, "%s is not valid here (value %" PRIu64 ", bound %" PRIu64 ")", what, cqe->value,
                 cqe->bound);
}

/* Codes whose sentence is about an argument. False: there is none to speak of. */
static bool describe_argument(const struct mok_cqe *cqe, char *ret, size_t capacity)
{
    const char *what = mok_argument_text(cqe->argument);

    if (cqe->argument == MOK_ARG_NONE)
        return false;
    switch (-cqe->result) {
    case MOK_ERANGE:
        describe_range(what, cqe, ret, capacity);
        return true;
    case MOK_ESIZE:
        describe_size(what, cqe, ret, capacity);
        return true;
    case MOK_EALIGN:
        snprintf(ret, capacity, "%s has offset %" PRIu64 ", must be a multiple of %" PRIu64, what, cqe->value,
                 cqe->bound);
        return true;
    case MOK_EBUFFER:
        describe_buffer(what, cqe, ret, capacity);
        return true;
    case MOK_ERESERVED:
        snprintf(ret, capacity, "%s has %" PRIu64 " where 0 must be", what, cqe->value);
        return true;
    case MOK_EOPCODE:
        snprintf(ret, capacity, "opcode is %" PRIu64 ", must be at most %" PRIu64, cqe->value, cqe->bound);
        return true;
    case MOK_ENOENT:
        snprintf(ret, capacity, "%s %" PRIu64 " does not exist", what, cqe->value);
        return true;
    case MOK_ESTATE:
        describe_state(what, cqe, ret, capacity);
        return true;
    case MOK_EMISMATCH:
        describe_mismatch(what, cqe, ret, capacity);
        return true;
    case MOK_EARG:
        describe_invalid(what, cqe, ret, capacity);
        return true;
    case MOK_ENOTSUP:
        snprintf(ret, capacity, "%s %" PRIu64 ": the device's engine does not run it in the layer's precision", what,
                 cqe->value);
        return true;
    }
    return false;
}

void describe_completion(unsigned opcode, const struct mok_cqe *cqe, char *ret_text, size_t capacity)
{
    const char *name = opcode_text(opcode);
    char text[256];

    switch (-cqe->result) {
    case MOK_EEXPERT:
        snprintf(ret_text, capacity,
                 "%s: rank %" PRIu64 ", token %" PRIu64 ", slot %" PRIu64 " holds %" PRId64 ", must be -1..%" PRIu64,
                 cqe->argument == MOK_ARG_CONTEXT ? "ids in the context" : "ids", detail_rank(cqe->detail),
                 detail_token(cqe->detail), detail_slot(cqe->detail), (int64_t)cqe->value, cqe->bound - 1);
        return;
    case MOK_EPEER:
        snprintf(ret_text, capacity, "%s ended because rank %" PRIu64 " of the group is gone", name, cqe->detail);
        return;
    case MOK_EWORKER:
        snprintf(ret_text, capacity, "%s ended because the worker of its device went away; form the group again", name);
        return;
    case MOK_EDAEMON:
        snprintf(ret_text, capacity, "%s ended because mokd is gone", name);
        return;
    case MOK_ETIMEDOUT:
        snprintf(ret_text, capacity, "%s did not complete within its timeout_ns; rank %" PRIu64 " was not done in time",
                 name, cqe->detail);
        return;
    case MOK_ECANCELED:
        snprintf(ret_text, capacity, "%s was canceled", name);
        return;
    }
    if (!describe_argument(cqe, text, sizeof(text)))
        snprintf(text, sizeof(text), "%s", mok_error_text(cqe->result));
    /* What one rank found wrong fails all; a mismatch names its rank already. */
    if (cqe->detail != 0 && cqe->result != -MOK_EMISMATCH)
        snprintf(ret_text, capacity, "%s on rank %" PRIu64 ": %s", name, cqe->detail, text);
    else
        snprintf(ret_text, capacity, "%s: %s", name, text);
}

void describe_ranks(const uint32_t *ranks, size_t count, char *ret_text, size_t capacity)
{
    size_t used = (size_t)snprintf(ret_text, capacity, count == 0 ? "no rank" : count == 1 ? "rank " : "ranks ");

    for (size_t i = 0; i < count && used < capacity; i++) {
        const char *before = i == 0 ? "" : i + 1 == count ? " and " : ", ";
        used += (size_t)snprintf(ret_text + used, capacity - used, "%s%" PRIu32, before, ranks[i]);
    }
}
