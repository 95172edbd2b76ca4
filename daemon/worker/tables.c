/* SPDX-License-Identifier: Apache-2.0 */
/* The index: chains of nodes that live in the objects, so that nothing is allocated to find a thing. */
#include "tables.h"

static size_t bucket_of(uint64_t key)
{
    return (size_t)((key * 0x9e3779b97f4a7c15ull) >> 32) % WORKER_INDEX_BUCKETS;
}

struct worker_node *worker_index_find(const struct worker_index *index, uint64_t key)
{
    struct worker_node *node = index->bucket[bucket_of(key)];
    while (node && node->key != key)
        node = node->next;
    return node;
}

void worker_index_insert(struct worker_index *index, struct worker_node *node, uint64_t key)
{
    struct worker_node **bucket = &index->bucket[bucket_of(key)];
    node->key = key;
    node->next = *bucket;
    *bucket = node;
    index->count++;
}

void worker_index_remove(struct worker_index *index, struct worker_node *node)
{
    for (struct worker_node **link = &index->bucket[bucket_of(node->key)]; *link; link = &(*link)->next) {
        if (*link == node) {
            *link = node->next;
            node->next = NULL;
            index->count--;
            return;
        }
    }
}

struct worker_node *worker_index_next(const struct worker_index *index, const struct worker_node *node)
{
    size_t bucket = 0;
    if (node) {
        if (node->next)
            return node->next;
        bucket = bucket_of(node->key) + 1;
    }
    for (; bucket < WORKER_INDEX_BUCKETS; bucket++)
        if (index->bucket[bucket])
            return index->bucket[bucket];
    return NULL;
}
