/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses and checks the command line. Every refusal names the option, the value and the bound.
 */
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mok/mok.h"
#include "report.h"

static const char usage[] =
    "Usage: train_moe_lm [OPTION]...\n"
    "Trains a byte-level mixture-of-experts language model on a text; its MoE layers run in mokd.\n"
    "\n"
    "Job:\n"
    "  --ranks N            rank processes, each with its own device (2)\n"
    "  --engine E           host or cuda: what runs the layers; with cuda the whole step is queued on the GPU (host)\n"
    "  --devices A,B,...    their devices (the first of that engine at each mokd)\n"
    "  --job NAME           name of the job and of its group (train_moe_lm)\n"
    "  --socket PATH        mokd's socket ($MOK_SOCKET, else /run/mok/mokd.sock); once, or once a rank, in rank "
    "order,\n"
    "                       where the ranks are at several mokd of this machine\n"
    "\n"
    "Training:\n"
    "  --text FILE          text to learn (/usr/share/common-licenses/GPL-3)\n"
    "  --steps N            optimizer steps in all, a resumed run's earlier ones included (80)\n"
    "  --batch N            sequences a rank a step (16)\n"
    "  --seq N              tokens of a sequence (64)\n"
    "  --micro-batches N    parts of a step's batch, all in flight at once (2)\n"
    "  --lr X               learning rate of AdamW (0.01)\n"
    "  --seed N             of parameters and batches (1)\n"
    "\n"
    "Model:\n"
    "  --hidden N           hidden size H, multiple of 16 (64)\n"
    "  --intermediate N     intermediate size I of an expert, multiple of 16 (128)\n"
    "  --experts N          experts E of a layer, multiple of --ranks (8)\n"
    "  --topk N             experts a token, at most --experts (2)\n"
    "  --layers N           MoE layers (2)\n"
    "  --window N           bytes of context (8)\n"
    "  --shared-expert      an expert of width I that every token passes\n"
    "  --precision P        bf16, mxfp8-per32, mxfp8-per128 or mxfp8: per32, with --engine cuda per128 (bf16)\n"
    "  --wgrad P            bf16 or, of MXFP8 experts, mxfp8: operands of weight gradients (mxfp8 with per128)\n"
    "  --recompute          keep only the routing for backward\n"
    "\n"
    "Files:\n"
    "  --checkpoint FILE    written at the end, and on SIGINT or SIGTERM\n"
    "  --save-every N       also after every N steps (0: never)\n"
    "  --resume             continue from the checkpoint file, written with the same model, batch, seed, --precision "
    "and --wgrad\n"
    "  --report             with --engine cuda: at the end, what a step's time went to\n"
    "  --log FILE           one JSON object a step: step, loss, tokens_per_s\n"
    "  --dump FILE          at the end, rank 0's x and d_out of the first layer: BF16 [tokens][H] each\n"
    "\n"
    "  --check-gradients    compare the layer's gradients with finite differences instead of training\n"
    "  --quiet              only the last lines\n"
    "  --help               this text\n"
    "\n"
    "Exit code: 0 done, 1 failed, 2 bad arguments, 130 ended by a signal in good order.\n";

enum {
    OPT_RANKS = 256,
    OPT_ENGINE,
    OPT_DEVICES,
    OPT_JOB,
    OPT_SOCKET,
    OPT_TEXT,
    OPT_STEPS,
    OPT_BATCH,
    OPT_SEQ,
    OPT_MICRO_BATCHES,
    OPT_LR,
    OPT_SEED,
    OPT_HIDDEN,
    OPT_INTERMEDIATE,
    OPT_EXPERTS,
    OPT_TOPK,
    OPT_LAYERS,
    OPT_WINDOW,
    OPT_SHARED_EXPERT,
    OPT_PRECISION,
    OPT_WGRAD,
    OPT_RECOMPUTE,
    OPT_CHECKPOINT,
    OPT_SAVE_EVERY,
    OPT_RESUME,
    OPT_REPORT,
    OPT_LOG,
    OPT_DUMP,
    OPT_CHECK_GRADIENTS,
    OPT_QUIET,
    OPT_HELP,
};

