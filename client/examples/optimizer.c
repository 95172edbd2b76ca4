/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AdamW. The bias corrections are computed in double from the step number alone: a resumed run has the same ones.
 */
#include "optimizer.h"

#include <math.h>

struct adamw adamw_default(float rate)
{
    return (
        struct adamw){ .rate = rate, .beta1 = 0.9f, .beta2 = 0.99f, .epsilon = 1e-8f, .decay = 0.01f, .warmup = 10 };
}

struct adamw_scales adamw_scales(const struct adamw *adamw, uint64_t step, int decay)
{
    float rate = step < adamw->warmup ? adamw->rate * (float)step / (float)adamw->warmup : adamw->rate;

    return (struct adamw_scales){
        .rate = rate,
        .first = (float)(1.0 - pow((double)adamw->beta1, (double)step)),
        .second = (float)sqrt(1.0 - pow((double)adamw->beta2, (double)step)),
        .keep = decay ? 1.0f - rate * adamw->decay : 1.0f,
    };
}

void adamw_step(const struct adamw *adamw, uint64_t step, int decay, const struct adamw_tensor *tensor,
                const float *gradient)
{
    struct adamw_scales s = adamw_scales(adamw, step, decay);

    for (size_t i = 0; i < tensor->count; i++) {
        float g = gradient[i];
        float first = adamw->beta1 * tensor->first[i] + (1.0f - adamw->beta1) * g;
        float second = adamw->beta2 * tensor->second[i] + (1.0f - adamw->beta2) * g * g;

        tensor->first[i] = first;
        tensor->second[i] = second;
        tensor->value[i] =
            tensor->value[i] * s.keep - s.rate * (first / s.first) / (sqrtf(second) / s.second + adamw->epsilon);
    }
}
