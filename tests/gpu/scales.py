# SPDX-License-Identifier: Apache-2.0
"""What MXFP8's rules of scales cost: a forward, a backward and both of BF16 and of each, EP 1, in turn in one process.
`wgrad`: with MXFP8 weight gradients. RULES: names of those that are wanted, with commas (all).
usage: scales.py lib.so SHAPE,SHAPE..; prints JSON lines, which tables.py reads; those without `ms` say how far results are from
BF16's and where the time goes (KERNELS set: by the profiler). ROUNDS: of each, in turn (6)."""
import json, os, statistics, sys
import torch
import mokgpu
from mokgpu import SHAPES
from timing import graph, kernels, origin, row, shot

BF, T = torch.bfloat16, 2048
ROUNDS = int(os.environ.get("ROUNDS", "6"))
# what, precision as records say it, enum mok_precision, how weights are quantised, the layer's options
RULES = [("bf16", "bf16", 1, None, {}), ("per128", "mxfp8-per128", 3, {}, {}), ("per128 tiles", "mxfp8-per128", 3, dict(tiles=True), {}),
         ("per32", "mxfp8-per32", 2, dict(group=32), {}), ("per32 tiles", "mxfp8-per32", 2, dict(tiles=True), {}),
         ("per128 tiles wgrad", "mxfp8-per128", 3, dict(tiles=True), dict(mxfp8_wgrad=True)),
         ("per32 wgrad", "mxfp8-per32", 2, dict(group=32), dict(mxfp8_wgrad=True))]
RULES = [r for r in RULES if r[0] == "bf16" or r[0] in os.environ.get("RULES", r[0]).split(",")]
command = " ".join(["scales.py"] + [os.path.basename(a) for a in sys.argv[1:]])
lib = mokgpu.load(sys.argv[1])


class Layer:
    """One rule's layer, what it writes, and its operations as graphs."""

    def __init__(self, shape, x, ids, weight, d_out, params, number, weights, options):
        H, I, E, K = shape
        if weights is None:
            params = [*params, None, None, None]
        else:
            codes, scales = zip(*[mokgpu.quantise(p, **weights) for p in params])
            params = [*codes, None, None, None, *scales]
        self.group = mokgpu.Group(lib, H, I, E, K, 1, T, context_mode=1, precision=number, **options)
        self.out, self.d_x, self.d_weight = torch.empty_like(x), torch.empty_like(x), torch.empty(T, K, device="cuda")
        self.gradients = [torch.empty(*p.shape, device="cuda") for p in params[:3]]
        self.group.set([x], [ids], [weight], [params], [self.out])
        self.group.set_backward([d_out], [self.gradients + [None] * 3], [self.d_x], [self.d_weight], 2)
        forward, backward = graph(self.group.forward), graph(self.group.backward)
        self.run = {"forward": forward.replay, "backward": backward.replay, "forward+backward": lambda: (forward.replay(), backward.replay())}

    def results(self):
        return [self.out, self.d_x, self.d_weight, *self.gradients]


for name in sys.argv[2].split(","):
    shape = H, I, E, K = SHAPES[name]
    torch.manual_seed(100)
    x, d_out = (torch.randn(T, H, device="cuda", dtype=BF) for _ in range(2))
    value, ids = torch.topk(torch.randn(T, E, device="cuda"), K)
    params = [torch.randn(E, *s, device="cuda", dtype=BF) * .02 for s in ((I, H), (I, H), (H, I))]
    layers = {what: Layer(shape, x, ids.int(), torch.softmax(value, -1), d_out, params, number, weights, options) for what, _, number, weights, options in RULES}
    for what, layer in layers.items():
        errors = [float("%.2e" % mokgpu.rel(a, b)) for a, b in zip(layer.results(), layers["bf16"].results())]
        both = lambda: (layer.group.forward(), layer.group.backward())
        print(json.dumps(dict(shape=name, what=what, from_bf16=errors, kernels_us=kernels(both) if os.environ.get("KERNELS") else None)), flush=True)
    for op in ("forward", "backward", "forward+backward"):
        ms, warm = {what: [] for what in layers}, {what: [] for what in layers}
        for r in range(ROUNDS + 1):
            for what, layer in layers.items():
                ms[what].append(shot(layer.run[op]))
        for r in range(2):
            for what, layer in layers.items():
                warm[what].append(row(layer.run[op], 4))
        ms, warm = ({what: statistics.median(v) for what, v in all.items()} for all in (ms, warm))
        for what, precision, *_ in RULES:
            print(json.dumps(dict(origin(), command=command, op=op, precision=precision, ep=1, tokens=T, routing="uniform",
                                  gflop=6e-9 * T * K * H * I * {"forward": 1, "backward": 2, "forward+backward": 3}[op], shape=name, what=what,
                                  ms=round(ms[what], 4), b2b_ms=round(warm[what], 4), times_as_fast=round(ms["bf16"] / ms[what], 3),
                                  b2b_times_as_fast=round(warm["bf16"] / warm[what], 3))), flush=True)
    for layer in layers.values():
        layer.run.clear()
        layer.group.close()
    del layers, layer, params
    torch.cuda.empty_cache()
