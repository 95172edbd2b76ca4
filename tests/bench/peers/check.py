# SPDX-License-Identifier: Apache-2.0
"""How far results are from FP64, computed from the definition: out[t] = sum over k of weight * down(silu(gate x) * up x)."""
import torch


def rel(a, b):
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def reference(p, inputs, ranks):
    """out, d_x, d_weight of this rank's tokens and dw13, dw2 of its experts, FP64. All ranks' tokens and experts are gathered."""
    gather = lambda t: torch.cat(ranks.gathered(t))
    x, weight, w13, w2 = (gather(t).double().requires_grad_() for t in (inputs.x, inputs.weight, inputs.w13, inputs.w2))
    ids, d_out = gather(inputs.ids).long(), gather(inputs.d_out).double()
    out = torch.zeros_like(x)
    for e in range(p.experts):
        t, k = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[t] @ w13[e].t()).chunk(2, 1)
        out = out.index_add(0, t, (gate * torch.sigmoid(gate) * up) @ w2[e].t() * weight[t, k].unsqueeze(1))
    d_x, d_weight, dw13, dw2 = torch.autograd.grad(out, (x, weight, w13, w2), d_out)
    mine, experts = slice(p.rank * p.tokens, (p.rank + 1) * p.tokens), slice(p.first, p.first + p.local)
    return [t.detach() for t in (out[mine], d_x[mine], d_weight[mine], dw13[experts], dw2[experts])]


def errors(got, want):
    return {n: float(f"{rel(a, b):.2e}") for n, a, b in zip(("out", "d_x", "d_weight", "dw13", "dw2"), got, want)}


BOUND = 2e-2  # BF16 operands and intermediates
