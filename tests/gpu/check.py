"""The CUDA forward and backward against an FP64 reference, bit by bit against themselves, and on odd inputs.
usage: [OP=forward|backward] check.py lib.so [part of a case's name]; one line a case; exit 1 when one fails."""
import os, sys, torch
import mokgpu
from mokgpu import Group, rel, reference

CASES = {  # name: H, I, E, K, ep, tokens of each rank, options
    "aligned": (512, 256, 4, 2, 1, [300], {}),
    "odd sizes": (208, 144, 5, 3, 1, [77], {}),
    "smallest": (16, 16, 2, 1, 1, [1], {}),
    "one k-block": (48, 64, 3, 2, 1, [130], {}),
    "many experts, few rows": (256, 128, 64, 4, 1, [40], {}),
    "one expert takes all": (256, 384, 4, 2, 1, [600], {"hot": True}),
    "no tokens": (256, 128, 4, 2, 1, [0], {}),
    "missing and duplicate ids": (320, 192, 6, 4, 1, [123], {"holes": True}),
    "more slots than experts": (128, 64, 2, 5, 1, [90], {}),
    "shared expert": (320, 192, 6, 2, 1, [200], {"shared": 96}),
    "shared expert, nothing routed": (320, 192, 6, 2, 1, [50], {"shared": 96, "none": True}),
    "clamp": (256, 128, 4, 2, 1, [100], {"clamp": 0.05}),
    "small ring": (256, 128, 4, 4, 1, [700], {"ring": 512, "minibatch": 256}),
    "ring of one tile": (256, 128, 4, 4, 1, [500], {"ring": 64, "minibatch": 64}),
    "small minibatch": (256, 640, 8, 4, 1, [900], {"minibatch": 256}),
    "two blocks": (256, 128, 4, 4, 1, [700], {"ring": 512, "blocks": 2}),
    "ep2": (512, 256, 8, 2, 2, [300, 211], {}),
    "ep4 unequal, one empty": (272, 144, 8, 3, 4, [130, 0, 77, 259], {}),
    "ep4 ring": (256, 128, 8, 4, 4, [300, 200, 100, 250], {"ring": 512, "minibatch": 256}),
    "ep4 ring of one tile, two blocks": (256, 128, 8, 4, 4, [60, 50, 100, 90], {"ring": 64, "blocks": 2}),
    "ep2 shared holes": (256, 256, 4, 4, 2, [150, 90], {"shared": 128, "holes": True}),
    "delays": (256, 128, 8, 4, 2, [300, 250], {"ring": 256, "minibatch": 128, "chaos": 30, "repeats": 6}),
    "context": (256, 144, 4, 3, 1, [300], {"context": 1}),
    "context, ep2, small ring": (256, 128, 4, 3, 2, [200, 130], {"context": 1, "ring": 256}),
}


def inputs(H, I, E, K, tokens, opt, seed):
    g = torch.Generator(device="cuda").manual_seed(seed)
    rn = lambda *s: torch.randn(*s, device="cuda", generator=g)
    gate, up, down = rn(E, I, H).bfloat16() * .05, rn(E, I, H).bfloat16() * .05, rn(E, H, I).bfloat16() * .05
    xs, ids, ws = [], [], []
    for t in tokens:
        xs.append(rn(t, H).bfloat16())
        i = torch.rand(t, E, device="cuda", generator=g).argsort(1)[:, :K] if E >= K else torch.randint(0, E, (t, K), device="cuda", generator=g)
        if opt.get("hot"):
            i[:, 0] = 1
            i[:, 1:] = torch.where(torch.rand(i[:, 1:].shape, device="cuda", generator=g) < .9, 1, i[:, 1:])
        if opt.get("holes"):
            i = torch.where(torch.rand(i.shape, device="cuda", generator=g) < .3, -1, i)
            i[:, -1] = i[:, 0]
        if opt.get("none"):
            i[:] = -1
        ids.append(i.int().contiguous())
        ws.append(rn(t, K).contiguous())
    sh = [rn(opt["shared"], H).bfloat16() * .05, rn(opt["shared"], H).bfloat16() * .05, rn(H, opt["shared"]).bfloat16() * .05] if opt.get("shared") else [None] * 3
    return gate, up, down, xs, ids, ws, sh


