/* SPDX-License-Identifier: Apache-2.0 */
/* mok-bench layer --engine cuda; only in builds with that engine. */
#ifndef MOK_BENCH_LAYER_CUDA_H
#define MOK_BENCH_LAYER_CUDA_H

/* `argv` is that of `layer`; options it does not know end the program with 2. Exit code. */
int bench_layer_cuda(int argc, char **argv);

#endif
