"""One forward, or one backward, EP1, against the strong unfused baseline and a dense product, interleaved in one process.
usage: bench.py [--op forward|backward] [--precision bf16|mxfp8] BASELINE_DIR shapes NAME=lib.so [NAME=lib.so ...]; prints JSON lines, which tables.py reads.
--precision mxfp8: `NAME mxfp8` and `NAME mxfp8 tiles` (weights in tiles of 128 x 128) beside the BF16 forward or backward; with the
latter `NAME mxfp8 tiles transposed` (weights bound transposed, too), `NAME mxfp8 tiles wgrad` (MXFP8 weight gradients) and `NAME both`, `NAME mxfp8 both`..: a forward and a backward; and how many times as fast as the same of BF16, each for itself and in a row.
Backward: `NAME` overwrites FP32 weight gradients (the baseline writes BF16 ones), `NAME +=` adds to them, `NAME recompute`
makes gate and up again, `NAME ring/4` has a quarter of the rows in its ring, `NAME bf16` overwrites BF16 gradients, `NAME bf16 +=` adds to
them; the baseline's is its own backward alone."""
import json, os, re, statistics as st, subprocess, sys
command = " ".join(["bench.py"] + [os.path.basename(a) for a in sys.argv[1:]])
op = "forward"
precision = "bf16"
while len(sys.argv) > 2 and sys.argv[1] in ("--op", "--precision"):
    if sys.argv[1] == "--op":
        op = sys.argv[2]
    else:
        precision = sys.argv[2]
    del sys.argv[1:3]
sys.path.insert(0, sys.argv[1])
import torch
from common import *
import mokgpu
from mokgpu import Group, quantise
from timing import graph, kernels, origin, row, shot

shapes = sys.argv[2].split(",")
libs = dict(a.split("=") for a in sys.argv[3:])
rounds = int(os.environ.get("ROUNDS", "25"))
torch.set_grad_enabled(False)

da, db = (torch.randn(8192, 8192, device="cuda", dtype=BF) for _ in range(2))
dense = graph(lambda: da @ db)
for _ in range(60):  # warm card
    dense.replay()