def forward(lib, case, data, **change):
    """Results of one group; `change` overrides options of the case. Returns the group too."""
    H, I, E, K, ep, tokens, opt = case
    opt = {**opt, **change}
    gate, up, down, xs, ids, ws, sh = data
    el = E // ep
    G = Group(lib, H, I, E, K, ep, max(max(tokens), 1), opt.get("shared", 0), opt.get("ring", 0), opt.get("minibatch", 0), opt.get("clamp", 0.),
              opt.get("chaos", 0), 0, opt.get("blocks", 0), opt.get("context", 0))
    outs = [torch.full((t, H), float("nan"), device="cuda", dtype=torch.bfloat16) for t in tokens]
    params = [[p[r * el:(r + 1) * el].contiguous() for p in (gate, up, down)] + sh for r in range(ep)]
    G.set(xs, ids, ws, params, outs, opt.get("flags", 0))
    return G, outs


def context_error(G, case, data):
    """Largest error of the gate and up rows that rank 0's context keeps (macrobatch 0), in canonical order."""
    H, I, E, K, ep, tokens, opt = case
    gate, up, down, xs, ids, ws, sh = data
    el, at, rows = E // ep, 0, []
    x, i = torch.cat(xs).double(), torch.cat(ids)
    for e in range(el):
        t = (i == e).nonzero()[:, 0]
        rows += [(at + n, e, int(v)) for n, v in enumerate(t)]
        at = (at + len(t) + 63) // 64 * 64
    c, ring, off = G.context[0], G.ring_rows, G.context_ring
    kept = int(c[24:32].view(torch.int64).item())
    pad = lambda n: (n + 1023) // 1024 * 1024
    xo = 0
    ao = pad(ring * H * 2) if ep > 1 else 0
    bo = ao + pad(ring * I * 2)
    view = lambda o, n: c[off + o:off + o + ring * n * 2].view(torch.bfloat16).view(ring, n)
    a, b = view(ao, I), view(bo, I)
    r = [q for q in rows if q[0] < kept]
    p = torch.tensor([q[0] for q in r], device="cuda")
    ga = torch.stack([gate[q[1]].double() @ x[q[2]] for q in r])
    gu = torch.stack([up[q[1]].double() @ x[q[2]] for q in r])
    err = max(rel(a[p], ga), rel(b[p], gu))
    if ep > 1:
        remote = [q for q in r if q[2] >= tokens[0]]
        xr = view(xo, H)[torch.tensor([q[0] for q in remote], device="cuda")]
        err = max(err, 0. if torch.equal(xr, torch.cat(xs)[torch.tensor([q[2] for q in remote], device="cuda")]) else 1.)
    return err


def run(lib, name, case, seed=1):
    H, I, E, K, ep, tokens, opt = case
    data = inputs(H, I, E, K, tokens, opt, seed)
    gate, up, down, xs, ids, ws, sh = data
    G, outs = forward(lib, case, data)
    first, ok, worst, why = None, True, 0., ""
    for n in range(opt.get("repeats", 3)):
        for o in outs:
            o.fill_(float("nan"))
        for p in G.priv:
            p.fill_(0xff)  # an operation relies on nothing that an earlier one left
        for phase in (1, 2, 3):
            for r in range(ep):
                G.phase(r, phase)
                if phase == 2:
                    torch.cuda.synchronize()
                    res = G.outcome(r)
                    if res[0]:
                        ok, why = False, "status"
        torch.cuda.synchronize()
        if n == 0:
            first = [o.clone() for o in outs]
            for r in range(ep):
                if tokens[r]:
                    e = rel(outs[r], reference(xs[r], ids[r], ws[r], gate, up, down, opt.get("clamp", 0.), sh if sh[0] is not None else None))
                    worst = max(worst, e)
                    if not e < 6e-3:
                        ok, why = False, f"rank {r} error"
        elif not all(torch.equal(a, b) for a, b in zip(outs, first)):
            ok, why = False, "not bitwise equal"
    if opt.get("context"):
        e = context_error(G, case, data)
        why += f" context {e:.2e}"
        ok = ok and e < 4e-3
    G.close()
    print(f"{'ok  ' if ok else 'FAIL'} {name:34s} rel {worst:.2e} {why}", flush=True)
    return ok


def one(lib, case, data, **change):
    G, outs = forward(lib, case, data, **change)
    G.forward()
    torch.cuda.synchronize()
    G.close()
    return torch.cat(outs)


