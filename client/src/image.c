/* SPDX-License-Identifier: Apache-2.0 */
/* See image.h. A file of its own, so that a program may bring another image. */
#include "image.h"

#include <stddef.h>

#ifdef MOK_IMAGE
__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        ".hidden client_image_data\n"
        ".globl client_image_data\n"
        "client_image_data:\n"
        ".incbin \"" MOK_IMAGE "\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const unsigned char client_image_data[];
const struct client_image client_image = { client_image_data };
#else
const struct client_image client_image = { NULL };
#endif
