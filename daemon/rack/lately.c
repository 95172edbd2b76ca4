/* SPDX-License-Identifier: Apache-2.0 */
#include "lately.h"

void rack_lately_add(struct rack_lately *lately, uint64_t count, uint64_t now_ns)
{
    uint64_t number = now_ns / RACK_LATELY_SLICE_NS;
    uint64_t place = number % RACK_LATELY_SLICES;

    if (lately->slice[place].number != number)
        lately->slice[place].count = 0;
    lately->slice[place].number = number;
    lately->slice[place].count += count;
}

uint64_t rack_lately_count(const struct rack_lately *lately, uint64_t now_ns)
{
    uint64_t number = now_ns / RACK_LATELY_SLICE_NS, count = 0;

    for (unsigned i = 0; i < RACK_LATELY_SLICES; i++)
        if (lately->slice[i].number + RACK_LATELY_SLICES > number)
            count += lately->slice[i].count;
    return count;
}
