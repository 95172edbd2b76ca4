"""Correctness of the CUDA forward against an FP64 reference; prints one line a case and a verdict; exit 1 on failure."""
import sys, time, torch
import mokgpu
from mokgpu import Group, rel, reference

CASES = {  # name: H, I, E, K, ep, tokens a rank, options
    "aligned": (512, 256, 4, 2, 1, [300], {}),
    "odd sizes": (208, 144, 5, 3, 1, [77], {}),
    "smallest": (16, 16, 2, 1, 1, [1], {}),
    "one k-block": (48, 64, 3, 2, 1, [130], {}),
    "many experts, few rows": (256, 128, 64, 4, 1, [40], {}),
    "one expert takes all": (256, 384, 4, 2, 1, [600], {"hot": True}),
    "no tokens": (256, 128, 4, 2, 1, [0], {}),
    "missing and duplicate ids": (320, 192, 6, 4, 1, [123], {"holes": True}),
    "shared expert": (320, 192, 6, 2, 1, [200], {"shared": 96}),
    "shared expert, nothing routed": (320, 192, 6, 2, 1, [50], {"shared": 96, "none": True}),
    "clamp": (256, 128, 4, 2, 1, [100], {"clamp": 0.05}),
    "small ring": (256, 128, 4, 4, 1, [700], {"ring": 512, "minibatch": 256}),
    "small minibatch": (256, 640, 8, 4, 1, [900], {"minibatch": 256}),
    "ep2": (512, 256, 8, 2, 2, [300, 211], {}),
    "ep4 unequal, one empty": (272, 144, 8, 3, 4, [130, 0, 77, 259], {}),
    "ep4 ring": (256, 128, 8, 4, 4, [300, 200, 100, 250], {"ring": 512, "minibatch": 256}),
    "ep2 shared holes": (256, 256, 4, 4, 2, [150, 90], {"shared": 128, "holes": True}),
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


def run(lib, name, case, seed=1, chaos=0, repeats=3):
    H, I, E, K, ep, tokens, opt = case
    gate, up, down, xs, ids, ws, sh = inputs(H, I, E, K, tokens, opt, seed)
    el = E // ep
    G = Group(lib, H, I, E, K, ep, max(max(tokens), 1), opt.get("shared", 0), opt.get("ring", 0), opt.get("minibatch", 0), opt.get("clamp", 0.), chaos)
    outs = [torch.full((t, H), float("nan"), device="cuda", dtype=torch.bfloat16) for t in tokens]
    params = [[gate[r * el:(r + 1) * el].contiguous(), up[r * el:(r + 1) * el].contiguous(), down[r * el:(r + 1) * el].contiguous()] + sh for r in range(ep)]
    G.set(xs, ids, ws, params, outs)
    first, ok, worst, why = None, True, 0., ""
    for n in range(repeats):
        for o in outs:
            o.fill_(float("nan"))
        G.forward()
        torch.cuda.synchronize()
        for r in range(ep):
            if G.outcome(r)[0]:
                ok, why = False, "status"
        if n == 0:
            first = [o.clone() for o in outs]
            for r in range(ep):
                if tokens[r]:
                    ref = reference(xs[r], ids[r], ws[r], gate, up, down, opt.get("clamp", 0.), sh if sh[0] is not None else None)
                    e = rel(outs[r], ref)
                    worst = max(worst, e)
                    if not e < 6e-3:
                        ok, why = False, f"rank {r} error"
        elif not all(torch.equal(a, b) for a, b in zip(outs, first)):
            ok, why = False, "not bitwise equal"
    G.close()
    print(f"{'ok  ' if ok else 'FAIL'} {name:32s} rel {worst:.2e} {why}", flush=True)
    return ok


if __name__ == "__main__":
    lib = mokgpu.load(sys.argv[1])
    only = sys.argv[2:] or list(CASES)
    bad = sum(not run(lib, n, CASES[n]) for n in only)
    print("check:", "all ok" if not bad else f"{bad} failed", flush=True)
    sys.exit(bad != 0)
