# SPDX-License-Identifier: Apache-2.0
"""The strong unfused baseline: grouped GEMMs of torch, glue kernels at the speed of memory, no host synchronisation, so that
forward and backward can be replayed as CUDA graphs. Ranks exchange through symmetric memory: all-gather of tokens by one
push kernel, reduce-scatter of outputs by one pull kernel. Router and top-k are the caller's."""
import ctypes

import torch

ALIGN = 128  # rows of an expert begin at a multiple of this; padding is zero
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


def grouped(a, b, ends):
    return torch._grouped_mm(a, b, offs=ends)


class Alone:
    """One rank: nothing to exchange."""

    def __init__(self, p, glue):
        self.out, self.d_x = (torch.empty(p.tokens, p.hidden, device=p.device, dtype=BF16) for _ in range(2))
        self.d_weight = torch.empty(p.tokens, p.topk, device=p.device, dtype=F32)

    def gather(self, x, ids, weight):
        return x, ids, weight

    def gather_gradient(self, d_out):
        return d_out

    def scatter(self):
        return self.out

    def scatter_gradient(self, ids):
        return self.d_x, self.d_weight


class Exchange:
    """Several ranks, a GPU each. `out`, `d_x` and `d_weight` are of all ranks' tokens, this rank's experts alone."""

    BLOCKS = 64  # of the push

    def __init__(self, p, glue):
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric
        self.p, self.glue = p, glue
        self.tokens = p.tokens * p.ranks
        sizes = {"x": p.hidden * 2, "ids": p.topk * 4, "weight": p.topk * 4, "y": p.hidden * 2, "d_weight": p.topk * 4}
        self.at, self.each, total = {}, {n: b * p.tokens for n, b in sizes.items()}, 0
        for name, each in self.each.items():
            self.at[name], total = total, total + (each * p.ranks + 255) // 256 * 256
        self.memory = symmetric.empty(total, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        self.handle = symmetric.rendezvous(self.memory, dist.group.WORLD)
        self.peer = [self.memory if r == p.rank else self.handle.get_buffer(r, (total,), torch.uint8) for r in range(p.ranks)]
        self.out = self.d_x = self.whole("y", (self.tokens, p.hidden), BF16)
        self.d_weight = self.whole("d_weight", (self.tokens, p.topk), F32)
        self.sum = [torch.empty(p.tokens, p.hidden, device=p.device, dtype=BF16) for _ in range(2)]
        self.picked = torch.empty(p.tokens, p.topk, device=p.device, dtype=F32)

    def whole(self, name, shape, dtype):
        at = self.at[name]
        return self.memory[at:at + self.each[name] * self.p.ranks].view(dtype).view(shape)

    def barrier(self):
        self.handle.barrier(channel=0)

    def push(self, parts):
        """Own parts to all ranks, the nearest rank first."""
        p, n = self.p, len(parts)
        order = [(p.rank + i) % p.ranks for i in range(p.ranks)]
        to = [self.peer[r].data_ptr() + self.at[name] + p.rank * self.each[name] for name in parts for r in order]
        self.glue("push", self.BLOCKS, p.ranks, n, (ctypes.c_void_p * n)(*[t.data_ptr() for t in parts.values()]),
                  (ctypes.c_int64 * n)(*[self.each[name] for name in parts]), (ctypes.c_void_p * len(to))(*to))

    def pointers(self, name):
        return (ctypes.c_void_p * self.p.ranks)(*[b.data_ptr() + self.at[name] + self.p.rank * self.each[name] for b in self.peer])

    def pull(self, to):
        self.glue("pull", 132, self.p.ranks, self.pointers("y"), to.numel(), to)
        return to

    def gather(self, x, ids, weight):
        self.push({"x": x, "ids": ids, "weight": weight})
        self.barrier()
        p = self.p
        return (self.whole("x", (self.tokens, p.hidden), BF16), self.whole("ids", (self.tokens, p.topk), I32),
                self.whole("weight", (self.tokens, p.topk), F32))

    def gather_gradient(self, d_out):
        self.push({"x": d_out})
        self.barrier()
        return self.whole("x", (self.tokens, self.p.hidden), BF16)

    def scatter(self):
        self.barrier()
        return self.pull(self.sum[0])

    def scatter_gradient(self, ids):
        self.barrier()
        p = self.p
        self.glue("pick", p.ranks, self.pointers("d_weight"), ids, ids.numel(), p.local, self.picked)
        return self.pull(self.sum[1]), self.picked


class Strong:
    """One rank of the layer on static buffers. forward() -> out; backward() -> d_x, d_weight, and dw13, dw2 in BF16."""

    def __init__(self, p, inputs, glue, backward=True):
        self.p, self.glue, self.w13, self.w2 = p, glue, inputs.w13, inputs.w2
        self.x, self.ids, self.weight, self.d_out = inputs.x, inputs.ids, inputs.weight, inputs.d_out
        self.given = p.tokens
        if p.ranks > 1 and p.tokens % 8:  # regions of ranks are whole vectors; the tokens added name no expert
            self.p = p = type(p)(**{**vars(p), "tokens": (p.tokens + 7) // 8 * 8})
            more = lambda t, value: torch.nn.functional.pad(t, (0, 0, 0, p.tokens - self.given), value=value).contiguous()
            self.x, self.ids, self.weight, self.d_out = more(self.x, 0), more(self.ids, -1), more(self.weight, 0), more(self.d_out, 0)
        self.between = (Exchange if p.ranks > 1 else Alone)(p, glue)
        self.tokens = p.tokens * p.ranks
        self.slots = self.tokens * p.topk
        rows = self.slots + p.local * ALIGN
        new = lambda *shape, dtype=BF16: torch.empty(*shape, device=p.device, dtype=dtype)
        self.place, self.row = new(self.slots, dtype=I32), new(self.slots, dtype=I32)
        self.count, self.ends = new(p.local, dtype=I32), new(p.local, dtype=I32)
        self.slot = new(rows, dtype=I32)
        self.rows, self.act = new(rows, p.hidden), new(rows, p.intermediate)
        if backward:
            self.d_rows, self.d_h, self.weighted = new(rows, p.hidden), new(rows, 2 * p.intermediate), new(rows, p.intermediate)

    def expand(self, x, rows):
        p = self.p
        self.glue("expand", x, self.tokens, p.hidden, p.topk, p.local, ALIGN, self.row, self.count, self.ends, rows)

    def forward(self):
        p = self.p
        x, ids, self.all_weights = self.between.gather(self.x, self.ids, self.weight)
        self.glue("plan", ids, self.slots, p.first, p.local, ALIGN, self.place, self.count, self.row, self.slot, self.ends, self.between.d_weight)
        self.expand(x, self.rows)
        self.h = grouped(self.rows, self.w13.transpose(1, 2), self.ends)
        self.glue("swiglu", self.h, p.intermediate, self.ends[-1:], self.act)
        y = grouped(self.act, self.w2.transpose(1, 2), self.ends)
        self.glue("reduce", y, self.tokens, p.hidden, p.topk, self.row, self.all_weights, self.between.out)
        return self.between.scatter()[:self.given]

    def backward(self):
        p = self.p
        self.expand(self.between.gather_gradient(self.d_out), self.d_rows)
        d_act = grouped(self.d_rows, self.w2, self.ends)
        self.glue("swiglu_backward", self.h, d_act, p.intermediate, self.ends[-1:], self.slot, self.all_weights, self.d_h, self.weighted,
                  self.between.d_weight)
        self.dw2 = grouped(self.d_rows.t(), self.weighted, self.ends)
        self.dw13 = grouped(self.d_h.t(), self.rows, self.ends)
        d_x = grouped(self.d_h, self.w13, self.ends)
        self.glue("reduce", d_x, self.tokens, p.hidden, p.topk, self.row, None, self.between.d_x)
        d_x, d_weight = self.between.scatter_gradient(self.ids)
        return d_x[:self.given], d_weight[:self.given]

    def both(self):
        out = self.forward()
        return (out,) + self.backward()
