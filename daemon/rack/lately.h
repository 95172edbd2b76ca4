/* SPDX-License-Identifier: Apache-2.0 */
/* How often something has happened in the last five minutes. Time is an argument; nothing else is looked at. */
#ifndef MOK_RACK_LATELY_H
#define MOK_RACK_LATELY_H

#include <stdint.h>

#define RACK_LATELY_SLICES 20u
#define RACK_LATELY_SLICE_NS UINT64_C(15000000000)

/* All zeros: never. */
struct rack_lately {
    struct {
        uint64_t number, count; /* number: of slices since the clock's zero */
    } slice[RACK_LATELY_SLICES];
};

void rack_lately_add(struct rack_lately *lately, uint64_t count, uint64_t now_ns);
uint64_t rack_lately_count(const struct rack_lately *lately, uint64_t now_ns);

#endif