torch.cuda.synchronize()
for name in shapes:
    H, I, el, k = SH[name]
    el = el_for(el, k, 1)
    torch.manual_seed(100)
    x = torch.randn(T, H, device="cuda", dtype=BF)
    idx, w = routing(T, el, k)
    w13 = torch.randn(el, 2 * I, H, device="cuda", dtype=BF) * .02
    w2 = torch.randn(el, H, I, device="cuda", dtype=BF) * .02
    gate, up = w13[:, :I].contiguous(), w13[:, I:].contiguous()
    back = op == "backward"
    core = Core(T, k, el, 0, H, I, w13, w2, bwd=True) if back else Core(T, k, el, 0, H, I, w13, w2)
    base = core.fwd(x, idx, w).clone()
    dy = torch.randn(T, H, device="cuda", dtype=BF)
    if back:
        base = core.bwd(dy)[0].clone()
        base_weights = [core.dw13[:, :I].clone(), core.dw13[:, I:].clone(), core.dw2.clone()]  # a captured graph's are of its first replay
    fl = T * k * (12 if back else 6) * H * I
    run = {"baseline": graph(lambda: core.bwd(dy) if back else core.fwd(x, idx, w)), "dense": dense}
    groups, i32 = [], idx.int()

    def add_backward(n, path, flags=2, context_mode=1, ring=0, bf16=False, params=[gate, up, w2, None, None, None], precision=1, both=False, **options):
        """One more backward; how far its d_x is from the baseline's, and its weight gradients too."""
        G = Group(mokgpu.load(path), H, I, el, k, 1, T, minibatch=int(os.environ.get("MINIBATCH", "0")), ring=ring, context_mode=context_mode, bf16_gradients=bf16, precision=precision, **options)
        out, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty(T, k, device="cuda")
        grads = [torch.zeros(el, *s, device="cuda", dtype=BF if bf16 else torch.float32) for s in ((I, H), (I, H), (H, I))]
        G.set([x], [i32], [w], [params], [out])
        G.set_backward([dy], [grads + [None] * 3], [dx], [dw], flags)
        G.forward()
        schedule = []
        for _ in range(7):
            G.backward_phase(0, 1)
            G.backward_phase(0, 2)
            torch.cuda.synchronize()
            oc = G.outcome(0)
            schedule.append(oc[5] / 1000)
            G.backward_phase(0, 3)
            torch.cuda.synchronize()
        errors = [rel(dx, base)]
        if flags == 2:
            errors += [rel(a, b) for a, b in zip(grads, base_weights)]
        print(json.dumps(dict(shape=name, lib=n, relerr=[float("%.2e" % e) for e in errors], rows=oc[1], schedule_us=st.median(schedule),
                              kernels_us=kernels(G.backward))), flush=True)
        run[n] = graph(G.backward)
        if both:
            run[n + " both"] = graph(lambda: (G.forward(), G.backward()))
        groups.append((G, (out, dx, dw, grads)))

    def add(n, path, ids, params=[gate, up, w2, None, None, None], **options):
        """One more entry of the loop; says how right it is, and where its time goes."""
        G = Group(mokgpu.load(path), H, I, el, k, 1, T, minibatch=int(os.environ.get("MINIBATCH", "0")), **options)
        out = torch.full((T, H), float("nan"), device="cuda", dtype=BF)
        G.set([x], [ids], [w], [params], [out])
        G.forward()
        schedule = []
        for _ in range(7):
            G.phase(0, 1)
            G.phase(0, 2)
            torch.cuda.synchronize()
            oc = G.outcome(0)
            schedule.append(oc[5] / 1000)
            G.phase(0, 3)
        torch.cuda.synchronize()
        print(json.dumps(dict(shape=name, lib=n, relerr=float("%.2e" % rel(out, base)) if ids is i32 else None, rows=oc[1], schedule_us=st.median(schedule),
                              kernels_us=kernels(G.forward))), flush=True)
        run[n] = graph(G.forward)
        groups.append((G, out))

    for n, path in libs.items():
        if not back:
            add(n, path, i32)
            for tiles in (False, True) if precision == "mxfp8" else ():
                codes, scales = zip(*[quantise(m, tiles) for m in (gate, up, w2)])
                add(n + (" mxfp8 tiles" if tiles else " mxfp8"), path, i32, params=[*codes, None, None, None, *scales], precision=3)
            continue
        add_backward(n, path, both=precision == "mxfp8")
        if precision == "mxfp8":
            for tiles in (False, True):
                codes, scales = zip(*[quantise(m, tiles) for m in (gate, up, w2)])
                add_backward(n + (" mxfp8 tiles" if tiles else " mxfp8"), path, params=[*codes, None, None, None, *scales], precision=3, both=True)
            turned = [c.view(torch.uint8).transpose(1, 2).contiguous() for c in codes]
            add_backward(n + " mxfp8 tiles transposed", path, params=[*codes, None, None, None, *scales, *turned], precision=3, both=True, transposed=True)
            add_backward(n + " mxfp8 tiles wgrad", path, params=[*codes, None, None, None, *scales], precision=3, both=True, mxfp8_wgrad=True)
            continue
        add_backward(n + " +=", path, flags=0)
        add_backward(n + " bf16", path, bf16=True)
        if os.environ.get("BF16_ADD"):
            add_backward(n + " bf16 +=", path, flags=0, bf16=True)
        if os.environ.get("CONTEXT"):
            add_backward(n + " recompute", path, context_mode=2)
        if os.environ.get("RING"):
            add_backward(n + " ring/4", path, ring=(T * k // 4 + 63) // 64 * 64)
    first = list(libs.values())[0]
    if os.environ.get("CONTEXT") and not back:
        add("context", first, i32, context_mode=1)
    if os.environ.get("HOT") and not back:
        add("even", first, torch.randint(0, el, (T, k), device="cuda", dtype=torch.int32))
        hot = torch.randint(1, el, (T, k), device="cuda", dtype=torch.int32)
        hot[:, :k // 2] = 0
        add("hot", first, hot)
    if name == shapes[0]:
        print(json.dumps(dict(baseline_kernels=kernels(lambda: core.bwd(dy) if back else core.fwd(x, idx, w)))), flush=True)
    t, tb = {q: [] for q in run}, {q: [] for q in run}
    for r in range(rounds + 2):
        for q, g in run.items():
            v = shot(g.replay)
            if r >= 2:
                t[q].append(v)
    for r in range(4):
        for q, g in run.items():
            tb[q].append(row(g.replay))
    d, db_ = st.median(t["dense"]), st.median(tb["dense"])
    for q in run:
        f, ms, b = (2 * 8192**3 if q == "dense" else fl), st.median(t[q]), st.median(tb[q])
        dr, drb = 2 * 8192**3 / d, 2 * 8192**3 / db_
        both = q.endswith(" both")
        if both:
            f *= 1.5
        fast, same = {}, re.sub(r" mxfp8( tiles)?( transposed)?( wgrad)?", "", q)
        if same != q:  # beside the same of BF16
            fast = dict(precision="mxfp8-per128", times_as_fast=round(st.median(t[same]) / ms, 3), b2b_times_as_fast=round(st.median(tb[same]) / b, 3))
        print(json.dumps(dict(origin(), command=command, op="forward+backward" if both else op, **fast, ep=1, tokens=T, routing="uniform", gflop=f * 1e-9, shape=name, what=q, ms=round(ms, 4), min_ms=round(min(t[q]), 4), b2b_ms=round(b, 4), tflops=round(f / ms * 1e-9, 1),
                              share_of_dense=round(f / ms / dr, 3), b2b_share=round(f / b / drb, 3), over_baseline=round(ms / st.median(t["baseline"]), 3),
                              b2b_over_baseline=round(b / st.median(tb["baseline"]), 3))), flush=True)
    del run, core
    for G, _ in groups:
        G.close()
    del groups, x, w13, w2, gate, up, base
    base_weights = None
    torch.cuda.empty_cache()
