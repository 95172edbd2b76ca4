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


class Gather(torch.autograd.Function):
    """Row i of the result is row index[i]. Backward: row j's gradient is the sum of those of rows back[j * times ...], `times` of
    them; without `back` index has no value twice, and rows that it does not name have a gradient of zero."""

    @staticmethod
    def forward(ctx, rows, index, back=None, times=1):
        ctx.save_for_backward(index, back)
        ctx.times, ctx.count = times, rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient):
        index, back = ctx.saved_tensors
        if back is None:
            return gradient.new_zeros(ctx.count, gradient.shape[1]).index_copy(0, index, gradient), None, None, None
        gradient = gradient.index_select(0, back)
        return gradient.view(-1, ctx.times, gradient.shape[1]).sum(1) if ctx.times > 1 else gradient, None, None, None


class Naive:
    def __init__(self, p, inputs):
        self.p, self.inputs = p, inputs
        self.leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.w13, inputs.w2)]

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
        mine, theirs = torch.stack([counts, received]).view(2, p.ranks, p.local).tolist()  # the host waits here
        send, receive = ([sum(rank) for rank in m] for m in (mine, theirs))
        count, total = sum(receive), sum((max(sum(expert), 1) + ALIGN - 1) // ALIGN * ALIGN for expert in zip(*theirs))
        slot = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0], device=x.device))  # where each slot's row is
        token = order // p.topk
        its = by_rank.sum(0)
        padded = (its.clamp(min=1) + ALIGN - 1) // ALIGN * ALIGN
        ends = padded.cumsum(0)
        place = torch.arange(count, device=x.device) + ((ends - padded) - (its.cumsum(0) - its)).repeat_interleave(its, output_size=count)
        if p.ranks > 1:  # they came by rank, then by expert
            expert = torch.arange(p.local, device=x.device).repeat(p.ranks).repeat_interleave(received, output_size=count)
            place = torch.empty_like(place).index_copy(0, torch.argsort(expert, stable=True), place)
        # Padding holds some row, and nobody reads what comes of it.
        source = torch.zeros(total, device=x.device, dtype=torch.long).index_copy(0, place, torch.arange(count, device=x.device))
        if p.ranks > 1:
            rows = AllToAll.apply(Gather.apply(x, token, slot, p.topk), send, receive)
            rows = torch.cat([rows, rows.new_zeros(1, p.hidden)]) if count == 0 else rows
            grouped = Gather.apply(rows, source, place if count else source[:1])
        else:
            grouped = Gather.apply(x, token[source], place[slot], p.topk)
        ends = ends.int()
        gate, up = Grouped.apply(grouped, w13, ends).chunk(2, 1)
        y = Grouped.apply(torch.nn.functional.silu(gate) * up, w2, ends)
        if p.ranks > 1:
            y = Gather.apply(AllToAll.apply(Gather.apply(y, place), receive, send), slot, order)
        else:
            y = Gather.apply(y, place[slot])
        return (y.view(p.tokens, p.topk, p.hidden) * weight.to(x.dtype).unsqueeze(-1)).sum(1)

    @torch.no_grad()
    def forward(self):
        return self.layer(*self.leaves)

    def both(self):
        """out, d_x, d_weight, dw13, dw2."""
        with torch.enable_grad():
            out = self.layer(*self.leaves)
            return (out.detach(),) + torch.autograd.grad(out, self.leaves, self.inputs.d_out)
