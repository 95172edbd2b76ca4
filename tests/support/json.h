/* SPDX-License-Identifier: Apache-2.0 */
/* Looking into JSON that programs under test write. */
#ifndef MOK_TESTS_JSON_H
#define MOK_TESTS_JSON_H

#include <string.h>

#include <cjson/cJSON.h>

/* The first object of the array whose text `name` is `value`; NULL: there is none. */
static inline const cJSON *json_find(const cJSON *array, const char *name, const char *value)
{
    const cJSON *entry;

    cJSON_ArrayForEach(entry, array)
    {
        const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(entry, name));
        if (text && strcmp(text, value) == 0)
            return entry;
    }
    return NULL;
}

#endif
