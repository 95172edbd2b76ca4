"""What one layer costs as its size, its skew, its minibatch and the blocks it may use change; JSON lines.
usage: sweep.py lib.so [sizes|minibatch|client ...]"""
import json, statistics as st, sys, time
import torch
import mokgpu
from mokgpu import SHAPES
from timing import shot

BF = torch.bfloat16
lib = mokgpu.load(sys.argv[1])
torch.set_grad_enabled(False)


def say(**k):
    print(json.dumps(k), flush=True)


def make(H, I, E, K, ep, tokens, ids=None, **options):
    el = E // ep
    G = mokgpu.Group(lib, H, I, E, K, ep, tokens, **options)
    xs = [torch.randn(tokens, H, device="cuda", dtype=BF) for _ in range(ep)]
    ids = ids or [torch.rand(tokens, E, device="cuda").argsort(1)[:, :K].int().contiguous() for _ in range(ep)]
    ws = [torch.rand(tokens, K, device="cuda") for _ in range(ep)]
    w = [[torch.randn(*s, device="cuda", dtype=BF) * .02 for s in ((el, I, H), (el, I, H), (el, H, I))] + [None] * 3 for _ in range(ep)]
    outs = [torch.empty_like(x) for x in xs]
    G.set(xs, ids, ws, w, outs)
    return G


da, db = (torch.randn(8192, 8192, device="cuda", dtype=BF) for _ in range(2))
dense = lambda: da @ db


def interleaved(entries, rounds=12):
    """Medians of all entries and of the dense product, in turn on a warm card."""
    entries = {**entries, "dense": dense}
    t = {k: [] for k in entries}
    for r in range(rounds + 2):
        for k, f in entries.items():
            v = shot(f)
            if r > 1:
                t[k].append(v)
    return {k: st.median(v) for k, v in t.items()}


def sizes():
    for name, T in [(n, 2048) for n in ("mixtral", "qwen3-30b")] + [("kimi", t) for t in (512, 1024, 4096, 8192, 16384)]:
        H, I, E, K = SHAPES[name]
        torch.manual_seed(1)
        G = make(H, I, E, K, 1, T)
        for _ in range(2):
            G.forward()
        m = interleaved({"layer": G.forward})
        G.phase(0, 1)
        G.phase(0, 2)
        torch.cuda.synchronize()
        schedule = G.outcome(0)[5] / 1000
        f = 6 * T * K * H * I
        say(what="size", shape=name, H=H, I=I, E=E, K=K, T=T, ms=round(m["layer"], 4), schedule_us=schedule, tflops=round(f / m["layer"] * 1e-9, 1),
            share_of_dense=round(f / m["layer"] / (2 * 8192**3 / m["dense"]), 3))
        G.close()
        del G
        torch.cuda.empty_cache()


def minibatch():
    """EP 2, both ranks on this GPU, one after the other."""
    for name in ("kimi", "qwen"):
        H, I, E, K = SHAPES[name]
        E = 2 * E
        sweep = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)
        torch.manual_seed(1)
        first = make(H, I, E, K, 2, 2048)
        groups = {0: first}
        for m in sweep[1:]:
            G = mokgpu.Group(lib, H, I, E, K, 2, 2048, minibatch=m)
            G.set(first.xs, first.ids, first.weights, first.params, first.outs)
            groups[m] = G
        run = lambda G: (lambda: [G.phase(r, 2) for r in range(2)])
        for G in groups.values():
            G.forward()
        t = interleaved({str(m): run(G) for m, G in groups.items()}, 10)
        for m in sweep:
            say(what="minibatch", shape=name, ep=2, minibatch_rows=m or "plan", main_ms_both_ranks=round(t[str(m)], 4), over_plan=round(t[str(m)] / t["0"], 3))
        for G in groups.values():
            G.close()
        del groups, first
        torch.cuda.empty_cache()


CLIENT_BLOCKS, CLIENT_US = 16, 50


def beside(run, side):
    """One run of the layer with a client's kernel in it: ms of the layer, us that the client's kernel waited."""
    torch.cuda.synchronize()
    a, b, s0, s1 = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    a.record()
    run()
    b.record()
    time.sleep(0.0007)  # the layer is under way
    s0.record(side)
    assert lib.shim_busy(CLIENT_BLOCKS, CLIENT_US * 1000, side.cuda_stream) == 0
    s1.record(side)
    torch.cuda.synchronize()
    return a.elapsed_time(b), 1000 * s0.elapsed_time(s1) - CLIENT_US


def client():
    """A kernel of 16 blocks on a second stream, launched while the layer runs: how long it waits, and what the layer loses. All
    ways to leave it room, and both priorities of its stream, in turn; medians."""
    H, I, E, K = SHAPES["kimi"]
    ways = ((0, 0), (16, 0), (0, 100), (0, 200), (0, 400))
    torch.manual_seed(1)
    grads = [torch.zeros(E, *s, device="cuda") for s in ((I, H), (I, H), (H, I))] + [None] * 3
    d_out, d_x = torch.randn(2048, H, device="cuda", dtype=BF), torch.empty(2048, H, device="cuda", dtype=BF)
    sides = {p: torch.cuda.Stream(priority=p) for p in (-1, 0)}
    with torch.cuda.stream(torch.cuda.Stream()):
        groups = {}
        for reserve, yield_us in ways:
            G = make(H, I, E, K, 1, 2048, blocks=132 - reserve, yield_us=yield_us, context_mode=1)
            G.set_backward([d_out], [grads], [d_x], [torch.empty(2048, K, device="cuda")], 2)
            groups[reserve, yield_us] = G
        for op in ("forward", "backward"):
            runs = {w: G.forward if op == "forward" else G.backward for w, G in groups.items()}
            alone, seen = {w: [] for w in ways}, {(w, p): [] for w in ways for p in sides}
            for r in range(15):
                for w, run in runs.items():
                    alone[w].append(shot(run))
                    for p, side in sides.items():
                        seen[w, p].append(beside(run, side))
            for (w, p), v in seen.items():
                say(what="client kernel", shape="kimi", op=op, reserve_sms=w[0], yield_us=w[1], client_priority=p, layer_ms=round(st.median(alone[w][3:]), 4),
                    layer_beside_ms=round(st.median(x[0] for x in v[3:]), 4), waits_us=round(st.median(x[1] for x in v[3:]), 1),
                    waits_max_us=round(max(x[1] for x in v[3:]), 1))
        for G in groups.values():
            G.close()
    del groups, grads
    torch.cuda.empty_cache()


for part in sys.argv[2:] or ("sizes", "minibatch", "client"):
    {"sizes": sizes, "minibatch": minibatch, "client": client}[part]()
