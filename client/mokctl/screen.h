/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A terminal that shows one text after another until its user has seen enough. It is given back as it was, however that
 * ends: by a key, by a signal, or stopped for a while. Never writes more than fits.
 */
#ifndef MOKCTL_SCREEN_H
#define MOKCTL_SCREEN_H

#include <stdbool.h>

enum screen_event {
    SCREEN_TIME, /* so much of it has gone */
    SCREEN_SIZE, /* the terminal has another size, or was away */
    SCREEN_QUIT, /* q, or a signal that ends */
};

/* Takes standard output's terminal. There is one. */
void screen_open(void);
void screen_close(void);
/* The text from its begin, cut to what fits. */
void screen_show(const char *text);
/* Waits for the first of these; time counts from the last call that returned SCREEN_TIME. */
enum screen_event screen_wait(unsigned seconds);

#endif
