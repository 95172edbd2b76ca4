"""EP 2 over two GPUs, one process: the same bits as on one GPU, and what it costs. usage: two_gpus.py lib.so shapes; JSON lines.
`parts_ms` by differences, in the same rounds: reduce is what is missing when it is left out; transfers (dispatch and combine, as
far as products do not hide them) what is missing when all tokens of a rank go to its own experts; schedule is by the device's clock."""
import json, os, statistics as st, sys
import torch
import mokgpu
from timing import origin

BF = torch.bfloat16
SHAPES = {"kimi": (7168, 2048, 6, 8), "glm": (6144, 2048, 4, 8), "qwen": (4096, 1024, 8, 10), "dsv4": (7168, 3072, 6, 6)}  # H, I, local experts, K
T = 2048
lib = mokgpu.load(sys.argv[1])
torch.set_grad_enabled(False)


def sync():
    for d in (0, 1):
        torch.cuda.synchronize(d)


def place(parts, devices):
    return [[t.to(f"cuda:{d}") if t is not None else None for t in p] if isinstance(p, list) else p.to(f"cuda:{d}") for p, d in zip(parts, devices)]


def group(shape, data, devices):
    H, I, el, K = shape
    xs, ids, ws, params = data
    G = mokgpu.Group(lib, H, I, 2 * el, K, 2, T, devices=devices)
    xs = place(xs, devices)
    G.set(xs, place(ids, devices), place(ws, devices), place(params, devices), [torch.full_like(x, float("nan")) for x in xs])
    return G


def without_reduce(G):
    for phase in (1, 2):
        for r in (0, 1):
            G.phase(r, phase)
        if phase == 1:
            G.meet()


def shot(run):
    sync()
    a, b = ([torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2))
    for d in (0, 1):
        torch.cuda.set_device(d)
        a[d].record()
    run()
    for d in (0, 1):
        torch.cuda.set_device(d)
        b[d].record()
    sync()
    return max(a[d].elapsed_time(b[d]) for d in (0, 1))


for d in (0, 1):
    torch.cuda.set_device(d)
    torch.zeros(1, device=f"cuda:{d}")
assert lib.shim_peers(2) == 0, "no peer access"
mats = [[torch.randn(8192, 8192, device=f"cuda:{d}", dtype=BF) for _ in range(2)] for d in (0, 1)]
dense = lambda: [a @ b for a, b in mats]
for name in sys.argv[2].split(","):
    H, I, el, K = shape = SHAPES[name]
    torch.manual_seed(3)
    torch.cuda.set_device(0)
    rn = lambda *s: torch.randn(*s, device="cuda:0", dtype=BF)
    data = ([rn(T, H) for _ in range(2)], [torch.rand(T, 2 * el, device="cuda:0").argsort(1)[:, :K].int().contiguous() for _ in range(2)],
            [torch.rand(T, K, device="cuda:0") for _ in range(2)],
            [[rn(el, I, H) * .02, rn(el, I, H) * .02, rn(el, H, I) * .02, None, None, None] for _ in range(2)])
    one, two = group(shape, data, [0, 0]), group(shape, data, [0, 1])
    one.forward()
    without_reduce(two)
    sync()
    schedule = max(two.outcome(r)[5] for r in (0, 1)) * 1e-6  # of the phase that ran last
    for r in (0, 1):
        two.phase(r, 3)
    sync()
    same = all(torch.equal(a, b.to("cuda:0")) for a, b in zip(one.outs, two.outs))
    one.close()
    own = [torch.rand(T, el, device="cuda:0").argsort(1) for _ in range(2)]  # K > el: an expert gets a token twice
    own = [(i[:, torch.arange(K, device="cuda:0") % el] + r * el).int().contiguous() for r, i in enumerate(own)]
    local = group(shape, (data[0], own, data[2], data[3]), [0, 1])
    what = {"all": two.forward, "dense": dense, "local": local.forward, "no reduce": lambda: without_reduce(two)}
    times = {n: [] for n in what}
    for r in range(22):
        for n, run in what.items():
            v = shot(run)
            if r > 1:
                times[n].append(v)
    f, t = 6 * T * K * H * I, times["all"]
    ms, dm, local_ms, short = (st.median(times[n]) for n in what)
    parts = {"schedule": schedule, "transfers": ms - local_ms, "reduce": ms - short, "ffn": local_ms - schedule - (ms - short)}
    local.close()
    print(json.dumps(dict(origin(), command=" ".join(["two_gpus.py"] + [os.path.basename(a) for a in sys.argv[1:]]), op="forward", ep=2, tokens=T, routing="uniform", gflop=f * 1e-9,
                          what="two GPUs, one process", shape=name, same_bits_as_on_one=same, ms=round(ms, 4), min_ms=round(min(t), 4), tflops=round(f / ms * 1e-9, 1),
                          dense_ms=round(dm, 4), parts_ms={n: round(v, 4) for n, v in parts.items()}, share_of_dense=round(f / ms / (2 * 8192**3 / dm), 3))), flush=True)
    two.close()
    del one, two, local, data
    torch.cuda.empty_cache()
