"""Drives the CUDA engine in process through shim.c; tensors are torch's. Test code only."""
import ctypes, os
import torch

# H, I, experts, K of one rank alone
SHAPES = {"kimi": (7168, 2048, 8, 8), "glm": (6144, 2048, 8, 8), "qwen": (4096, 1024, 10, 10), "dsv4": (7168, 3072, 6, 6),
          "mixtral": (4096, 14336, 8, 2), "qwen3-30b": (2048, 768, 128, 8)}
P, U32, U64, F = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float


def load(path):
    lib = ctypes.CDLL(path)
    lib.shim_message.restype = ctypes.c_char_p
    lib.shim_open.restype = P
    lib.shim_layer.restype = P
    lib.shim_open.argtypes = [U32, U32, U32, U32]
    lib.shim_busy.argtypes = [U32, U64, P]
    lib.shim_close.argtypes = [P]
    lib.shim_sizes.argtypes = [P, P]
    lib.shim_layer.argtypes = [P, P, F, P, P]
    lib.shim_layer_close.argtypes = [P]
    lib.shim_enqueue.argtypes = [P, U32, U32, P, P, P, P, U32, P, P, U32, U32, P, P]
    lib.shim_enqueue_backward.argtypes = [P, U32, U32, P, P, P, P, U32, P, P, P, U32, U32, P, P]
    lib.shim_outcome.argtypes = [P, P, P]
    return lib


