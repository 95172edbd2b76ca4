/* SPDX-License-Identifier: Apache-2.0 */
/* What mok.py mirrors: "STRUCT SIZE MEMBER OFFSET" of each structure and its last member there. */
#include <stddef.h>
#include <stdio.h>

#include "mok/mok.h"

#define SHOW(name, type, member) printf("%s %zu %s %zu\n", name, sizeof(type), #member, offsetof(type, member))

int main(void)
{
    SHOW("View", mok_view, bytes);
    SHOW("Session", mok_session_options, resume_ms);
    SHOW("Device", mok_device_info, memory_used);
    SHOW("Group", mok_group_options, flags);
    SHOW("Layer", mok_layer_options, comm_units);
    SHOW("Memory", mok_layer_memory, context_recompute_bytes);
    SHOW("Params", mok_layer_params, down_scale);
    SHOW("Forward", mok_forward_args, context);
    SHOW("Backward", mok_backward_args, d_topk_weight);
    SHOW("Result", mok_result, device_ns);
    return 0;
}
