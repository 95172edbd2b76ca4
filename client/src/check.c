/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "error.h"
#include "names.h"

/* No options of any version come near; a size beyond is memory that was never filled in. */
#define MOST_OPTION_BYTES 4096u

int check_options(void *ret, size_t known, size_t needed, const void *from, const char *type)
{
    size_t size;

    if (!from)
        return client_fail(MOK_EARG, "%s is NULL", type);
    memcpy(&size, from, sizeof(size));
    if (size < needed || size > MOST_OPTION_BYTES)
        return client_fail(MOK_ESIZE, "%s.size is %zu, must be %zu..%u: set it to sizeof(%s)", type, size, needed,
                           MOST_OPTION_BYTES, type);
    for (size_t i = known; i < size; i++) {
        if (((const unsigned char *)from)[i] != 0)
            return client_fail(MOK_ESIZE, "%s.size is %zu and byte %zu is not zero; this library knows %zu bytes", type,
                               size, i, known);
    }
    memset(ret, 0, known);
    memcpy(ret, from, size < known ? size : known);
    return 0;
}

int check_name(const char *what, const char *name)
{
    if (!name)
        return client_fail(MOK_ENAME, "%s is NULL, must be a name", what);
    if (!mok_name_is_valid(name))
        return client_fail(MOK_ENAME, "%s is \"%.80s\", must be 1..%d of A-Z a-z 0-9 . _ -", what, name, MOK_MAX_NAME);
    return 0;
}

int check_session_options(const mok_session_options *from, mok_session_options *ret)
{
    static const mok_session_options defaults = { .size = sizeof(defaults) };

    int r = check_options(ret, sizeof(*ret), sizeof(size_t), from ? from : &defaults, "mok_session_options");
    if (r < 0)
        return r;
    if (ret->job) {
        r = check_name("job", ret->job);
        if (r < 0)
            return r;
    }
    if (ret->queue_entries == 0)
        ret->queue_entries = 64;
    if (ret->queue_entries < MOK_RING_MIN_ENTRIES || ret->queue_entries > MOK_RING_MAX_ENTRIES ||
        !mok_is_power_of_two(ret->queue_entries))
        return client_fail(MOK_ERANGE, "queue_entries is %" PRIu32 ", must be a power of two in %u..%u",
                           ret->queue_entries, MOK_RING_MIN_ENTRIES, MOK_RING_MAX_ENTRIES);
    if (ret->weight > MOK_MAX_WEIGHT)
        return client_fail(MOK_ERANGE, "weight is %" PRIu32 ", must be 0..%u", ret->weight, MOK_MAX_WEIGHT);
    return 0;
}

int check_group_options(const mok_group_options *from, mok_group_options *ret)
{
    int r = check_options(ret, sizeof(*ret), CHECK_THROUGH(mok_group_options, device), from, "mok_group_options");
    if (r < 0)
        return r;
    r = check_name("name", ret->name);
    if (r < 0)
        return r;
    if (ret->ranks < 1 || ret->ranks > MOK_MAX_EP)
        return client_fail(MOK_ERANGE, "ranks is %" PRIu32 ", must be 1..%u", ret->ranks, MOK_MAX_EP);
    if (ret->rank >= ret->ranks)
        return client_fail(MOK_ERANK, "rank is %" PRIu32 ", must be 0..%" PRIu32, ret->rank, ret->ranks - 1);
    if (ret->device >= MOK_MAX_DEVICES)
        return client_fail(MOK_ERANGE, "device is %" PRIu32 ", must be 0..%u", ret->device, MOK_MAX_DEVICES - 1);
    if (ret->flags & ~MOK_GROUP_EXCLUSIVE)
        return client_fail(MOK_ERANGE, "flags is %#" PRIx32 ", must be of %#x", ret->flags, MOK_GROUP_EXCLUSIVE);
    return 0;
}

/* ------------------------------------------------------------------ layers */

static int check_range(const char *what, uint64_t value, uint64_t least, uint64_t most)
{
    if (value < least || value > most)
        return client_fail(MOK_ERANGE, "%s is %" PRIu64 ", must be %" PRIu64 "..%" PRIu64, what, value, least, most);
    return 0;
}

static int check_width(const char *what, uint32_t value, uint32_t least)
{
    int r = check_range(what, value, least, MOK_MAX_DIM);
    if (r < 0)
        return r;
    if (value % MOK_DIM_MULTIPLE)
        return client_fail(MOK_EALIGN, "%s is %" PRIu32 ", must be a multiple of %u", what, value, MOK_DIM_MULTIPLE);
    return 0;
}