def quantise(weights, tiles=False, group=128):
    """E4M3 codes and E8M0 scales of BF16 weights [E][R][C], C and (tiles) R multiples of 128: a scale for each `group` of a row, or
    for each 128 x 128."""
    E, R, C = weights.shape
    values = weights.float().view(E, R, C // group, group)
    amax = values.abs().amax(-1)
    if tiles:
        amax = amax.view(E, R // 128, 128, -1).amax(2, keepdim=True).expand(E, R // 128, 128, -1).reshape(E, R, -1)
    fraction, exponent = torch.frexp(amax)  # 448 = 0.875 * 2^9
    exponent = (exponent - 9 + (fraction > 0.875)).clamp(-127, 127)
    codes = torch.ldexp(values, -exponent.unsqueeze(-1)).to(torch.float8_e4m3fn).view(E, R, C)
    return codes.contiguous(), (exponent + 127).to(torch.uint8).repeat_interleave(group // 32, -1).contiguous()


class Group:
    """All ranks of one layer on one device, each with an engine of its own."""

    def __init__(self, lib, H, I, E, K, ep, max_tokens, shared=0, ring=0, minibatch=0, clamp=0.0, chaos=0, device=0, blocks=0, context_mode=0, devices=None, yield_us=0, bf16_gradients=False, precision=1, comm_units=0, transposed=False, mxfp8_wgrad=False):
        self.lib, self.H, self.I, self.E, self.K, self.ep, self.el = lib, H, I, E, K, ep, E // ep
        self.device = devices or [device] * ep
        units = torch.cuda.get_device_properties(device).multi_processor_count
        specs = [(U64 * 16)(H, I, E, K, ep, r, max_tokens, shared, ring, minibatch, units, 1 if bf16_gradients else 0, precision, comm_units, int(transposed), 2 if mxfp8_wgrad else 0) for r in range(ep)]
        sizes = (U64 * 5)()
        assert lib.shim_sizes(specs[0], sizes) == 0, lib.shim_message()
        self.private_bytes, self.ring_rows, self.context_ring = sizes[1], sizes[3], sizes[4]
        u8 = lambda n, r: torch.full((n,), 0xff, device=f"cuda:{self.device[r]}", dtype=torch.uint8)
        self.sym, self.priv = [u8(sizes[0], r) for r in range(ep)], [u8(sizes[1], r) for r in range(ep)]
        self.context_mode, self.context = context_mode, [u8(sizes[2], r) if context_mode else None for r in range(ep)]
        torch.cuda.synchronize()
        ptrs = (P * ep)(*[s.data_ptr() for s in self.sym])
        self.engine, self.layer = [], []
        for r in range(ep):
            e = lib.shim_open(self.device[r], chaos, blocks, yield_us)
            assert e, lib.shim_message()
            l = lib.shim_layer(e, specs[r], clamp, ptrs, self.priv[r].data_ptr())
            assert l, lib.shim_message()
            self.engine.append(e)
            self.layer.append(l)

    def close(self):
        for l in self.layer:
            self.lib.shim_layer_close(l)
        for e in self.engine:
            self.lib.shim_close(e)
        del self.sym, self.priv, self.context

    def set(self, xs, ids, weights, params, outs, flags=0):
        """params: per rank six tensors or None; of MXFP8 three more, the scales of gate, up, down; then these transposed, where the layer has
        them."""
        self.xs, self.ids, self.weights, self.params, self.outs, self.flags = xs, ids, weights, params, outs, flags
        self.px = (P * self.ep)(*[x.data_ptr() for x in xs])
        self.pt = (U32 * self.ep)(*[x.shape[0] for x in xs])
        self.pp = [(P * 12)(*[t.data_ptr() if t is not None else None for t in p]) for p in params]

    def phase(self, rank, phase):
        torch.cuda.set_device(self.device[rank])
        q = self.lib.shim_enqueue(self.layer[rank], phase, self.xs[rank].shape[0], self.ids[rank].data_ptr(),
                                  self.weights[rank].data_ptr(), self.outs[rank].data_ptr(), self.pp[rank], self.ep, self.px,
                                  self.pt, self.flags, self.context_mode,
                                  self.context[rank].data_ptr() if self.context_mode else None,
                                  torch.cuda.current_stream(self.device[rank]).cuda_stream)
        assert q == 0, f"enqueue phase {phase}: {q}"

    def forward(self):
        for phase in (1, 2, 3):
            for r in range(self.ep):
                self.phase(r, phase)
            if len(set(self.device)) > 1 and phase < 3:
                self.meet()

    def set_backward(self, d_outs, gradients, d_xs, d_weights, flags=0):
        """gradients: per rank six tensors, FP32 or as asked, or None; behind set(), with a context mode."""
        self.d_outs, self.gradients, self.d_xs, self.d_weights, self.backward_flags = d_outs, gradients, d_xs, d_weights, flags
        self.pd = (P * self.ep)(*[d.data_ptr() for d in d_outs])
        self.pg = [(P * 6)(*[t.data_ptr() if t is not None else None for t in g]) for g in gradients]

    def backward_phase(self, rank, phase):
        torch.cuda.set_device(self.device[rank])
        q = self.lib.shim_enqueue_backward(self.layer[rank], phase, self.xs[rank].shape[0], self.pp[rank], self.pg[rank],
                                           self.d_xs[rank].data_ptr(), self.d_weights[rank].data_ptr(), self.ep, self.px, self.pd, self.pt,
                                           self.backward_flags, self.context_mode, self.context[rank].data_ptr(),
                                           torch.cuda.current_stream(self.device[rank]).cuda_stream)
        assert q == 0, f"enqueue backward phase {phase}: {q}"

    def backward(self):
        for phase in (1, 2, 3):
            for r in range(self.ep):
                self.backward_phase(r, phase)
            if len(set(self.device)) > 1 and phase < 3:
                self.meet()

    def meet(self):
        """Each GPU's stream waits for all others."""
        streams = [torch.cuda.current_stream(d) for d in sorted(set(self.device))]
        events = [s.record_event() for s in streams]
        for s in streams:
            for e in events:
                s.wait_event(e)

    def outcome(self, rank, quiet=False):
        res = (ctypes.c_int64 * 6)()
        assert self.lib.shim_outcome(self.engine[rank], self.layer[rank], res) == 0
        if res[0] and not quiet:
            print("outcome", list(res), self.lib.shim_message())
        return list(res)


def rel(a, b):
    a, b = a.double(), b.double()
    d = b.norm()
    return ((a - b).norm() / d).item() if d > 0 else (a - b).norm().item()


def reference(x, ids, w, gate, up, down, clamp=0.0, shared=None, dt=torch.float64):
    """x [T,H]; ids [T,K] global; gate/up [E,I,H]; down [E,H,I]; h and y rounded to BF16 as the product does."""
    T, K = ids.shape
    y = torch.zeros(T, K, x.shape[1], device=x.device, dtype=dt)
    act = lambda a, b: torch.nn.functional.silu(a.clamp(max=clamp) if clamp else a) * (b.clamp(-clamp, clamp) if clamp else b)
    for e in range(gate.shape[0]):
        t, k = (ids == e).nonzero(as_tuple=True)
        if t.numel():
            xe = x[t].to(dt)
            h = act(xe @ gate[e].to(dt).t(), xe @ up[e].to(dt).t()).bfloat16().to(dt)
            y[t, k] = (h @ down[e].to(dt).t()).bfloat16().to(dt)
    out = (y * w.to(dt).unsqueeze(-1)).sum(1)
    if shared is not None:
        g, u, d = [s.to(dt) for s in shared]
        xd = x.to(dt)
        h = act(xd @ g.t(), xd @ u.t()).bfloat16().to(dt)
        out = out + (h @ d.t()).bfloat16().to(dt)
    return out


def gradients(x, ids, w, d_out, gate, up, down, clamp=0.0, shared=None):
    """FP64 gradients of sum(out * d_out), no rounding: d_x, d_w, d_gate, d_up, d_down and the shared expert's three."""
    with torch.enable_grad():
        leaf = lambda t: t.double().requires_grad_(True)
        xd, wd, p = leaf(x), leaf(w), [leaf(t) for t in (gate, up, down)]
        s = [leaf(t) for t in shared] if shared is not None else []
        act = lambda a, b: torch.nn.functional.silu(a.clamp(max=clamp) if clamp else a) * (b.clamp(-clamp, clamp) if clamp else b)
        out = torch.zeros_like(xd)
        for e in range(gate.shape[0]):
            t, k = (ids == e).nonzero(as_tuple=True)
            if t.numel():
                y = act(xd[t] @ p[0][e].t(), xd[t] @ p[1][e].t()) @ p[2][e].t()
                out = out.index_add(0, t, y * wd[t, k].unsqueeze(-1))
        if s:
            out = out + act(xd @ s[0].t(), xd @ s[1].t()) @ s[2].t()
        leaves = [xd, wd] + p + s
        # Where nothing is routed and there is no shared expert, nothing depends on anything.
        got = torch.autograd.grad((out * d_out.double()).sum(), leaves, allow_unused=True) if out.requires_grad else [None] * len(leaves)
        return [g if g is not None else torch.zeros_like(l) for g, l in zip(got, leaves)]
