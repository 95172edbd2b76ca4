/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's shape and options in messages, and as the planner knows them. Checks nothing: the planner does. */
#ifndef MOK_DAEMON_LAYER_SPEC_H
#define MOK_DAEMON_LAYER_SPEC_H

#include "control.pb-c.h"
#include "kernels/layer.h"

/* A message leaves out the group's size and the rank, which its reader knows better. */
struct mok_layer_spec mok_layer_spec_read(const Mok__LayerSpec *message, uint32_t ep, uint32_t rank);
Mok__LayerSpec mok_layer_spec_message(const struct mok_layer_spec *spec);

#endif
