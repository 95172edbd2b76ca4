/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the emulated GPUs say of themselves; from the environment, so that worker processes agree:
 * MOK_EMULATOR_DEVICES (1), MOK_EMULATOR_SMS (4), MOK_EMULATOR_MPS (0).
 */
#ifndef MOK_EMULATOR_DEVICE_H
#define MOK_EMULATOR_DEVICE_H

#include <stdbool.h>

int emulated_devices(void);
int emulated_sms(void);
bool emulated_mps(void);
void emulated_uuid(int device, char ret[16]);

#endif