static const struct option long_options[] = {
    { "ranks", required_argument, NULL, OPT_RANKS },
    { "engine", required_argument, NULL, OPT_ENGINE },
    { "devices", required_argument, NULL, OPT_DEVICES },
    { "job", required_argument, NULL, OPT_JOB },
    { "socket", required_argument, NULL, OPT_SOCKET },
    { "text", required_argument, NULL, OPT_TEXT },
    { "steps", required_argument, NULL, OPT_STEPS },
    { "batch", required_argument, NULL, OPT_BATCH },
    { "seq", required_argument, NULL, OPT_SEQ },
    { "micro-batches", required_argument, NULL, OPT_MICRO_BATCHES },
    { "lr", required_argument, NULL, OPT_LR },
    { "seed", required_argument, NULL, OPT_SEED },
    { "hidden", required_argument, NULL, OPT_HIDDEN },
    { "intermediate", required_argument, NULL, OPT_INTERMEDIATE },
    { "experts", required_argument, NULL, OPT_EXPERTS },
    { "topk", required_argument, NULL, OPT_TOPK },
    { "layers", required_argument, NULL, OPT_LAYERS },
    { "window", required_argument, NULL, OPT_WINDOW },
    { "shared-expert", no_argument, NULL, OPT_SHARED_EXPERT },
    { "precision", required_argument, NULL, OPT_PRECISION },
    { "wgrad", required_argument, NULL, OPT_WGRAD },
    { "recompute", no_argument, NULL, OPT_RECOMPUTE },
    { "checkpoint", required_argument, NULL, OPT_CHECKPOINT },
    { "save-every", required_argument, NULL, OPT_SAVE_EVERY },
    { "resume", no_argument, NULL, OPT_RESUME },
    { "report", no_argument, NULL, OPT_REPORT },
    { "log", required_argument, NULL, OPT_LOG },
    { "dump", required_argument, NULL, OPT_DUMP },
    { "check-gradients", no_argument, NULL, OPT_CHECK_GRADIENTS },
    { "quiet", no_argument, NULL, OPT_QUIET },
    { "help", no_argument, NULL, OPT_HELP },
    { 0 },
};

static int parse_u64(const char *name, const char *value, uint64_t low, uint64_t high, uint64_t *ret)
{
    unsigned long long number;
    char *end;

    errno = 0;
    number = strtoull(value, &end, 10);
    if (*value < '0' || *value > '9' || *end)
        return fail(-MOK_EARG, "--%s %s: not a whole number", name, value);
    if (errno || number < low || number > high)
        return fail(-MOK_ERANGE, "--%s %s: outside %llu..%llu", name, value, (unsigned long long)low,
                    (unsigned long long)high);
    *ret = number;
    return 0;
}

static int parse_unsigned(const char *name, const char *value, unsigned low, unsigned high, unsigned *ret)
{
    uint64_t number;
    int rc = parse_u64(name, value, low, high, &number);

    if (rc < 0)
        return rc;
    *ret = (unsigned)number;
    return 0;
}

static int parse_rate(const char *value, float *ret)
{
    char *end;
    float rate = strtof(value, &end);

    if (end == value || *end)
        return fail(-MOK_EARG, "--lr %s: not a number", value);
    if (!isfinite(rate) || rate < 0 || rate > 1)
        return fail(-MOK_ERANGE, "--lr %s: outside 0..1", value);
    *ret = rate;
    return 0;
}

#define ANY_MXFP8 UINT32_MAX /* until the engine is known */

/* By one of the library's names. */
static int parse_named(const char *option, const char *value, int (*from_name)(const char *name, uint32_t *ret),
                       uint32_t *ret)
{
    int rc = from_name(value, ret);

    return rc < 0 ? fail(rc, "%s: %s", option, mok_last_error()) : 0;
}

static int parse_precision(const char *value, uint32_t *ret)
{
    if (strcmp(value, "mxfp8") == 0) {
        *ret = ANY_MXFP8;
        return 0;
    }
    int rc = mok_precision_from_name(value, ret);
    return rc < 0 ? fail(rc, "--precision: %s, or mxfp8", mok_last_error()) : 0;
}

/* "0,1,5" -> devices; returns their number. */
static int parse_devices(const char *value, unsigned *devices)
{
    char *copy = strdup(value), *rest = copy, *word;
    int count = 0, rc = 0;

    if (!copy)
        return fail(-MOK_ENOMEM, "no memory");
    while (rc == 0 && (word = strsep(&rest, ","))) {
        if (count == (int)MOK_MAX_EP)
            rc = fail(-MOK_ERANGE, "--devices %s: more than %u", value, MOK_MAX_EP);
        else
            rc = parse_unsigned("devices", word, 0, MOK_MAX_DEVICES - 1, &devices[count++]);
    }
    free(copy);
    return rc < 0 ? rc : count;
}

