/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loader of test vectors. Arrays are little endian; so are the machines this runs on.
 */
#include "vectors.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct blob {
    char *data;
    size_t size;
};

const char *vectors_directory(void)
{
    const char *directory = getenv("MOK_VECTORS");
    return directory && *directory ? directory : MOK_TEST_VECTORS;
}

static int read_file(const char *directory, const char *name, const char *suffix, struct blob *ret)
{
    char path[1024];
    struct blob blob = { 0 };

    snprintf(path, sizeof(path), "%s/%s%s", directory, name, suffix);
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "vectors: cannot open %s\n", path);
        return -1;
    }
    for (size_t room = 0;;) {
        if (room - blob.size < 2) {
            room = room ? 2 * room : 65536;
            blob.data = realloc(blob.data, room);
            if (!blob.data)
                abort();
        }
        size_t got = fread(blob.data + blob.size, 1, room - blob.size - 1, file);
        if (!got)
            break;
        blob.size += got;
    }
    fclose(file);
    blob.data[blob.size] = 0;
    *ret = blob;
    return 0;
}

static uint32_t number(const cJSON *object, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNumber(item) && item->valuedouble >= 0 ? (uint32_t)item->valuedouble : 0;
}

static size_t dtype_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        size_t bytes;
    } known[] = { { "bf16", 2 }, { "i32", 4 }, { "f32", 4 }, { "f64", 8 } };

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (!strcmp(dtype, known[i].name))
            return known[i].bytes;
    return 0;
}

/* Copies array `name` of exactly `count` elements of `dtype`; 0: copied, 1: not in the file, -1: malformed. */
static int take_array(const cJSON *arrays, const struct blob *blob, const char *name, const char *dtype, size_t count,
                      void *ret)
{
    const cJSON *array = cJSON_GetObjectItemCaseSensitive(arrays, name);
    if (!array)
        return 1;
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(array, "dtype"), *length;
    size_t elements = 1, bytes = dtype_bytes(dtype) * count;
    cJSON_ArrayForEach(length, cJSON_GetObjectItemCaseSensitive(array, "shape")) elements *=
        (size_t)length->valuedouble;
    size_t offset = number(array, "offset");

    if (!cJSON_IsString(type) || strcmp(type->valuestring, dtype) || elements != count || offset > blob->size ||
        bytes > blob->size - offset) {
        fprintf(stderr, "vectors: array %s is not %zu elements of %s inside the file\n", name, count, dtype);
        return -1;
    }
    if (bytes)
        memcpy(ret, blob->data + offset, bytes);
    return 0;
}

static int take_inputs(const cJSON *arrays, const struct blob *blob, struct problem *p)
{
    size_t rows = problem_rows_elements(p), slots = problem_slots(p);
    size_t experts = problem_expert_elements(p) * p->experts;
    size_t shared = (size_t)p->shared_intermediate * p->hidden;
    const struct {
        const char *name, *dtype;
        size_t count;
        void *to;
    } inputs[] = {
        { "x", "bf16", rows, p->x },
        { "d_out", "bf16", rows, p->d_out },
        { "ids", "i32", slots, p->ids },
        { "topk_weight", "f32", slots, p->topk_weight },
        { "gate", "bf16", experts, p->gate },
        { "up", "bf16", experts, p->up },
        { "down", "bf16", experts, p->down },
        { "shared_gate", "bf16", shared, p->shared_gate },
        { "shared_up", "bf16", shared, p->shared_up },
        { "shared_down", "bf16", shared, p->shared_down },
    };

    for (size_t i = 0; i < sizeof(inputs) / sizeof(inputs[0]); i++) {
        int r =
            inputs[i].to ? take_array(arrays, blob, inputs[i].name, inputs[i].dtype, inputs[i].count, inputs[i].to) : 0;
        if (r) {
            fprintf(stderr, "vectors: input %s is missing or malformed\n", inputs[i].name);
            return -1;
        }
    }
    return 0;
}

static int load_case(const char *directory, const cJSON *entry, struct vector_case *ret)
{
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(entry, "name"), *item;
    const cJSON *arrays = cJSON_GetObjectItemCaseSensitive(entry, "arrays");
    struct problem *p = &ret->problem;
    struct blob blob;

    if (!cJSON_IsString(name) || !cJSON_IsObject(arrays)) {
        fprintf(stderr, "vectors: a case without name or arrays\n");
        return -1;
    }
    snprintf(ret->name, sizeof(ret->name), "%s", name->valuestring);
    p->hidden = number(entry, "H");
    p->intermediate = number(entry, "I");
    p->experts = number(entry, "E");
    p->topk = number(entry, "K");
    p->shared_intermediate = number(entry, "shared_I");
    item = cJSON_GetObjectItemCaseSensitive(entry, "clamp");
    p->clamp = cJSON_IsNumber(item) ? (float)item->valuedouble : 0;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(entry, "ranks"))
    {
        if (p->ranks == PROBLEM_MAX_RANKS)
            return -1;
        p->rank_tokens[p->ranks++] = (uint32_t)item->valuedouble;
        p->tokens += (uint32_t)item->valuedouble;
    }
    if (!p->hidden || !p->intermediate || !p->experts || !p->topk || !p->ranks) {
        fprintf(stderr, "vectors: case %s lacks a dimension\n", ret->name);
        return -1;
    }
    problem_alloc(p);
    result_alloc(p, &ret->want);
    if (read_file(directory, ret->name, ".bin", &blob) < 0)
        return -1;
    int r = take_inputs(arrays, &blob, p);
    for (int a = 0; r >= 0 && a < RESULT_COUNT; a++) {
        r = take_array(arrays, &blob, result_name[a], "f64", ret->want.count[a], ret->want.array[a]);
        if (r == 0)
            ret->has |= 1u << a;
    }
    free(blob.data);
    return r < 0 ? -1 : 0;
}

