/* SPDX-License-Identifier: Apache-2.0 */
#include "screen.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "util.h"

/* The other screen, without a cursor and without going on in the next line; and back. */
#define ENTER "\033[?1049h\033[?25l\033[?7l"
#define LEAVE "\033[?7h\033[?25h\033[?1049l"

static struct termios before;
static bool has_keys; /* standard input is a terminal of ours, and tells each key */
static sigset_t usual;
static uint64_t since_ns;
static volatile sig_atomic_t ended, resized, stopped;

static void on_signal(int number)
{
    switch (number) {
    case SIGWINCH:
        resized = 1;
        return;
    case SIGTSTP:
        stopped = 1;
        return;
    default:
        ended = 1;
    }
}

/* In the background nobody's keys are ours to take. */
static void take(void)
{
    struct termios now;

    has_keys = tcgetpgrp(STDIN_FILENO) == getpgrp() && tcgetattr(STDIN_FILENO, &before) == 0;
    if (has_keys) {
        now = before;
        now.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        now.c_cc[VMIN] = 1;
        now.c_cc[VTIME] = 0;
        has_keys = tcsetattr(STDIN_FILENO, TCSADRAIN, &now) == 0;
    }
    fputs(ENTER, stdout);
    fflush(stdout);
}

static void give_back(void)
{
    fputs(LEAVE, stdout);
    fflush(stdout);
    if (has_keys)
        tcsetattr(STDIN_FILENO, TCSADRAIN, &before);
    has_keys = false;
}

void screen_open(void)
{
    static const int numbers[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH, SIGTSTP };
    struct sigaction action = { .sa_handler = on_signal };
    sigset_t ours;

    sigemptyset(&ours);
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        sigaddset(&ours, numbers[i]);
        sigaction(numbers[i], &action, NULL);
    }
    sigprocmask(SIG_BLOCK, &ours, &usual); /* they come in screen_wait alone */
    since_ns = mok_now_ns();
    setvbuf(stdout, NULL, _IOFBF, BUFSIZ << 4); /* a look comes at once, not line by line */
    take();
}

void screen_close(void)
{
    give_back();
    sigprocmask(SIG_SETMASK, &usual, NULL);
}

/* ------------------------------------------------------------------ showing */

static void size_of(unsigned *ret_rows, unsigned *ret_columns)
{
    struct winsize size;
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;

    *ret_rows = known && size.ws_row > 0 ? size.ws_row : 24;
    *ret_columns = known && size.ws_col > 0 ? size.ws_col : 80;
}

/* Bytes of a line that take so many columns at most: what goes on a character takes none. */
static int fitting(const char *line, size_t length, unsigned columns)
{
    size_t i = 0;

    for (unsigned used = 0; i < length; i++) {
        bool begins = ((unsigned char)line[i] & 0xC0) != 0x80;
        if (begins && used == columns)
            break;
        used += begins;
    }
    return (int)i;
}

void screen_show(const char *text)
{
    unsigned rows, columns, row = 0;

    size_of(&rows, &columns);
    fputs("\033[H", stdout);
    for (const char *end; *text && row < rows; text = end + (*end == '\n'), row++) {
        end = strchrnul(text, '\n');
        printf("%s\033[K%.*s", row ? "\n" : "", fitting(text, (size_t)(end - text), columns), text);
    }
    if (row < rows)
        fputs("\033[J", stdout);
}

/* ------------------------------------------------------------------ waiting */

static bool is_quit(void)
{
    char keys[64];
    ssize_t n = read(STDIN_FILENO, keys, sizeof(keys));

    if (n <= 0) { /* the terminal has gone; or it was stopped meanwhile */
        has_keys = n < 0 && errno == EINTR;
        return false;
    }
    return memchr(keys, 'q', (size_t)n) || memchr(keys, 'Q', (size_t)n);
}

static void be_stopped(void)
{
    stopped = 0;
    give_back();
    raise(SIGSTOP);
    take();
}

enum screen_event screen_wait(unsigned seconds)
{
    const uint64_t due = since_ns + seconds * UINT64_C(1000000000);

    for (;;) {
        uint64_t now = mok_now_ns(), left = due > now ? due - now : 0;
        struct timespec time = { (time_t)(left / 1000000000u), (long)(left % 1000000000u) };
        struct pollfd key = { .fd = has_keys ? STDIN_FILENO : -1, .events = POLLIN };
        int r = ppoll(&key, 1, &time, &usual);
        if (ended || (r > 0 && is_quit()))
            return SCREEN_QUIT;
        if (stopped) {
            be_stopped();
            return SCREEN_SIZE;
        }
        if (resized) {
            resized = 0;
            return SCREEN_SIZE;
        }
        if (r == 0) {
            since_ns = mok_now_ns();
            return SCREEN_TIME;
        }
    }
}
