# SPDX-License-Identifier: Apache-2.0
"""Timing of GPU work: graphs, one call, calls in a row, kernels, and on what it was measured. Test code only."""
import collections
import datetime
import functools
import os
import re
import subprocess

import torch


def graph(f, before_capture=None):
    """`f` as a CUDA graph; it has run twice on the capturing stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if before_capture:
        before_capture()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=stream, capture_error_mode="thread_local"):
        f()
    torch.cuda.synchronize()
    return g


def shot(f, align=None):
    """Milliseconds of one call on an idle GPU; `align` queues what makes the ranks begin together."""
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if align:
        align()
    a.record()
    f()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b)


def row(f, n=8, align=None):
    """Milliseconds of one of `n` calls in a row."""
    f()
    return shot(lambda: [f() for _ in range(n)], align) / n


def kernels(f, n=5):
    """Each kernel's microseconds, and how often it runs in one `f`, by a name without its template arguments."""
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(n):
            f()
        torch.cuda.synchronize()
    return short_times(((k.key, k.device_time_total, k.count) for k in prof.key_averages()), n)


def short_times(rows, n):
    """{short name: (time of one, how many in one of `n` calls)} of (name, time of all, count); variants of a name are one."""
    total, count = collections.Counter(), collections.Counter()
    for name, us, times in rows:
        if us:
            short = (re.search(r"\w*_kernel\w*|k_\w+", name) or re.match(".{0,30}", name)).group(0)
            total[short] += us
            count[short] += times
    return {name: (round(us / count[name], 1), count[name] // n) for name, us in total.items()}


def read(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@functools.lru_cache(maxsize=1)
def origin():
    """The members of a record that say when and on what, as mok-bench has them."""
    driver = read(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    commit = os.environ.get("MOK_COMMIT") or read(["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "--short=12", "HEAD"])
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
            "driver": f"{driver}, CUDA {torch.version.cuda}, torch {torch.__version__}", "commit": commit or None}
