"""A few forwards of one shape, for a profiler. usage: once.py lib.so H I E K T [repeats]; PRECISION: bf16, or mxfp8, with
weights in tiles of 128 x 128 (bf16)."""
import os, sys, torch
import mokgpu

H, I, E, K, T = map(int, sys.argv[2:7])
torch.manual_seed(1)
bf = torch.bfloat16
x = torch.randn(T, H, device="cuda", dtype=bf)
v, idx = torch.topk(torch.randn(T, E, device="cuda"), K)
p = [torch.randn(*s, device="cuda", dtype=bf) * .02 for s in ((E, I, H), (E, I, H), (E, H, I))]
mxfp8 = os.environ.get("PRECISION", "bf16") == "mxfp8"
G = mokgpu.Group(mokgpu.load(sys.argv[1]), H, I, E, K, 1, T, precision=3 if mxfp8 else 1)
out = torch.empty_like(x)
p += [None] * 3
if mxfp8:
    codes, scales = zip(*[mokgpu.quantise(q, True) for q in p[:3]])
    p = [*codes, None, None, None, *scales]
G.set([x], [idx.int()], [torch.softmax(v, -1)], [p], [out])
for _ in range(int(sys.argv[7]) if len(sys.argv) > 7 else 3):
    G.forward()
torch.cuda.synchronize()