static int check_precision(uint32_t precision)
{
    if (precision < MOK_BF16 || precision > MOK_MXFP8_PER128)
        return client_fail(MOK_EDTYPE,
                           "precision is %" PRIu32 ", must be %d (bf16), %d (mxfp8-per32) or %d (mxfp8-per128)",
                           precision, MOK_BF16, MOK_MXFP8_PER32, MOK_MXFP8_PER128);
    return 0;
}

static int check_gradient_dtype(uint32_t dtype)
{
    if (dtype != 0 && dtype != MOK_DTYPE_F32 && dtype != MOK_DTYPE_BF16)
        return client_fail(MOK_EDTYPE, "gradient_dtype is %" PRIu32 ", must be 0, %d (F32) or %d (BF16)", dtype,
                           MOK_DTYPE_F32, MOK_DTYPE_BF16);
    return 0;
}

static int check_wgrad_precision(uint32_t wgrad, uint32_t precision)
{
    if (wgrad != 0 && wgrad != MOK_WGRAD_BF16 && wgrad != MOK_WGRAD_MXFP8)
        return client_fail(MOK_EDTYPE, "wgrad_precision is %" PRIu32 ", must be 0, %d (bf16) or %d (mxfp8)", wgrad,
                           MOK_WGRAD_BF16, MOK_WGRAD_MXFP8);
    if (wgrad == MOK_WGRAD_MXFP8 && precision == MOK_BF16)
        return client_fail(MOK_EDTYPE,
                           "wgrad_precision is %" PRIu32
                           " (mxfp8), must be 0 or %d (bf16) where precision is %d (bf16)",
                           wgrad, MOK_WGRAD_BF16, MOK_BF16);
    return 0;
}

static int check_transposed_weights(uint32_t transposed, uint32_t precision)
{
    int r = check_range("transposed_weights", transposed, 0, 1);
    if (r < 0)
        return r;
    if (transposed && precision != MOK_MXFP8_PER128)
        return client_fail(MOK_EDTYPE,
                           "transposed_weights is 1, must be 0 where precision is not %d (mxfp8-per128) but %" PRIu32,
                           MOK_MXFP8_PER128, precision);
    return 0;
}

int check_layer_options(const mok_layer_options *from, uint32_t ranks, Mok__LayerSpec *ret)
{
    mok_layer_options o;

    int r = check_options(&o, sizeof(o), CHECK_THROUGH(mok_layer_options, precision), from, "mok_layer_options");
    if (r < 0 || (r = check_width("hidden", o.hidden, MOK_DIM_MULTIPLE)) < 0 ||
        (r = check_width("intermediate", o.intermediate, MOK_DIM_MULTIPLE)) < 0 ||
        (r = check_width("shared_intermediate", o.shared_intermediate, 0)) < 0 ||
        (r = check_range("experts", o.experts, 1, MOK_MAX_EXPERTS)) < 0 ||
        (r = check_range("topk", o.topk, 1, MOK_MAX_TOPK)) < 0 ||
        (r = check_range("max_tokens", o.max_tokens, 1, MOK_MAX_TOKENS)) < 0 ||
        (r = check_precision(o.precision)) < 0 || (r = check_gradient_dtype(o.gradient_dtype)) < 0 ||
        (r = check_wgrad_precision(o.wgrad_precision, o.precision)) < 0 ||
        (r = check_transposed_weights(o.transposed_weights, o.precision)) < 0)
        return r;
    if (o.experts % ranks)
        return client_fail(MOK_ERANGE, "experts is %" PRIu32 ", must be a multiple of the group's %" PRIu32 " ranks",
                           o.experts, ranks);
    if (!isfinite(o.clamp) || o.clamp < 0)
        return client_fail(MOK_ERANGE, "clamp is %g, must be a finite number of at least 0", (double)o.clamp);

    mok__layer_spec__init(ret);
    ret->hidden = o.hidden;
    ret->intermediate = o.intermediate;
    ret->experts = o.experts;
    ret->topk = o.topk;
    ret->max_tokens = o.max_tokens;
    ret->precision = o.precision;
    ret->shared_intermediate = o.shared_intermediate;
    ret->clamp = o.clamp;
    ret->ring_bytes = o.ring_bytes;
    ret->minibatch_rows = o.minibatch_rows;
    ret->comm_units = o.comm_units;
    ret->gradient_dtype = o.gradient_dtype == MOK_DTYPE_F32 ? 0 : o.gradient_dtype; /* one way to say it */
    ret->wgrad_precision = o.wgrad_precision; /* as asked */
    ret->transposed_weights = o.transposed_weights;
    return 0;
}

