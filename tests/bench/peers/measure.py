# SPDX-License-Identifier: Apache-2.0
"""Candidates in turn on a warm card, ranks together, the slowest rank counts; records of the form that mok-bench prints."""
import datetime
import json
import os
import random
import statistics
import sys

import torch

import timing
from timing import origin, read

DENSE = 8192
OPS = ("forward", "backward", "forward+backward")


class Ranks:
    """What the ranks' processes do together. NCCL where each has a GPU of its own, else Gloo."""

    def __init__(self, ranks, rank, gpus, first_gpu=0):
        self.ranks, self.rank, self.nccl = ranks, rank, gpus >= ranks
        torch.cuda.set_device(first_gpu + rank % gpus)
        if ranks > 1:
            import torch.distributed as dist
            self.dist, timeout = dist, datetime.timedelta(seconds=120)
            if self.nccl:
                dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()), timeout=timeout)
            else:
                dist.init_process_group("gloo", timeout=timeout)
            self.one = torch.ones(1, device="cuda" if self.nccl else "cpu")

    def align(self):
        if self.ranks > 1:
            self.dist.all_reduce(self.one.fill_(1))

    def largest(self, values):
        """Of all ranks, element by element."""
        if self.ranks == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64, device=self.one.device)
        self.dist.all_reduce(t, op=self.dist.ReduceOp.MAX)
        return t.tolist()

    def gathered(self, tensor):
        """All ranks' tensors of one shape."""
        if self.ranks == 1:
            return [tensor]
        mine = tensor.contiguous().to(self.one.device).view(torch.uint8)  # not every type goes through every library
        all_of_them = [torch.empty_like(mine) for _ in range(self.ranks)]
        self.dist.all_gather(all_of_them, mine)
        return [t.view(tensor.dtype).to(tensor.device) for t in all_of_them]

    def close(self):
        if self.ranks > 1:
            torch.cuda.synchronize()
            self.dist.barrier()


class Dense:
    """A product of 8192^3, the yardstick of the loop."""

    def __init__(self):
        a, b = (torch.randn(DENSE, DENSE, device="cuda").bfloat16() for _ in range(2))
        self.graph = timing.graph(lambda: a @ b)
        self.operands = a, b

    def warm(self, times=60):
        for _ in range(times):
            self.graph.replay()
        torch.cuda.synchronize()


def alternate(entries, rounds, ranks, after, seldom=()):
    """Median ms of each entry. Every round runs all of them in another order, since the card remembers what ran before;
    `seldom`: two rounds of three."""
    names, times = list(entries), {n: [] for n in entries}
    for r in range(rounds + 2):
        for name in random.Random(r).sample(names, len(names)):  # the same on all ranks
            if name in seldom and r % 3 == 1:
                continue
            ms = timing.shot(entries[name], ranks.align if ranks.ranks > 1 else None)
            after()
            if r >= 2:
                times[name].append(ms)
    return {n: statistics.median(ranks.largest(t)) if t else None for n, t in times.items()}


def in_rows(entries, ranks, after, times=3, n=8):
    """Median ms of one of `n` calls in a row."""
    found = {name: [] for name in entries}
    for _ in range(times):
        for name, f in entries.items():
            found[name].append(timing.row(f, n, ranks.align if ranks.ranks > 1 else None))
            after()
    return {n: statistics.median(ranks.largest(t)) for n, t in found.items()}


def command():
    return " ".join(["peers/layer.py"] + [os.path.basename(a) for a in sys.argv[1:]])  # no folders of this machine


def emit(record):
    print(json.dumps({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}), flush=True)


def link_bytes(gpu):
    """(sent, received) over all NVLinks of a GPU since it started, None where nvidia-smi does not say."""
    sent = received = 0
    found = False
    for line in read(["nvidia-smi", "nvlink", "-gt", "d", "-i", str(gpu)]).splitlines():
        words = line.replace(":", " ").split()
        if "KiB" in words and words[words.index("KiB") - 1].isdigit():
            value, found = int(words[words.index("KiB") - 1]) * 1024, True
            sent, received = sent + value * ("Tx" in words), received + value * ("Rx" in words)
    return (sent, received) if found else None
