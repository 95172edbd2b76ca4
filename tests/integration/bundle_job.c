/* SPDX-License-Identifier: Apache-2.0 */
/* A job whose buffers hold a word, over and over; waits to be killed. Usage: bundle-job WORD */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "mok/mok.h"

enum { BYTES = 1 << 20 };

int main(int argc, char **argv)
{
    mok_session_options options = { .size = sizeof(options), .job = "bundle-job" };
    mok_session *session;
    mok_buffer *buffer;

    if (argc != 2 || mok_session_open(&options, &session) < 0 ||
        mok_buffer_alloc_private(session, 0, BYTES, &buffer) < 0) {
        fprintf(stderr, "bundle-job: %s\n", mok_last_error());
        return 1;
    }
    char *memory = mok_buffer_data(buffer);
    size_t length = strlen(argv[1]);
    for (size_t at = 0; at + length <= BYTES; at += length)
        memcpy(memory + at, argv[1], length);
    puts("ready");
    fflush(stdout);
    pause();
    return 0;
}
