/* SPDX-License-Identifier: Apache-2.0 */
/* mokctl's command line: what is wrong with it is said here, by name, before mokd is asked anything. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "mok/mok.h"
#include "mokctl.h"
#include "names.h"
#include "util.h"
#include "wire.h"

const char mokctl_usage[] =
    "usage: mokctl [--json] [--socket PATH] COMMAND\n"
    "\n"
    "commands:\n"
    "  status    everything that mokd knows\n"
    "  devices   devices, their workers and memory\n"
    "  jobs      sessions: who, from which process, holding what\n"
    "  groups    groups: their ranks and state\n"
    "  layers    layers of all users, one line a rank; also: layer\n"
    "  layer ID [--rank R]\n"
    "            the plan of that layer on rank R (0), and why it is so; also: layer --explain ID\n"
    "  layer --explain --hidden H --intermediate I --experts E --topk K --max-tokens T\n"
    "            the plan and the exact memory of a layer that is not there; further options:\n"
    "            --ep N (1), --device D (0), --precision bf16|mxfp8-per32|mxfp8-per128 (bf16),\n"
    "            --shared-intermediate S, --clamp L, --ring-bytes B, --minibatch-rows M, --comm-units C,\n"
    "            --gradients f32|bf16 (f32), --wgrad bf16|mxfp8 (mxfp8 with mxfp8-per128), --transposed-weights\n"
    "  quota [--user U | --all]\n"
    "            what a user has and may have, by user name or number (of others: administrators alone), with the\n"
    "            Unix groups that bind him; --all: of everybody\n"
    "  usage [--since 24h|DATE] [--by user|job|device]\n"
    "            device time, operations, rows and memory by time that jobs used: one's own, an administrator all;\n"
    "            since so long ago (30m, 24h, 7d, 4w) or a date (2026-01-31, 2026-01-31T08:00), in steps of ten\n"
    "            minutes\n"
    "  drain DEVICE|NODE|NODE:DEVICE|--node [--wait]\n"
    "            the device, by index or name, or all of a node of the rack (--node: this one) finish what runs and\n"
    "            take no new group or queue, over restarts of mokd too (not over a stop and start, or a boot), until\n"
    "            undrain; --wait: until nothing is left; administrators alone\n"
    "  undrain DEVICE|NODE|NODE:DEVICE|--node\n"
    "            and take new ones again\n"
    "  top [--once] [--interval S]\n"
    "            devices and sessions live: shares, queue depth, latencies, new every S seconds (2), until q or\n"
    "            Ctrl-C; --once: one look, over S seconds; --json: an object a line\n"
    "  trace [--seconds N] --out FILE\n"
    "            records for N seconds (1) what the devices do, as JSON for ui.perfetto.dev or chrome://tracing:\n"
    "            operations, phases, minibatches, transfers, waits; an administrator sees all sessions and ends\n"
    "            the trace of anybody else, who sees his own. A GPU's down and d input store finished rows where\n"
    "            they belong as they go: there is no combine beside them\n"
    "  doctor [--config FILE]\n"
    "            looks at socket, versions, devices, memory, limits, peers, files, processor, kernel, unit, driver,\n"
    "            MPS and fabric; FILE: the configuration, without it the one that mokd reads; says what is wrong and\n"
    "            what to do; asks what may hang for two seconds; needs no mokd: the devices are then those of the\n"
    "            configuration. Exit code 1: something will not work\n"
    "  bundle --out FILE [--config FILE]\n"
    "            one archive (.tar, .tar.gz) for a bug report: versions, status, configuration, log, doctor,\n"
    "            hardware; no tensors; keys, tokens and passwords are taken out\n"
    "  rack      the nodes of the rack: state, round trip, epoch, clock offset, last error\n"
    "  keygen [--out DIR]\n"
    "            makes a node's keys, DIR/rack.key and DIR/rack.pub (DIR: here); asks no mokd\n"
    "  version   versions of mokctl and of mokd\n"
    "\n"
    "options:\n"
    "  --json         JSON instead of tables\n"
    "  --socket PATH  mokd's socket; default: $MOK_SOCKET, else " MOK_DEFAULT_SOCKET "\n"
    "  --help         this text\n"
    "\n"
    "exit codes: 0 done, 1 mokd answered with an error, 2 wrong usage, 3 mokd cannot be reached\n";

/* Also the place in options[]. Those of a shape come first. */
enum option_value {
    OPTION_HIDDEN,
    OPTION_INTERMEDIATE,
    OPTION_EXPERTS,
    OPTION_TOPK,
    OPTION_MAX_TOKENS,
    OPTION_NEEDED, /* the ones before must all be there */
    OPTION_EP = OPTION_NEEDED,
    OPTION_DEVICE,
    OPTION_PRECISION,
    OPTION_SHARED_INTERMEDIATE,
    OPTION_CLAMP,
    OPTION_RING_BYTES,
    OPTION_MINIBATCH_ROWS,
    OPTION_COMM_UNITS,
    OPTION_GRADIENTS,
    OPTION_WGRAD,
    OPTION_TRANSPOSED_WEIGHTS,
    OPTION_SHAPES, /* how many those are */
    OPTION_RANK = OPTION_SHAPES,
    OPTION_EXPLAIN,
    OPTION_JSON,
    OPTION_SOCKET,
    OPTION_HELP,
};

