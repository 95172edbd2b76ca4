#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""mokctl top on a terminal that is played here: it fits, follows the terminal's size, and leaves it as it was.

usage: top_screen.py MOKCTL SOCKET MOKD_PID; a job of two ranks is running. Ends mokd.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time

PATIENCE = 30
MOKCTL, SOCKET, MOKD = sys.argv[1], sys.argv[2], int(sys.argv[3])
USUAL = termios.ICANON | termios.ECHO | termios.ISIG
CODE = re.compile(rb"\x1b\[\??([0-9;]*)([a-zA-Z])")


class Terminal:
    """A terminal of a few lines, and mokctl top on it."""

    def __init__(self, rows, columns):
        self.seen, self.painted = b"", 0
        self.fd, self.other = pty.openpty()  # the other side stays open, so that the terminal outlives top
        self.resize(rows, columns)
        self.pid = os.fork()
        if self.pid == 0:
            os.login_tty(self.other)
            os.execv(MOKCTL, [MOKCTL, "--socket", SOCKET, "top", "--interval", "1"])

    def read(self):
        """Takes what comes until nothing comes for a moment."""
        while select.select([self.fd], [], [], 0.05)[0]:
            self.seen += os.read(self.fd, 65536)

    def has_ended(self):
        pid, self.status = os.waitpid(self.pid, os.WNOHANG)
        return pid == self.pid

    def resize(self, rows, columns):
        self.rows, self.columns = rows, columns
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def frames(self):
        """What was painted since the last call, each as its lines."""
        frames = self.seen.split(b"\x1b[H")[1:]
        new = [CODE.sub(b"", frame).decode().replace("\r\n", "\n").split("\n") for frame in frames[self.painted:]]
        self.painted = len(frames)
        return new

    def await_frame(self, what, good):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self.read()
            for frame in self.frames():
                if good(frame):
                    return frame
            assert not self.has_ended(), f"{what}: mokctl ended: {self.seen[-500:]!r}"
        raise AssertionError(f"{what}: not seen in {self.seen[-2000:]!r}")

    def fits(self, frame):
        assert len(frame) <= self.rows, f"{len(frame)} lines on {self.rows}: {frame}"
        assert all(len(line) <= self.columns for line in frame), f"wider than {self.columns}: {frame}"

    def modes(self):
        return termios.tcgetattr(self.fd)[3]


def number(frame, row, column):
    """The cell of a device's row under a head, as a number."""
    head = next(line for line in frame if line.startswith("DEVICE"))
    line = next(line for line in frame if line.startswith(row))
    return float(line[head.index(column):].split()[0].rstrip("%"))


def shows_work(frame):
    return any(line.startswith("host1") for line in frame) and number(frame, "host1", "OPS/S") > 0


def begin(rows, columns, good):
    """A terminal with top on it, and the first look that is so."""
    terminal = Terminal(rows, columns)
    frame = terminal.await_frame("a look", good)
    terminal.fits(frame)
    assert not terminal.modes() & (termios.ICANON | termios.ECHO), "keys are not told one by one"
    return terminal, frame


def finish(terminal, code, last=b""):
    """It ends so, and the terminal has its own screen, its cursor, and its ways again."""
    end = time.monotonic() + PATIENCE
    while not terminal.has_ended():
        terminal.read()
        assert time.monotonic() < end, "does not end"
    status = terminal.status
    assert terminal.modes() & USUAL == USUAL, f"its modes are {terminal.modes():#x}"
    terminal.read()
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == code, f"ended with {status:#x}: {terminal.seen[-300:]!r}"
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h"), (b"\x1b[?7l", b"\x1b[?7h")):
        assert terminal.seen.count(on) == terminal.seen.count(off) >= 1, f"{on!r} without {off!r}"
    after = terminal.seen[terminal.seen.rindex(b"\x1b[?1049l") + 8:]
    assert last in after and (last or after == b""), f"after its end: {after!r}"
    os.close(terminal.other)
    os.close(terminal.fd)


def two_looks_differ_and_fit_and_q_ends():
    terminal, first = begin(30, 120, shows_work)
    assert any(line.startswith("SESSION") for line in first), f"no session: {first}"
    second = terminal.await_frame("another look", lambda frame: shows_work(frame) and frame != first)
    terminal.fits(second)

    terminal.resize(6, 40)
    small = terminal.await_frame("the smaller size", lambda frame: len(frame) <= 6)
    terminal.fits(small)
    assert any(line.startswith("host0") for line in small) and max(map(len, small)) == 40, f"not used: {small}"
    terminal.resize(24, 100)
    terminal.fits(terminal.await_frame("the larger size",
                                       lambda frame: any(line.startswith("SESSION") for line in frame)))

    os.write(terminal.fd, b"xyq")
    finish(terminal, 0)


def stopped_and_going_on_it_ends_by_ctrl_c():
    terminal, _ = begin(24, 80, any)
    os.write(terminal.fd, b"\x1a")
    pid, status = os.waitpid(terminal.pid, os.WUNTRACED)
    assert pid == terminal.pid and os.WIFSTOPPED(status), f"not stopped: {status:#x}"
    assert terminal.modes() & USUAL == USUAL, "stopped, it keeps the terminal"
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.frames()
    terminal.await_frame("going on", shows_work)
    assert not terminal.modes() & (termios.ICANON | termios.ECHO), "going on, it has no keys"
    os.write(terminal.fd, b"\x03")
    finish(terminal, 0)


def when_mokd_goes_the_reason_stands_on_the_terminals_own_screen():
    terminal, _ = begin(24, 80, any)
    os.kill(MOKD, signal.SIGTERM)
    finish(terminal, 3, b"mokctl: ")


two_looks_differ_and_fit_and_q_ends()
stopped_and_going_on_it_ends_by_ctrl_c()
when_mokd_goes_the_reason_stands_on_the_terminals_own_screen()
print("OK")
