/* SPDX-License-Identifier: Apache-2.0 */
/* Changes from one stack to another. */
#ifndef MOK_EMULATOR_FIBER_H
#define MOK_EMULATOR_FIBER_H

/* Leaves this stack, noting where in *leave, and goes on where `enter` was noted. */
extern "C" void mok_emulator_switch(void **leave, void *enter);

namespace emu
{

/* A stack on which a first switch calls `entry`, which never returns. */
void *stack_ready(void *stack, void (*entry)());

} // namespace emu
#endif
