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
        rows = x.unsqueeze(1).expand(-1, p.topk, -1).reshape(-1, p.hidden).index_select(0, order)
        rows = self.exchange(rows, send, receive)
        its = by_rank.sum(0)
        padded = (its + ALIGN - 1) // ALIGN * ALIGN
        ends = padded.cumsum(0)
        count, arange = rows.shape[0], torch.arange(rows.shape[0], device=x.device)
        place = arange + ((ends - padded) - (its.cumsum(0) - its)).repeat_interleave(its, output_size=count)
        if p.ranks > 1:  # they came by rank, then by expert
            expert = torch.arange(p.local, device=x.device).repeat(p.ranks).repeat_interleave(received, output_size=count)
            place = torch.empty_like(place).index_copy(0, torch.argsort(expert, stable=True), place)
        grouped = rows.new_zeros(count + p.local * ALIGN, p.hidden).index_copy(0, place, rows)
        ends = ends.int()
        gate, up = Grouped.apply(grouped, w13, ends).chunk(2, 1)
        y = Grouped.apply(torch.nn.functional.silu(gate) * up, w2, ends).index_select(0, place)
        y = self.exchange(y, receive, send)
        back = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0], device=x.device))
        slots = y.index_select(0, back).view(p.tokens, p.topk, p.hidden)
        return torch.bmm(weight.to(x.dtype).unsqueeze(1), slots).squeeze(1)

    @torch.no_grad()
    def forward(self):
        return self.layer(*self.leaves)

    def both(self):
        """out, d_x, d_weight, dw13, dw2."""
        with torch.enable_grad():
            out = self.layer(*self.leaves)
            return (out.detach(),) + torch.autograd.grad(out, self.leaves, self.inputs.d_out)