static int parse_job(const char *value, const char **ret)
{
    size_t length = strspn(value, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");

    if (length == 0 || value[length] || length > MOK_MAX_NAME)
        return fail(-MOK_ENAME, "--job %s: a name is 1 to %u of the characters A-Z a-z 0-9 . _ -", value, MOK_MAX_NAME);
    *ret = value;
    return 0;
}

static int parse_one(int option, const char *name, struct options *o, int *devices)
{
    switch (option) {
    case OPT_RANKS:
        return parse_unsigned(name, optarg, 1, MOK_MAX_EP, &o->ranks);
    case OPT_ENGINE:
        return parse_named("--engine", optarg, mok_device_kind_from_name, &o->engine);
    case OPT_DEVICES:
        *devices = parse_devices(optarg, o->devices);
        return *devices < 0 ? *devices : 0;
    case OPT_JOB:
        return parse_job(optarg, &o->job);
    case OPT_SOCKET:
        if (o->n_sockets == MOK_MAX_EP)
            return fail(-MOK_ERANGE, "--socket %s: given more than %u times", optarg, MOK_MAX_EP);
        o->sockets[o->n_sockets++] = optarg;
        return 0;
    case OPT_TEXT:
        o->text = optarg;
        return 0;
    case OPT_STEPS:
        return parse_u64(name, optarg, 1, 1000000000, &o->steps);
    case OPT_BATCH:
        return parse_unsigned(name, optarg, 1, 65536, &o->batch);
    case OPT_SEQ:
        return parse_unsigned(name, optarg, 1, 65536, &o->seq);
    case OPT_MICRO_BATCHES:
        return parse_unsigned(name, optarg, 1, 1024, &o->micro_batches);
    case OPT_LR:
        return parse_rate(optarg, &o->rate);
    case OPT_SEED:
        return parse_u64(name, optarg, 0, UINT64_MAX, &o->seed);
    case OPT_HIDDEN:
        return parse_unsigned(name, optarg, MOK_DIM_MULTIPLE, 16384, &o->hidden);
    case OPT_INTERMEDIATE:
        return parse_unsigned(name, optarg, MOK_DIM_MULTIPLE, 65536, &o->intermediate);
    case OPT_EXPERTS:
        return parse_unsigned(name, optarg, 1, MOK_MAX_EXPERTS, &o->experts);
    case OPT_TOPK:
        return parse_unsigned(name, optarg, 1, MOK_MAX_TOPK, &o->topk);
    case OPT_LAYERS:
        return parse_unsigned(name, optarg, 1, 64, &o->layers);
    case OPT_WINDOW:
        return parse_unsigned(name, optarg, 1, 64, &o->window);
    case OPT_PRECISION:
        return parse_precision(optarg, &o->precision);
    case OPT_WGRAD:
        return parse_named("--wgrad", optarg, mok_wgrad_from_name, &o->wgrad);
    case OPT_CHECKPOINT:
        o->checkpoint = optarg;
        return 0;
    case OPT_SAVE_EVERY:
        return parse_u64(name, optarg, 0, 1000000000, &o->save_every);
    case OPT_LOG:
        o->log = optarg;
        return 0;
    case OPT_DUMP:
        o->dump = optarg;
        return 0;
    case OPT_SHARED_EXPERT:
        o->shared_expert = 1;
        return 0;
    case OPT_RECOMPUTE:
        o->recompute = 1;
        return 0;
    case OPT_REPORT:
        o->report = 1;
        return 0;
    case OPT_RESUME:
        o->resume = 1;
        return 0;
    case OPT_CHECK_GRADIENTS:
        o->check_gradients = 1;
        return 0;
    case OPT_QUIET:
        o->quiet = 1;
        return 0;
    default:
        return -MOK_EARG; /* getopt has said why */
    }
}

/* What only several options together can get wrong. */
static bool same_mokd(const struct options *o, unsigned a, unsigned b)
{
    return !o->sockets[a] || strcmp(o->sockets[a], o->sockets[b]) == 0;
}

/* Where the ranks are, each on a device of its own. */
static int place_ranks(struct options *o, int devices)
{
    if (devices >= 0 && (unsigned)devices != o->ranks)
        return fail(-MOK_EARG, "--devices: %d devices for --ranks %u", devices, o->ranks);
    if (o->n_sockets > 1 && o->n_sockets != o->ranks)
        return fail(-MOK_EARG, "--socket: given %u times for --ranks %u; once, or once a rank", o->n_sockets, o->ranks);
    o->any_devices = devices < 0;
    for (unsigned r = 1; o->n_sockets == 1 && r < o->ranks; r++)
        o->sockets[r] = o->sockets[0];
    for (unsigned r = 0; r < o->ranks; r++) {
        unsigned before = 0;
        for (unsigned other = 0; other < r; other++) {
            if (!same_mokd(o, other, r))
                continue;
            before++;
            if (devices >= 0 && o->devices[other] == o->devices[r])
                return fail(-MOK_EARG, "--devices: device %u twice at one mokd; each rank needs one of its own",
                            o->devices[r]);
        }
        if (devices < 0)
            o->devices[r] = before;
    }
    return 0;
}

static int check(struct options *o, int devices)
{
    int rc = place_ranks(o, devices);

    if (rc < 0)
        return rc;
    if (o->precision == ANY_MXFP8)
        o->precision = o->engine == MOK_DEVICE_CUDA ? MOK_MXFP8_PER128 : MOK_MXFP8_PER32;
    if (o->hidden % MOK_DIM_MULTIPLE)
        return fail(-MOK_EALIGN, "--hidden %u: not a multiple of %u", o->hidden, MOK_DIM_MULTIPLE);
    if (o->intermediate % MOK_DIM_MULTIPLE)
        return fail(-MOK_EALIGN, "--intermediate %u: not a multiple of %u", o->intermediate, MOK_DIM_MULTIPLE);
    if (o->experts % o->ranks)
        return fail(-MOK_EALIGN, "--experts %u: not a multiple of --ranks %u", o->experts, o->ranks);
    if (o->topk > o->experts)
        return fail(-MOK_ERANGE, "--topk %u: more than --experts %u", o->topk, o->experts);
    if (o->batch % o->micro_batches)
        return fail(-MOK_EALIGN, "--batch %u: not a multiple of --micro-batches %u", o->batch, o->micro_batches);
    if ((uint64_t)o->batch / o->micro_batches * o->seq > MOK_MAX_TOKENS)
        return fail(-MOK_ERANGE, "--batch %u / --micro-batches %u x --seq %u: more than %u tokens", o->batch,
                    o->micro_batches, o->seq, MOK_MAX_TOKENS);
    if (!o->checkpoint && o->resume)
        return fail(-MOK_EARG, "--resume: needs --checkpoint FILE");
    if (!o->checkpoint && o->save_every)
        return fail(-MOK_EARG, "--save-every: needs --checkpoint FILE");
    if (o->engine == MOK_DEVICE_CUDA && o->check_gradients)
        return fail(-MOK_EARG, "--check-gradients: needs --engine host, since it works in the layer's memory");
    if (o->engine != MOK_DEVICE_CUDA && o->report)
        return fail(-MOK_EARG, "--report: needs --engine cuda");
    if (o->check_gradients && o->precision != MOK_BF16)
        return fail(-MOK_EARG, "--check-gradients: needs --precision bf16; differences drown in 8-bit rounding");
    if (o->wgrad == MOK_WGRAD_MXFP8 && o->precision == MOK_BF16)
        return fail(-MOK_EARG, "--wgrad mxfp8: needs --precision mxfp8");
    return 0;
}

int options_parse(int argc, char **argv, struct options *ret)
{
    struct options o = {
        .ranks = 2,
        .job = "train_moe_lm",
        .text = "/usr/share/common-licenses/GPL-3",
        .steps = 80,
        .seed = 1,
        .batch = 16,
        .seq = 64,
        .micro_batches = 2,
        .hidden = 64,
        .intermediate = 128,
        .experts = 8,
        .topk = 2,
        .layers = 2,
        .window = 8,
        .precision = MOK_BF16,
        .engine = MOK_DEVICE_HOST,
        .rate = 0.01f,
    };
    int devices = -1, option, index = 0, rc;

    while ((option = getopt_long(argc, argv, "", long_options, &index)) != -1) {
        if (option == OPT_HELP) {
            fputs(usage, stdout);
            return 1;
        }
        rc = parse_one(option, option == '?' ? "" : long_options[index].name, &o, &devices);
        if (rc < 0)
            return rc;
    }
    if (optind < argc)
        return fail(-MOK_EARG, "%s: unexpected argument; --help lists the options", argv[optind]);
    rc = check(&o, devices);
    if (rc < 0)
        return rc;
    *ret = o;
    return 0;
}
