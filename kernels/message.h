/* SPDX-License-Identifier: Apache-2.0 */
/* The sentence beside a negative return. Compiles as C and as CUDA C; allocates nothing. */
#ifndef MOK_KERNELS_MESSAGE_H
#define MOK_KERNELS_MESSAGE_H

#ifdef __cplusplus
extern "C" {
#endif

/* Names the argument, its value and its bound. */
struct mok_message {
    char text[240];
};

/* Says it, cut to what there is room for, and returns `code`. `message` NULL: nobody wants to know. */
int mok_fail(struct mok_message *message, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif
#endif