static const struct option options[] = {
    [OPTION_HIDDEN] = { "hidden", required_argument, NULL, OPTION_HIDDEN },
    [OPTION_INTERMEDIATE] = { "intermediate", required_argument, NULL, OPTION_INTERMEDIATE },
    [OPTION_EXPERTS] = { "experts", required_argument, NULL, OPTION_EXPERTS },
    [OPTION_TOPK] = { "topk", required_argument, NULL, OPTION_TOPK },
    [OPTION_MAX_TOKENS] = { "max-tokens", required_argument, NULL, OPTION_MAX_TOKENS },
    [OPTION_EP] = { "ep", required_argument, NULL, OPTION_EP },
    [OPTION_DEVICE] = { "device", required_argument, NULL, OPTION_DEVICE },
    [OPTION_PRECISION] = { "precision", required_argument, NULL, OPTION_PRECISION },
    [OPTION_SHARED_INTERMEDIATE] = { "shared-intermediate", required_argument, NULL, OPTION_SHARED_INTERMEDIATE },
    [OPTION_CLAMP] = { "clamp", required_argument, NULL, OPTION_CLAMP },
    [OPTION_RING_BYTES] = { "ring-bytes", required_argument, NULL, OPTION_RING_BYTES },
    [OPTION_MINIBATCH_ROWS] = { "minibatch-rows", required_argument, NULL, OPTION_MINIBATCH_ROWS },
    [OPTION_COMM_UNITS] = { "comm-units", required_argument, NULL, OPTION_COMM_UNITS },
    [OPTION_GRADIENTS] = { "gradients", required_argument, NULL, OPTION_GRADIENTS },
    [OPTION_WGRAD] = { "wgrad", required_argument, NULL, OPTION_WGRAD },
    [OPTION_TRANSPOSED_WEIGHTS] = { "transposed-weights", no_argument, NULL, OPTION_TRANSPOSED_WEIGHTS },
    [OPTION_RANK] = { "rank", required_argument, NULL, OPTION_RANK },
    [OPTION_EXPLAIN] = { "explain", no_argument, NULL, OPTION_EXPLAIN },
    [OPTION_JSON] = { "json", no_argument, NULL, OPTION_JSON },
    [OPTION_SOCKET] = { "socket", required_argument, NULL, OPTION_SOCKET },
    [OPTION_HELP] = { "help", no_argument, NULL, OPTION_HELP },
    [OPTION_HELP + 1] = { 0 },
};

