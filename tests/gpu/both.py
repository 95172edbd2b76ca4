# SPDX-License-Identifier: Apache-2.0
"""An MXFP8 backward, and a forward with one, beside BF16, EP 1, in turn in one process: weights in tiles that the engine turns, the
same that are given transposed, too, and these with MXFP8 weight gradients. FP32 gradients are overwritten.
usage: both.py SHAPE,SHAPE.. NAME=lib.so [NAME=lib.so..]; prints JSON lines, which tables.py reads; those without `ms` say whether
bits are those of the first way with such weight gradients, how far d_x is from BF16's, and where a backward's time goes.
ROUNDS: of each, in turn (5)."""
import json, os, statistics, sys
import torch
import mokgpu
from mokgpu import Group, SHAPES, quantise, rel
from timing import graph, kernels, origin, row, shot

BF, T = torch.bfloat16, 2048
ROUNDS = int(os.environ.get("ROUNDS", "5"))
# what is added to a library's name, and the layer's options
WAYS = [(" tiles", {}), (" given", dict(transposed=True)), (" given w8", dict(transposed=True, mxfp8_wgrad=True))]
libs = dict(a.split("=") for a in sys.argv[2:])
torch.set_grad_enabled(False)


class Way:
    """A layer, what it writes, and its operations."""

    def __init__(self, shape, x, ids, weight, d_out, params, lib, precision, options):
        H, I, E, K = shape
        self.group = Group(mokgpu.load(lib), H, I, E, K, 1, T, context_mode=1, precision=precision, **options)
        self.out, self.d_x, self.d_weight = torch.empty_like(x), torch.empty_like(x), torch.empty(T, K, device="cuda")
        self.gradients = [torch.zeros(E, *s, device="cuda") for s in ((I, H), (I, H), (H, I))]
        self.group.set([x], [ids], [weight], [params], [self.out])
        self.group.set_backward([d_out], [self.gradients + [None] * 3], [self.d_x], [self.d_weight], 2)
        self.both()
        torch.cuda.synchronize()
        assert self.group.outcome(0)[0] == 0

    def both(self):
        self.group.forward()
        self.group.backward()

    def bits(self):
        sums = [g.view(torch.int32).sum(dtype=torch.int64) for g in self.gradients]
        return [self.d_x.clone(), self.d_weight.clone(), torch.stack(sums)]


def ways_of(shape):
    """BF16, and each way of each library, by name."""
    H, I, E, K = shape
    x, d_out = torch.randn(T, H, device="cuda", dtype=BF), torch.randn(T, H, device="cuda", dtype=BF)
    value, ids = torch.topk(torch.randn(T, E, device="cuda"), K)
    inputs = (shape, x, ids.int().contiguous(), torch.softmax(value, 1).contiguous(), d_out)
    params = [torch.randn(E, *s, device="cuda", dtype=BF) * .02 for s in ((I, H), (I, H), (H, I))]
    codes, scales = zip(*[quantise(p, True) for p in params])
    turned = [c.view(torch.uint8).transpose(1, 2).contiguous() for c in codes]
    ways = {"bf16": Way(*inputs, [*params, None, None, None], next(iter(libs.values())), 1, {})}
    for name, lib in libs.items():
        for what, options in WAYS:
            ways[name + what] = Way(*inputs, [*codes, None, None, None, *scales, *turned], lib, 3, options)
    return ways


def describe(shape, ways):
    first, d_x = {}, ways["bf16"].d_x
    for name, way in ways.items():
        bits = way.bits()
        same = first.setdefault("bf16" if name == "bf16" else name.endswith("w8"), bits)
        print(json.dumps(dict(shape=shape, lib=name, same_bits=all(map(torch.equal, bits, same)), d_x_vs_bf16=float("%.2e" % rel(way.d_x, d_x)),
                              private_MiB=way.group.private_bytes >> 20, kernels_us=kernels(way.group.backward))), flush=True)


da, db = (torch.randn(8192, 8192, device="cuda", dtype=BF) for _ in range(2))
dense = graph(lambda: da @ db)
for _ in range(40):  # warm card
    dense.replay()
for shape in sys.argv[1].split(","):
    torch.manual_seed(100)
    ways = ways_of(SHAPES[shape])
    describe(shape, ways)
    run = {"dense": dense}
    for name, way in ways.items():
        run[name], run[name + " both"] = graph(way.group.backward), graph(way.both)
    paused, in_row = {q: [] for q in run}, {q: [] for q in run}
    for r in range(ROUNDS + 1):
        for q, g in run.items():
            paused[q] += [shot(g.replay)][r == 0:]
    for r in range(2):
        for q, g in run.items():
            in_row[q].append(row(g.replay))
    H, I, E, K = SHAPES[shape]
    ms, b2b = ({q: statistics.median(t) for q, t in times.items()} for times in (paused, in_row))
    for q in run:
        both = q.endswith(" both")
        flop, of = (2 * 8192**3, "dense") if q == "dense" else (T * K * H * I * (18 if both else 12), "bf16 both" if both else "bf16")
        print(json.dumps(dict(origin(), command="both.py", shape=shape, what=q, op="product" if q == "dense" else "forward+backward" if both else "backward", ep=1, tokens=T, routing="uniform",
                              ms=round(ms[q], 4), min_ms=round(min(paused[q]), 4), b2b_ms=round(b2b[q], 4), times_as_fast=round(ms[of] / ms[q], 3), b2b_times_as_fast=round(b2b[of] / b2b[q], 3),
                              tflops=round(flop / ms[q] * 1e-9, 1))), flush=True)
    for way in ways.values():
        way.group.close()
    del ways, way, run
    torch.cuda.empty_cache()
