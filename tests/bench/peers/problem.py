# SPDX-License-Identifier: Apache-2.0
"""Shapes, routings and inputs of one rank, the same for every candidate. Values depend on (seed, rank) alone."""
import dataclasses

import torch

# hidden, intermediate, local experts (0: `experts` in all), experts, top-k; as in mok-bench layer
SHAPES = {"kimi": (7168, 2048, 6, 0, 8), "glm": (6144, 2048, 4, 0, 8), "qwen": (4096, 1024, 8, 0, 10), "dsv4": (7168, 3072, 6, 0, 6),
          "mixtral": (4096, 14336, 0, 8, 2), "qwen3-30b": (2048, 768, 0, 128, 8), "small": (1024, 512, 8, 0, 2), "tiny": (256, 128, 4, 0, 2)}
ROUTINGS = ("uniform", "zipf", "hot-rank", "hot-rank-twice", "hot-expert")


@dataclasses.dataclass
class Problem:
    name: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    ranks: int
    rank: int
    tokens: int
    routing: str = "uniform"
    device: str = "cuda"

    @property
    def local(self):
        return self.experts // self.ranks

    @property
    def first(self):
        return self.rank * self.local

    def gflop(self, op):
        """Of a rank, with rows spread evenly."""
        return {"forward": 6, "backward": 12, "forward+backward": 18}[op] * self.tokens * self.topk * self.hidden * self.intermediate * 1e-9


def make(name, ranks, rank, tokens, routing, device="cuda"):
    hidden, intermediate, local, experts, topk = SHAPES[name]
    if not experts:  # more where top-k needs them
        experts = ranks * (local if local * ranks >= topk else (topk + ranks - 1) // ranks)
    if experts % ranks:
        raise SystemExit(f"peers: --ep is {ranks}, must divide the {experts} experts of {name}")
    return Problem(name, hidden, intermediate, experts, topk, ranks, rank, tokens, routing, device)


def distinct(p, log_chance, k):
    """k distinct experts a token, each drawn with the others' chances (Gumbel)."""
    noise = -torch.log(-torch.log(torch.rand(p.tokens, log_chance.numel(), device=p.device).clamp(1e-7, 1 - 1e-7)))
    return torch.topk(log_chance + noise, k, dim=1).indices


def route(p):
    """Expert ids, I32 [T][K]. hot-rank: rank 0 gets twice its share, as far as distinct experts allow; hot-rank-twice: all of
    it, so that tokens name some of its experts twice where these are fewer; hot-expert: expert 0
    gets half of all rows, so that tokens name it several times."""
    even = torch.zeros(p.experts, device=p.device)
    if p.routing == "zipf":
        return distinct(p, -torch.log(torch.arange(1, p.experts + 1, device=p.device).float()), p.topk).int()
    if p.routing == "hot-rank" and p.ranks > 1:
        here = min(p.local, max(p.topk - (p.experts - p.local), -(-2 * p.topk // p.ranks)), p.topk)
        parts = [distinct(p, even[:p.local], here)]
        if here < p.topk:
            parts.append(distinct(p, even[p.local:], p.topk - here) + p.local)
        ids = torch.cat(parts, 1)
        return ids.gather(1, torch.rand(p.tokens, p.topk, device=p.device).argsort(1)).int()
    if p.routing == "hot-rank-twice" and p.ranks > 1:
        here = min(-(-2 * p.topk // p.ranks), p.topk)
        parts = [distinct(p, even[:p.local], min(p.local, here - first)) for first in range(0, here, p.local)]
        if here < p.topk:
            parts.append(distinct(p, even[p.local:], p.topk - here) + p.local)
        return torch.cat(parts, 1).int()
    if p.routing == "hot-expert" and p.experts - 1 >= p.topk - p.topk // 2:
        hot = torch.zeros(p.tokens, p.topk // 2, device=p.device, dtype=torch.long)
        return torch.cat([hot, distinct(p, even[1:], p.topk - p.topk // 2) + 1], 1).int()
    return distinct(p, even, p.topk).int()


class Inputs:
    """Of one rank: x, ids, weight, d_out, and the experts' w13 [el][2 I][H] (gate, then up) and w2 [el][H][I]."""

    def __init__(self, p, seed=100):
        torch.manual_seed(seed + p.rank)
        normal = lambda *shape: torch.randn(*shape, device=p.device).bfloat16()
        self.x, self.d_out = normal(p.tokens, p.hidden), normal(p.tokens, p.hidden)
        self.ids = route(p).contiguous()
        self.weight = torch.softmax(torch.randn(p.tokens, p.topk, device=p.device), 1).contiguous()
        self.w13 = normal(p.local, 2 * p.intermediate, p.hidden) * 0.02
        self.w2 = normal(p.local, p.hidden, p.intermediate) * 0.02