/* What was there at all. */
struct seen {
    bool option[OPTION_SHAPES + 1]; /* shapes and --rank */
    bool explain;
};

static int parse_u64(const char *what, const char *text, uint64_t most, uint64_t *ret)
{
    char *end;

    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value > most) {
        fprintf(stderr, "mokctl: %s %s: must be a whole number in 0..%" PRIu64 "\n", what, text, most);
        return -1;
    }
    *ret = value;
    return 0;
}

static int parse_u32(const char *what, const char *text, uint32_t *ret)
{
    uint64_t value;

    if (parse_u64(what, text, UINT32_MAX, &value) < 0)
        return -1;
    *ret = (uint32_t)value;
    return 0;
}

static int parse_named(const char *option, const char *text, int (*from_name)(const char *name, uint32_t *ret),
                       uint32_t *ret)
{
    if (from_name(text, ret) == 0)
        return 0;
    fprintf(stderr, "mokctl: %s: %s\n", option, mok_last_error());
    return -1;
}

static int parse_gradients(const char *text, uint32_t *ret)
{
    if (parse_named("--gradients", text, mok_dtype_from_name, ret) < 0)
        return -1;
    if (*ret == MOK_DTYPE_F32)
        *ret = 0; /* as libmok says it */
    return 0;
}

static int parse_clamp(const char *text, float *ret)
{
    char *end;

    *ret = strtof(text, &end);
    if (end != text && !*end)
        return 0;
    fprintf(stderr, "mokctl: --clamp %s: must be a number\n", text);
    return -1;
}

static int parse_shape(int option, const char *text, struct mokctl_arguments *ret)
{
    Mok__LayerSpec *spec = &ret->spec;

    switch (option) {
    case OPTION_HIDDEN:
        return parse_u32("--hidden", text, &spec->hidden);
    case OPTION_INTERMEDIATE:
        return parse_u32("--intermediate", text, &spec->intermediate);
    case OPTION_EXPERTS:
        return parse_u32("--experts", text, &spec->experts);
    case OPTION_TOPK:
        return parse_u32("--topk", text, &spec->topk);
    case OPTION_MAX_TOKENS:
        return parse_u32("--max-tokens", text, &spec->max_tokens);
    case OPTION_EP:
        return parse_u32("--ep", text, &ret->ep);
    case OPTION_DEVICE:
        return parse_u32("--device", text, &ret->device);
    case OPTION_PRECISION:
        return parse_named("--precision", text, mok_precision_from_name, &spec->precision);
    case OPTION_SHARED_INTERMEDIATE:
        return parse_u32("--shared-intermediate", text, &spec->shared_intermediate);
    case OPTION_CLAMP:
        return parse_clamp(text, &spec->clamp);
    case OPTION_RING_BYTES:
        return parse_u64("--ring-bytes", text, UINT64_MAX, &spec->ring_bytes);
    case OPTION_MINIBATCH_ROWS:
        return parse_u32("--minibatch-rows", text, &spec->minibatch_rows);
    case OPTION_COMM_UNITS:
        return parse_u32("--comm-units", text, &spec->comm_units);
    case OPTION_GRADIENTS:
        return parse_gradients(text, &spec->gradient_dtype);
    case OPTION_WGRAD:
        return parse_named("--wgrad", text, mok_wgrad_from_name, &spec->wgrad_precision);
    case OPTION_TRANSPOSED_WEIGHTS:
        spec->transposed_weights = 1;
        return 0;
    default:
        return parse_u32("--rank", text, &ret->rank);
    }
}

