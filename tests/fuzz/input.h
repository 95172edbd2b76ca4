/* SPDX-License-Identifier: Apache-2.0 */
/* A fuzzer's input as bytes that are taken one after the other; zeros once there are none left. */
#ifndef MOK_FUZZ_INPUT_H
#define MOK_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>

struct input {
    const uint8_t *data;
    size_t size;
};

static inline uint8_t take(struct input *in)
{
    if (!in->size)
        return 0;
    in->size--;
    return *in->data++;
}

#endif