int vectors_load(const char *directory, struct vector_set *ret)
{
    struct blob text;
    struct vector_set set = { 0 };
    int r = 0;

    if (read_file(directory, "layers", ".json", &text) < 0)
        return -1;
    cJSON *root = cJSON_Parse(text.data);
    free(text.data);
    size_t count = cJSON_IsArray(root) ? (size_t)cJSON_GetArraySize(root) : 0;
    set.cases = calloc(count + 1, sizeof(*set.cases));
    if (!count || !set.cases) {
        fprintf(stderr, "vectors: %s/layers.json is not a list of cases\n", directory);
        r = -1;
    }
    const cJSON *entry;
    cJSON_ArrayForEach(entry, root)
    {
        if (r < 0)
            break;
        r = load_case(directory, entry, &set.cases[set.count++]);
    }
    cJSON_Delete(root);
    if (r < 0) {
        vectors_free(&set);
        return -1;
    }
    *ret = set;
    return 0;
}

void vectors_free(struct vector_set *set)
{
    for (size_t i = 0; i < set->count; i++) {
        problem_free(&set->cases[i].problem);
        result_free(&set->cases[i].want);
    }
    free(set->cases);
    memset(set, 0, sizeof(*set));
}

/* Decodes exactly `bytes` bytes of hex. */
static int take_hex(const cJSON *item, uint8_t *ret, size_t bytes)
{
    if (!cJSON_IsString(item) || strlen(item->valuestring) != 2 * bytes)
        return -1;
    for (size_t i = 0; i < bytes; i++) {
        unsigned value;
        if (sscanf(item->valuestring + 2 * i, "%2x", &value) != 1)
            return -1;
        ret[i] = (uint8_t)value;
    }
    return 0;
}

static int take_rule(const cJSON *rule, uint32_t rows, uint32_t columns, uint32_t group, struct mx_rule *ret)
{
    const cJSON *exponents = cJSON_GetObjectItemCaseSensitive(rule, "scale_exponent");
    const cJSON *codes = cJSON_GetObjectItemCaseSensitive(rule, "e4m3");

    ret->groups = columns / group;
    ret->exponent = calloc((size_t)rows * ret->groups, sizeof(*ret->exponent));
    ret->code = calloc((size_t)rows * columns, 1);
    if (!ret->exponent || !ret->code)
        abort();
    for (uint32_t row = 0; row < rows; row++) {
        const cJSON *list = cJSON_GetArrayItem(exponents, (int)row);
        if (cJSON_GetArraySize(list) != (int)ret->groups ||
            take_hex(cJSON_GetArrayItem(codes, (int)row), ret->code + (size_t)row * columns, columns) < 0)
            return -1;
        for (uint32_t g = 0; g < ret->groups; g++) {
            const cJSON *exponent = cJSON_GetArrayItem(list, (int)g);
            ret->exponent[row * ret->groups + g] =
                cJSON_IsNumber(exponent) ? (int32_t)exponent->valuedouble : MX_NO_SCALE;
        }
    }
    return 0;
}

int mx_vectors_load(const char *directory, struct mx_vectors *ret)
{
    struct blob text;
    struct mx_vectors vectors = { 0 };
    int r = 0;

    if (read_file(directory, "mx", ".json", &text) < 0)
        return -1;
    cJSON *root = cJSON_Parse(text.data);
    free(text.data);
    const cJSON *rows = cJSON_GetObjectItemCaseSensitive(root, "bf16");
    const cJSON *rules = cJSON_GetObjectItemCaseSensitive(root, "rules");
    vectors.columns = number(root, "columns");
    vectors.rows = (uint32_t)cJSON_GetArraySize(rows);
    if (!vectors.columns || vectors.columns % 128 || !vectors.rows)
        r = -1;
    vectors.bf16 = calloc((size_t)vectors.rows * vectors.columns + 1, sizeof(uint16_t));
    if (!vectors.bf16)
        abort();
    for (uint32_t row = 0; r == 0 && row < vectors.rows; row++)
        r = take_hex(cJSON_GetArrayItem(rows, (int)row), (uint8_t *)(vectors.bf16 + (size_t)row * vectors.columns),
                     2 * (size_t)vectors.columns);
    if (r == 0)
        r = take_rule(cJSON_GetObjectItemCaseSensitive(rules, "per32"), vectors.rows, vectors.columns, 32,
                      &vectors.per32);
    if (r == 0)
        r = take_rule(cJSON_GetObjectItemCaseSensitive(rules, "per128"), vectors.rows, vectors.columns, 128,
                      &vectors.per128);
    cJSON_Delete(root);
    if (r < 0) {
        fprintf(stderr, "vectors: %s/mx.json is malformed\n", directory);
        mx_vectors_free(&vectors);
        return -1;
    }
    *ret = vectors;
    return 0;
}

void mx_vectors_free(struct mx_vectors *vectors)
{
    free(vectors->bf16);
    free(vectors->per32.exponent);
    free(vectors->per32.code);
    free(vectors->per128.exponent);
    free(vectors->per128.code);
    memset(vectors, 0, sizeof(*vectors));
}