def same_bits(lib):
    case = (272, 208, 8, 4, 1, [1000], {})
    data = inputs(*case[:4], [1000], {}, 7)
    want, ok = one(lib, case, data), True
    for change in ({"minibatch": 256}, {"ring": 192}, {"ring": 1024, "minibatch": 64}, {"blocks": 2}, {"blocks": 66}, {"chaos": 20, "ring": 512}):
        same = torch.equal(one(lib, case, data, **change), want)
        print(f"{'ok  ' if same else 'FAIL'} same bits with {change}", flush=True)
        ok = ok and same
    for ep in (2, 4, 8):
        cut = [1000 * (r + 1) ** 2 // ep ** 2 - 1000 * r ** 2 // ep ** 2 for r in range(ep)]
        split = lambda t: list(t.split(cut))
        d = data[:3] + (split(data[3][0]), split(data[4][0]), split(data[5][0]), data[6])
        d = d[:3] + tuple([t.contiguous() for t in part] for part in d[3:6]) + d[6:]
        same = torch.equal(one(lib, (272, 208, 8, 4, ep, cut, {}), d), want)
        print(f"{'ok  ' if same else 'FAIL'} same bits at EP {ep}", flush=True)
        ok = ok and same
    return ok


BACKWARD = {  # as CASES; mode: context mode, 1 full, 2 recompute; add: to stored weight gradients
    "aligned": (512, 256, 4, 2, 1, [300], {}),
    "odd sizes": (208, 144, 5, 3, 1, [77], {"mode": 2}),
    "smallest": (16, 16, 2, 1, 1, [1], {}),
    "many experts, few rows": (256, 128, 64, 4, 1, [40], {}),
    "one expert takes all": (256, 384, 4, 2, 1, [600], {"hot": True}),
    "no tokens": (256, 128, 4, 2, 1, [0], {}),
    "missing and duplicate ids": (320, 192, 6, 4, 1, [123], {"holes": True}),
    "added to": (320, 192, 6, 4, 1, [123], {"add": 0.5}),
    "shared expert": (320, 192, 6, 2, 1, [200], {"shared": 96, "add": 0.25}),
    "shared expert, nothing routed": (320, 192, 6, 2, 1, [50], {"shared": 96, "none": True}),
    "clamp": (256, 128, 4, 2, 1, [100], {"clamp": 0.4, "mode": 2}),
    "small ring": (256, 128, 4, 4, 1, [700], {"ring": 512, "minibatch": 256}),
    "ring of one tile": (256, 128, 4, 4, 1, [300], {"ring": 64, "minibatch": 64, "add": 1.0}),
    "two blocks": (256, 128, 4, 4, 1, [300], {"ring": 512, "blocks": 2, "mode": 2}),
    "ep2": (512, 256, 8, 2, 2, [300, 211], {}),
    "ep4 unequal, one empty, ring": (272, 144, 8, 3, 4, [130, 0, 77, 259], {"ring": 256}),
    "ep4 ring of one tile, two blocks": (256, 128, 8, 4, 4, [60, 50, 100, 90], {"ring": 64, "blocks": 2, "mode": 2}),
    "delays": (256, 128, 8, 4, 2, [300, 250], {"ring": 256, "minibatch": 128, "chaos": 30, "repeats": 6}),
}


def backward(lib, name, case, seed=2):
    """Forward and backward of one group: every gradient against FP64, bitwise repeats, poisoned memory."""
    H, I, E, K, ep, tokens, opt = case
    data = inputs(H, I, E, K, tokens, opt, seed)
    gate, up, down, xs, ids, ws, sh = data
    el, add = E // ep, opt.get("add", 0.0)
    G, outs = forward(lib, case, data, context=opt.get("mode", 1))
    d_outs = [torch.randn(t, H, device="cuda", generator=torch.Generator("cuda").manual_seed(9 + r)).bfloat16() for r, t in enumerate(tokens)]
    f32 = lambda *s: torch.empty(*s, device="cuda", dtype=torch.float32)
    grads = [[f32(el, I, H), f32(el, I, H), f32(el, H, I)] + [f32(*s.shape) if s is not None else None for s in sh] for _ in range(ep)]
    d_xs, d_ws = [torch.empty(t, H, device="cuda", dtype=torch.bfloat16) for t in tokens], [f32(t, K) for t in tokens]
    G.set_backward(d_outs, grads, d_xs, d_ws, 0 if add else 2)
    first, ok, why = None, True, ""
    for n in range(opt.get("repeats", 3)):
        for p in G.priv + G.context:
            p.fill_(0xff)
        G.forward()
        for p in G.priv:
            p.fill_(0xff)
        for t in d_xs + d_ws:
            t.fill_(float("nan"))
        for g in grads:
            for t in g:
                if t is not None:
                    t.fill_(add if add else float("nan"))
        for phase in (1, 2, 3):
            for r in range(ep):
                G.backward_phase(r, phase)
                if phase < 3:
                    torch.cuda.synchronize()
                    if G.outcome(r)[0]:
                        ok, why = False, f"status in phase {phase}"
        torch.cuda.synchronize()
        flat = [t.clone() for t in d_xs + d_ws + [t for g in grads for t in g if t is not None]]
        if first is None:
            first = flat
        elif not all(torch.equal(a, b) for a, b in zip(flat, first)):
            ok, why = False, "not bitwise equal"
    G.close()
    cat = lambda ts: torch.cat(list(ts))
    want = mokgpu.gradients(cat(xs), cat(ids), cat(ws), cat(d_outs), gate, up, down, opt.get("clamp", 0.0), sh if sh[0] is not None else None)
    got = [cat(d_xs), cat(d_ws)] + [cat(g[i] for g in grads).double() - add for i in range(3)]
    if sh[0] is not None:
        got += [sum(g[i].double() - add for g in grads) for i in range(3, 6)]
    errors = [rel(a, b) for a, b in zip(got, want)]
    if not all(e < (4e-2 if opt.get("clamp") else 9e-3) for e in errors):
        ok, why = False, why + " error"
    empty = [e for e in range(E) if not (cat(ids) == e).any()]
    if not add and any(g[i % el].abs().max() != 0 for i in empty for g in grads[i // el][:3]):
        ok, why = False, why + " an empty expert's gradient is not zero"
    if (cat(d_ws)[cat(ids) < 0] != 0).any():
        ok, why = False, why + " the gradient of an id -1 is not zero"
    print(f"{'ok  ' if ok else 'FAIL'} backward: {name:34s} rel {' '.join('%.1e' % e for e in errors)} {why}", flush=True)
    return ok


def bad_ids(lib):
    case = (64, 64, 4, 3, 1, [50], {})
    data = inputs(*case[:4], [50], {}, 3)
    data[4][0][41, 2], data[4][0][17, 1] = 4, -2
    G, outs = forward(lib, case, data)
    G.phase(0, 1)
    torch.cuda.synchronize()
    r = G.outcome(0, quiet=True)
    G.close()
    ok = r[0] == -25 and r[2:5] == [17, 1, -2]
    print(f"{'ok  ' if ok else 'FAIL'} first bad id is named {r}", flush=True)
    return ok


def nan_stays(lib):
    case = (256, 128, 4, 2, 1, [200], {})
    data = inputs(*case[:4], [200], {}, 5)
    clean = one(lib, case, data)
    data[3][0][7, 3], data[3][0][90, 0] = float("nan"), float("inf")
    got = one(lib, case, data)
    keep = torch.ones(200, dtype=torch.bool, device="cuda")
    keep[7] = keep[90] = False
    ok = torch.equal(got[keep], clean[keep]) and not torch.isfinite(got[7]).any()
    print(f"{'ok  ' if ok else 'FAIL'} NaN and Inf stay in their tokens", flush=True)
    return ok


def accumulates(lib):
    case = (256, 128, 4, 2, 1, [200], {})
    data = inputs(*case[:4], [200], {}, 6)
    plain = one(lib, case, data)
    G, outs = forward(lib, case, data, flags=1)
    outs[0].copy_(torch.randn_like(outs[0], dtype=torch.float32))
    want = outs[0].double() + plain.double()
    G.forward()
    torch.cuda.synchronize()
    G.close()
    ok = rel(outs[0], want) < 6e-3
    print(f"{'ok  ' if ok else 'FAIL'} out is added to", flush=True)
    return ok


if __name__ == "__main__":
    lib = mokgpu.load(sys.argv[1])
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    op = os.environ.get("OP", "forward,backward")
    bad = 0
    if "forward" in op:
        bad += sum(not run(lib, n, c) for n, c in CASES.items() if part in n)
    if "backward" in op:
        bad += sum(not backward(lib, n, c) for n, c in BACKWARD.items() if part in n)
    if not part and "forward" in op:
        bad += sum(not f(lib) for f in (same_bits, bad_ids, nan_stays, accumulates))
    print("check:", "all ok" if not bad else f"{bad} failed", flush=True)
    sys.exit(bad != 0)
