/* SPDX-License-Identifier: Apache-2.0 */
#include "redact.h"

#include <ctype.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* The shortest of what is taken for a key: those of CURVE have 40 characters, hashes 32 and more. */
#define LONG_WORD 32

struct output {
    char *text;
    size_t length;
};

static void put(struct output *out, const char *from, size_t length)
{
    memcpy(out->text + out->length, from, length);
    out->length += length;
    out->text[out->length] = '\0';
}

static const char *const names[] = { "key", "token", "secret", "passw", "credential", "cookie", "authorization" };

/* Whether the name that ends at `end`, on this line, is one of a secret. */
static bool names_a_secret(const char *line, const char *end)
{
    const char *begin = end;
    char name[64];

    while (begin > line && (isalnum((unsigned char)begin[-1]) || strchr("_-.", begin[-1])))
        begin--;
    size_t length = (size_t)(end - begin) < sizeof(name) - 1 ? (size_t)(end - begin) : sizeof(name) - 1;
    for (size_t i = 0; i < length; i++)
        name[i] = (char)tolower((unsigned char)end[(ptrdiff_t)i - (ptrdiff_t)length]);
    name[length] = '\0';
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strstr(name, names[i]) && !strstr(name, "tokens")) /* those of a layer are no secret */
            return true;
    return false;
}

/* If a secret's name and = or : end at `at`: where its value begins, else NULL. */
static const char *value_behind(const char *line, const char *at)
{
    const char *end = at;

    if (*at != '=' && *at != ':')
        return NULL;
    while (end > line && strchr(" \t\"'", end[-1]))
        end--;
    if (end == line || !names_a_secret(line, end))
        return NULL;
    return at + 1 + strspn(at + 1, " \t");
}

static bool is_border(char c)
{
    return c == '\0' || isspace((unsigned char)c) || strchr("\"'`,;|", c) != NULL;
}

static bool is_path(const char *word, size_t length)
{
    size_t slashes = 0;

    for (size_t i = 0; i < length; i++) {
        if (!isalnum((unsigned char)word[i]) && !strchr("/_.-", word[i]))
            return false;
        slashes += word[i] == '/';
    }
    return word[0] == '/' && slashes >= 2;
}

static bool looks_secret(const char *word, size_t length)
{
    bool digit = false, letter = false;

    for (size_t i = 0; i < length; i++) {
        digit |= isdigit((unsigned char)word[i]) != 0;
        letter |= isalpha((unsigned char)word[i]) != 0;
    }
    return length >= LONG_WORD && digit && letter && !is_path(word, length);
}

/* Up to the end of the line, or in quotes up to these. */
static size_t value_length(const char *value, bool whole_line)
{
    if (*value == '"' || *value == '\'') {
        const char *end = strchr(value + 1, *value);
        if (end)
            return (size_t)(end - value) + 1;
    }
    return whole_line ? strcspn(value, "\n") : strcspn(value, " \t\n,;\"'");
}

static void put_line(struct output *out, const char *line, size_t length)
{
    const char *end = line + length, *at = line;
    bool first = true; /* of the words: a value of the configuration may have spaces */

    while (at < end) {
        const char *value = value_behind(line, at);
        size_t word = 0;
        if (value && value < end) {
            put(out, at, (size_t)(value - at));
            put(out, REDACTED, sizeof(REDACTED) - 1);
            at = value + value_length(value, first);
            at = at < end ? at : end;
            first = false;
            continue;
        }
        if (*at == '=' || *at == ':')
            first = false;
        if (at == line || is_border(at[-1])) {
            while (at + word < end && !is_border(at[word]))
                word++;
        }
        if (looks_secret(at, word)) {
            put(out, REDACTED, sizeof(REDACTED) - 1);
            at += word;
            continue;
        }
        put(out, at++, 1);
    }
}

char *redact(const char *text)
{
    /* A value of one character becomes longer: at most each one with its name and sign. */
    struct output out = { .text = malloc(strlen(text) * sizeof(REDACTED) + sizeof(REDACTED) + 1) };
    bool inside = false; /* a block of PEM */

    if (!out.text)
        return NULL;
    out.text[0] = '\0';
    while (*text) {
        size_t length = strcspn(text, "\n");
        bool begins = memmem(text, length, "-----BEGIN", 10) != NULL,
             ends = memmem(text, length, "-----END", 8) != NULL;
        if (begins || inside)
            put(&out, begins ? REDACTED : "", begins ? sizeof(REDACTED) - 1 : 0);
        else
            put_line(&out, text, length);
        inside = (inside || begins) && !ends;
        text += length;
        if (*text == '\n') {
            if (!inside)
                put(&out, text, 1);
            text++;
        }
    }
    return out.text;
}
