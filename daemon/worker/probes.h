/* SPDX-License-Identifier: Apache-2.0 */
/*
 * USDT probes of provider "mok", for bpftrace and SystemTap; a no-operation each while nobody looks, nothing at all in
 * a build without sys/sdt.h. Arguments are integers, never pointers. All are of the dispatcher thread:
 *
 *   mok:op_submit  queue, layer, opcode, user_data   a submission was accepted
 *   mok:op_start   queue, layer, opcode, user_data   the engine starts on its first phase
 *   mok:op_finish  queue, layer, result, user_data   its completion goes out
 */
#ifndef MOK_WORKER_PROBES_H
#define MOK_WORKER_PROBES_H

#if defined(MOK_HAVE_SDT)
#include <sys/sdt.h>
#define MOK_PROBE4(name, a, b, c, d) DTRACE_PROBE4(mok, name, a, b, c, d)
#else
#define MOK_PROBE4(name, a, b, c, d) ((void)0)
#endif

#endif
