/* SPDX-License-Identifier: Apache-2.0 */
/* What the schedule of one rank costs at a given size, and how evenly the ranks visit each other; by the real code. */
#ifndef MOK_SIM_COST_H
#define MOK_SIM_COST_H

#include <stdint.h>

struct schedule_cost {
    uint64_t slots;       /* looked at: of all ranks, twice */
    uint64_t rows;        /* that rank 0 gets */
    uint64_t table_bytes; /* of rank 0 */
    double ms;            /* of one thread of this machine, median of some */
};

/* 0, or -1 where there is no memory. */
int schedule_cost(uint32_t ranks, uint32_t experts_per_rank, uint32_t tokens, uint32_t topk, uint64_t seed,
                  struct schedule_cost *ret);

struct visits {
    uint32_t most_at_once; /* ranks that visit the same one in the same step; 1 is even */
    uint32_t least, most;  /* visits that a rank gets in all */
};
struct visits count_visits(uint32_t ranks);

#endif
