# SPDX-License-Identifier: Apache-2.0
"""The naive stack: sort by expert, NCCL all-to-all with split sizes that the host reads back, grouped GEMMs of torch,
all-to-all back, weighted sum; autograd, eager. One rank: the same without the all-to-alls."""
import torch
import torch.distributed as dist

ALIGN = 8  # rows of an expert begin at a multiple of this, as the grouped GEMM's 16-byte alignment asks for


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.splits = send, receive
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, gradient):
        send, receive = ctx.splits
        out = gradient.new_empty(sum(send), *gradient.shape[1:])
        dist.all_to_all_single(out, gradient.contiguous(), send, receive)
        return out, None, None


class Grouped(torch.autograd.Function):
    """rows [M][in], weights [E][out][in]; ends: of each expert's rows."""

    @staticmethod
    def forward(ctx, rows, weights, ends):
        ctx.save_for_backward(rows, weights, ends)
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, gradient):
        rows, weights, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        return torch._grouped_mm(gradient, weights, offs=ends), torch._grouped_mm(gradient.t(), rows, offs=ends), None


class Naive:
    def __init__(self, p, inputs):
        self.p, self.inputs = p, inputs
        self.leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.w13, inputs.w2)]

    def exchange(self, rows, send, receive):
        return AllToAll.apply(rows, send, receive) if self.p.ranks > 1 else rows

    def layer(self, x, weight, w13, w2):
        p = self.p
        flat = self.inputs.ids.flatten().long()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=p.experts)
        received = torch.empty_like(counts)
        if p.ranks > 1:
            dist.all_to_all_single(received, counts)
        else:
            received = counts
        by_rank = received.view(p.ranks, p.local)
        send, receive = counts.view(p.ranks, p.local).sum(1).tolist(), by_rank.sum(1).tolist()  # the host waits here
        rows = self.exchange(x[order // p.topk], send, receive)
        expert = torch.arange(p.local, device=x.device).repeat(p.ranks).repeat_interleave(received, output_size=rows.shape[0])
        its = by_rank.sum(0)
        padded = (its + ALIGN - 1) // ALIGN * ALIGN
        ends = padded.cumsum(0)
        by_expert = torch.argsort(expert, stable=True)
        place = torch.arange(rows.shape[0], device=x.device) + ((ends - padded) - (its.cumsum(0) - its)).repeat_interleave(its, output_size=rows.shape[0])
        grouped = torch.zeros(rows.shape[0] + p.local * ALIGN, p.hidden, device=x.device, dtype=x.dtype).index_copy(0, place, rows[by_expert])
        ends = ends.int()
        gate, up = Grouped.apply(grouped, w13, ends).chunk(2, 1)
        y = Grouped.apply(torch.nn.functional.silu(gate) * up, w2, ends)[place]
        y = self.exchange(torch.empty_like(y).index_copy(0, by_expert, y), receive, send)
        slots = torch.empty_like(y).index_copy(0, order, y).view(p.tokens, p.topk, p.hidden)
        return (slots.float() * weight.unsqueeze(-1)).sum(1).to(x.dtype)

    @torch.no_grad()
    def forward(self):
        return self.layer(*self.leaves)

    def both(self):
        """out, d_x, d_weight, dw13, dw2."""
        with torch.enable_grad():
            out = self.layer(*self.leaves)
            return (out.detach(),) + torch.autograd.grad(out, self.leaves, self.inputs.d_out)
