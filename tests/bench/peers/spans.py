# SPDX-License-Identifier: Apache-2.0
"""Where an operation's time goes: medians of what `mokctl trace` wrote while one operation came again and again, and the run that
it is taken of. Times are us since the schedule began, which every operation has once."""
import bisect
import collections
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HOW = {"single": 1, "queued": 8}
SECONDS = 6  # that a rank goes on at most, should no trace be taken


def of_trace(path):
    """Device -> (spans in order of their begin, names of threads, how long each operation took)."""
    devices, begun = collections.defaultdict(lambda: ([], {}, [])), {}
    for e in json.loads(pathlib.Path(path).read_text())["traceEvents"]:
        spans, threads, took = devices[e["pid"]]
        if e["ph"] == "M" and e["name"] == "thread_name":
            threads[e["tid"]] = e["args"]["name"]
        elif e["ph"] == "X":
            spans.append((e["ts"], e["ts"] + e["dur"], e["name"], e["tid"]))
        elif e.get("cat") == "operation" and e["ph"] == "b":
            begun[e["pid"], e["id"]] = e["ts"]
        elif e.get("cat") == "operation" and e["ph"] == "e" and (e["pid"], e["id"]) in begun:
            took.append(e["ts"] - begun.pop((e["pid"], e["id"])))
    return {device: (sorted(spans), threads, took) for device, (spans, threads, took) in devices.items()}


def medians(spans, threads):
    """([what, where, from, to] in order of time, from one operation's schedule to the next one's). What comes before the schedule has
    negative times: whatever begins nearer to the next schedule than a third of the way is that one's."""
    begins = [s[0] for s in spans if s[2] == "schedule"]
    if len(begins) < 3:
        return [], None
    period, found = statistics.median(b - a for a, b in zip(begins, begins[1:])), collections.defaultdict(list)
    for begin, end, what, thread in spans:
        at = bisect.bisect_right(begins, begin + (period / 3 if what in ("prepare", "main") else 0)) - 1
        if 0 <= at < len(begins) - 1:
            found[what, threads.get(thread, "")].append((begin - begins[at], end - begins[at]))
    middle = lambda values: round(statistics.median(values), 1)
    rows = [[what, where, middle([a for a, _ in times]), middle([b for _, b in times])] for (what, where), times in found.items() if len(times) >= len(begins) // 2]
    return sorted(rows, key=lambda r: (r[2], r[3])), round(period, 1)


def records(path, about):
    """One for each device of the trace."""
    for device, (spans, threads, took) in sorted(of_trace(path).items()):
        rows, period = medians(spans, threads)
        if rows:
            yield {**about, "rank": device - 1, "operations": len(took), "operation_us": round(statistics.median(took), 1) if took else None, "period_us": period, "spans": rows}


class Run:
    """The two sides' marks in a folder: the rank's that it is at it, the starter's that the trace is taken."""

    def __init__(self, folder=None):
        self.folder = pathlib.Path(folder or tempfile.mkdtemp(prefix="mok-spans-"))

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def there(self, name):
        return (self.folder / name).exists()

    def play(self, m, ranks, how):
        """A rank's side: forwards until the trace is taken; where it lies, None if it could not be taken."""
        import torch
        m.forward()
        torch.cuda.synchronize()
        m.reap()
        until = time.monotonic() + SECONDS
        if ranks.rank == 0:
            (self.folder / f"begun-{how}").touch()
        while ranks.largest([float(not self.there(f"taken-{how}") and time.monotonic() < until)])[0] > 0:
            for _ in range(16 // HOW[how]):
                ranks.align()
                for _ in range(HOW[how]):
                    m.forward()
                torch.cuda.synchronize()
                m.reap()
        return self.folder / f"{how}.json" if self.there(f"{how}.json") else None

    def take(self, socket, how, seconds):
        """The starter's side; nothing where the ranks do not come to it."""
        until = time.monotonic() + seconds
        while not self.there(f"begun-{how}") and time.monotonic() < until:
            time.sleep(0.05)
        build = pathlib.Path(os.environ["MOK_BUILD_DIR"])
        if self.there(f"begun-{how}"):
            subprocess.run([build / "client" / "mokctl", "--socket", socket, "trace", "--seconds", "1", "--out", self.folder / f"{how}.json"], timeout=20,
                           stdout=sys.stderr, env={**os.environ, "LD_LIBRARY_PATH": f"{build}/lib:" + os.environ.get("LD_LIBRARY_PATH", "")})
        (self.folder / f"taken-{how}").touch()