/* ------------------------------------------------------------------ views */

static int check_absent(const struct check_view *v)
{
    if (v->view->offset || v->view->bytes)
        return client_fail(MOK_EARG, "%s has no buffer but offset %" PRIu64 " and bytes %" PRIu64 ", must be 0 then",
                           v->name, v->view->offset, v->view->bytes);
    if (v->required && v->bytes > 0)
        return client_fail(MOK_EBUFFER, "%s is absent, must have %" PRIu64 " bytes", v->name, v->bytes);
    return 0;
}

static int check_use(const struct check_place *place, const struct check_view *v, const struct check_buffer *buffer)
{
    if (buffer->place.session != place->session)
        return client_fail(MOK_EBUFFER, "%s is in buffer %" PRIu32 " of another session", v->name, buffer->id);
    if (buffer->place.device != place->device)
        return client_fail(MOK_EBUFFER, "%s is in buffer %" PRIu32 " on device %" PRIu32 ", must be on device %" PRIu32,
                           v->name, buffer->id, buffer->place.device, place->device);
    if (v->symmetric && buffer->place.group != place->group)
        return client_fail(MOK_EBUFFER,
                           "%s is in %s buffer %" PRIu32 ", must be in a symmetric one of the layer's group", v->name,
                           buffer->place.group ? "another group's" : "private", buffer->id);
    return 0;
}

static int check_extent(const struct check_view *v, const struct check_buffer *buffer, struct mok_region *ret)
{
    uint64_t offset = v->view->offset, bytes = v->view->bytes;

    if (offset % 16)
        return client_fail(MOK_EALIGN, "%s has offset %" PRIu64 ", must be a multiple of 16", v->name, offset);
    if (offset > buffer->bytes)
        return client_fail(MOK_ERANGE, "%s has offset %" PRIu64 ", must be at most the buffer's %" PRIu64 " bytes",
                           v->name, offset, buffer->bytes);
    if (bytes == 0)
        bytes = buffer->bytes - offset;
    if (bytes > buffer->bytes - offset)
        return client_fail(MOK_ERANGE,
                           "%s has %" PRIu64 " bytes at offset %" PRIu64 ", must end at most at the buffer's %" PRIu64,
                           v->name, bytes, offset, buffer->bytes);
    if (bytes < v->bytes)
        return client_fail(MOK_ESIZE, "%s has %" PRIu64 " bytes, must have at least %" PRIu64, v->name, bytes,
                           v->bytes);
    /* Only what is needed is passed on, so that regions of one buffer do not seem to overlap. */
    uint64_t most = v->most > v->bytes ? v->most : v->bytes;
    if (bytes > most)
        bytes = most;
    if (bytes > 0)
        *ret = (struct mok_region){ .buffer = buffer->id, .offset = offset, .length = bytes };
    return 0;
}

static bool overlap(const struct mok_region *a, uint64_t a_bytes, const struct mok_region *b, uint64_t b_bytes)
{
    return a->buffer && a->buffer == b->buffer && a->offset < b->offset + b_bytes && b->offset < a->offset + a_bytes;
}

static int check_overlaps(const struct check_view *views, size_t count, const struct mok_region *regions)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; views[i].written && j < count; j++) {
            if (i != j && overlap(&regions[i], views[i].bytes, &regions[j], views[j].bytes))
                return client_fail(MOK_EARG,
                                   "%s, which is written, overlaps %s in buffer %" PRIu32 ": %" PRIu64
                                   " bytes at %" PRIu64 " and %" PRIu64 " bytes at %" PRIu64,
                                   views[i].name, views[j].name, regions[i].buffer, views[i].bytes, regions[i].offset,
                                   views[j].bytes, regions[j].offset);
        }
    }
    return 0;
}

int check_views(const struct check_place *place, const struct check_view *views, size_t count,
                struct mok_region *ret_regions)
{
    memset(ret_regions, 0, count * sizeof(*ret_regions));
    for (size_t i = 0; i < count; i++) {
        const struct check_view *v = &views[i];
        int r;

        if (!v->view->buffer) {
            r = check_absent(v);
        } else {
            struct check_buffer buffer = buffer_facts(v->view->buffer);
            r = check_use(place, v, &buffer);
            if (r == 0)
                r = check_extent(v, &buffer, &ret_regions[i]);
        }
        if (r < 0)
            return r;
    }
    return check_overlaps(views, count, ret_regions);
}
