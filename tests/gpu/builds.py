# SPDX-License-Identifier: Apache-2.0
"""MXFP8 forwards of one or more builds and the first build's BF16 forward, EP 1, weights in tiles of 128 x 128, in turn without a
pause in one process, then eight of each in a row. usage: builds.py SHAPE,SHAPE.. NAME=lib.so [NAME=lib.so..]; prints JSON lines,
which tables.py reads; those without `ms` say whether bits are those of the first build. ROUNDS: of each, in turn (60)."""
import json, os, statistics, sys
import torch
import mokgpu
from mokgpu import Group, SHAPES, quantise
from timing import graph, origin, row, shot

BF, T = torch.bfloat16, 2048
ROUNDS = int(os.environ.get("ROUNDS", "60"))
command = " ".join(["builds.py"] + [os.path.basename(a) for a in sys.argv[1:]])
libs = {name: mokgpu.load(path) for name, path in (a.split("=") for a in sys.argv[2:])}
torch.set_grad_enabled(False)


class Forward:
    def __init__(self, lib, shape, inputs, params, precision):
        H, I, E, K = shape
        self.group, self.out = Group(lib, H, I, E, K, 1, T, precision=precision), torch.empty(T, H, device="cuda", dtype=BF)
        self.group.set(*([i] for i in inputs), [params], [self.out])
        self.group.forward()
        torch.cuda.synchronize()
        assert self.group.outcome(0)[0] == 0
        self.bits, self.graph = self.out.clone(), graph(self.group.forward)


def forwards_of(shape):
    H, I, E, K = shape
    value, ids = torch.topk(torch.randn(T, E, device="cuda"), K)
    inputs = torch.randn(T, H, device="cuda", dtype=BF), ids.int().contiguous(), torch.softmax(value, 1).contiguous()
    params = [torch.randn(E, *s, device="cuda", dtype=BF) * .02 for s in ((I, H), (I, H), (H, I))]
    codes, scales = zip(*[quantise(p, True) for p in params])
    found = {"bf16": Forward(next(iter(libs.values())), shape, inputs, [*params, None, None, None], 1)}
    return {**found, **{name: Forward(lib, shape, inputs, [*codes, None, None, None, *scales], 3) for name, lib in libs.items()}}


for name in sys.argv[1].split(","):
    torch.manual_seed(100)
    forwards = forwards_of(SHAPES[name])
    for what in list(libs)[1:]:
        print(json.dumps(dict(shape=name, what=what, same_bits=torch.equal(forwards[what].bits, forwards[next(iter(libs))].bits))), flush=True)
    turns, rows = {what: [] for what in forwards}, {what: [] for what in forwards}
    for r in range(ROUNDS + 12):  # the first ones warm the card
        for what, f in forwards.items():
            turns[what] += [shot(f.graph.replay)][r < 12:]
    for _ in range(3):
        for what, f in forwards.items():
            rows[what].append(row(f.graph.replay))
    ms, b2b = ({what: statistics.median(t) for what, t in times.items()} for times in (turns, rows))
    for what in libs:
        print(json.dumps(dict(origin(), command=command, op="forward", precision="mxfp8-per128", weights="128 x 128", ep=1, tokens=T, shape=name, what=what, ms=round(ms[what], 3),
                              bf16_ms=round(ms["bf16"], 3), times_as_fast=round(ms["bf16"] / ms[what], 3), b2b_times_as_fast=round(b2b["bf16"] / b2b[what], 3))), flush=True)
    for f in forwards.values():
        f.group.close()
    del forwards, f
    torch.cuda.empty_cache()