static int parse_options(int argc, char **argv, struct mokctl_arguments *ret, struct seen *ret_seen)
{
    int c;

    while ((c = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        switch (c) {
        case OPTION_EXPLAIN:
            ret_seen->explain = true;
            break;
        case OPTION_JSON:
            ret->json = true;
            break;
        case OPTION_SOCKET:
            ret->socket = optarg;
            break;
        case OPTION_HELP:
        case 'h':
            ret->help = true;
            break;
        case '?':
            return -1; /* getopt_long has said why */
        default:
            if (parse_shape(c, optarg, ret) < 0)
                return -1;
            ret_seen->option[c] = true;
        }
    }
    return 0;
}

static int parse_command(const char *name, struct mokctl_arguments *ret)
{
    static const struct {
        const char *name;
        enum mokctl_part part;
    } parts[] = {
        { "status", MOKCTL_STATUS }, { "devices", MOKCTL_DEVICES }, { "jobs", MOKCTL_JOBS },
        { "groups", MOKCTL_GROUPS }, { "layer", MOKCTL_LAYERS }, { "layers", MOKCTL_LAYERS },
    };

    for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
        if (strcmp(parts[i].name, name) == 0) {
            ret->action = MOKCTL_SHOW;
            ret->part = parts[i].part;
            return 0;
        }
    }
    if (strcmp(name, "rack") == 0) {
        ret->action = MOKCTL_RACK;
        return 0;
    }
    if (strcmp(name, "version") == 0) {
        ret->action = MOKCTL_VERSION;
        return 0;
    }
    fprintf(stderr, "mokctl: no command \"%s\"\n", name);
    return -1;
}

/* The first option that was there of those from `from` on; NULL: none. */
static const char *first_seen(const struct seen *seen, int from, int to)
{
    for (int i = from; i < to; i++) {
        if (seen->option[i])
            return options[i].name;
    }
    return NULL;
}

/* `id` NULL: none. */
static int parse_explain(const char *id, const struct seen *seen, struct mokctl_arguments *ret)
{
    const char *shape = first_seen(seen, 0, OPTION_SHAPES);

    if (id && shape) {
        fprintf(stderr, "mokctl: layer %s is one that is there, so --%s has no place\n", id, shape);
        return -1;
    }
    if (id) {
        ret->action = MOKCTL_EXPLAIN;
        return parse_u32("layer", id, &ret->layer);
    }
    if (seen->option[OPTION_RANK]) {
        fprintf(stderr, "mokctl: --rank needs the ID of a layer\n");
        return -1;
    }
    for (int i = 0; i < OPTION_NEEDED; i++) {
        if (!seen->option[i]) {
            fprintf(stderr, "mokctl: --explain needs the ID of a layer, or a shape: --%s is missing\n",
                    options[i].name);
            return -1;
        }
    }
    ret->action = MOKCTL_WOULD_BE;
    return 0;
}

int mokctl_parse(int argc, char **argv, struct mokctl_arguments *ret)
{
    struct seen seen = { 0 };

    *ret = (struct mokctl_arguments){ .ep = 1, .spec = MOK__LAYER_SPEC__INIT };
    ret->spec.precision = MOK_BF16;
    if (parse_options(argc, argv, ret, &seen) < 0)
        return -1;
    if (ret->help)
        return 0;
    if (optind == argc) {
        fprintf(stderr, "mokctl: no command\n");
        return -1;
    }
    if (parse_command(argv[optind++], ret) < 0)
        return -1;
    ret->spec.wgrad_precision = mok_wire_wgrad(ret->spec.wgrad_precision, ret->spec.precision);
    bool layers = ret->action == MOKCTL_SHOW && ret->part == MOKCTL_LAYERS;
    const char *id = layers && optind < argc ? argv[optind++] : NULL;
    bool explain = layers && (seen.explain || id);
    const char *stray = first_seen(&seen, 0, OPTION_SHAPES + 1);
    if (optind < argc) {
        fprintf(stderr, "mokctl: one command only, but there is also \"%s\"\n", argv[optind]);
        return -1;
    }
    if (explain)
        return parse_explain(id, &seen, ret);
    if (seen.explain || stray) {
        fprintf(stderr, "mokctl: --%s belongs to layer --explain\n", stray ? stray : "explain");
        return -1;
    }
    return 0;
}
