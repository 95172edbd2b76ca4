#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A layer through mokd beside PyTorch baselines, all in one process a rank and in turn on a warm card. Prints JSON lines of the
form that mok-bench has. Starts mokd (of MOK_BUILD_DIR) and a process a rank by itself."""
import argparse
import itertools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "gpu")]


def arguments():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--shape", default="kimi,glm,qwen,dsv4")
    a.add_argument("--routing", default="uniform", help="uniform, zipf, hot-rank, hot-rank-twice, hot-expert; several with commas")
    a.add_argument("--candidates", default="mok,strong,naive", help="which of mok, mok16 (weight gradients in BF16), strong, naive; several with commas")
    a.add_argument("--baseline", help="another baseline's directory (common.py, libglue.so), as one more candidate; EP 1 only")
    a.add_argument("--ops", default="forward,backward", help="forward alone needs less memory")
    a.add_argument("--context", default="full", choices=("full", "recompute"))
    a.add_argument("--ep", type=int, default=1)
    a.add_argument("--gpus", type=int, default=0, help="that the ranks are spread over; 0: one a rank")
    a.add_argument("--first-gpu", type=int, default=0, help="of those")
    a.add_argument("--tokens", default="2048", help="of a rank; several with commas")
    a.add_argument("--rounds", type=int, default=30)
    a.add_argument("--memory", type=int, default=40, help="GiB that mokd may use of a device")
    a.add_argument("--limit", type=float, default=540, help="seconds for everything; no further shape is begun behind three quarters of it")
    a.add_argument("--sweep", help="forward through mokd alone, with an option of the layer: comm_units=0,4,8 or minibatch_rows=...; 0: the plan's choice")
    a.add_argument("--spans", action="store_true", help="no times: a forward through mokd, one at a time and eight in a row, as mokctl trace sees it; one shape and routing")
    a.add_argument("--check", action="store_true", help="no times: how far every candidate is from FP64, small shapes, all routings")
    o = a.parse_args()
    if o.spans and "," in o.shape + o.routing:
        a.error(f"--spans is of one --shape and one --routing, not of {o.shape} and {o.routing}")
    try:
        o.tokens = [int(t) for t in o.tokens.split(",")]
    except ValueError:
        a.error(f"--tokens is {o.tokens}, must be numbers with commas")
    return o


# ---------------------------------------------------------------- the process that starts the others

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(children, seconds):
    until = time.monotonic() + seconds
    while any(c.poll() is None for c in children) and time.monotonic() < until and not any(c.poll() for c in children):
        time.sleep(0.05)
    if any(c.poll() for c in children):
        time.sleep(2)  # the others may have more to say
    late = [c for c in children if c.poll() is None]
    for c in late:
        c.terminate()
    for c in late:
        try:
            c.wait(5)
        except subprocess.TimeoutExpired:
            c.kill()
            c.wait()
    if late and not any(c.poll() for c in children if c not in late):
        print(f"peers: not done within {seconds:.0f} s", file=sys.stderr)
    return max(abs(c.returncode) for c in children)


def start(o):
    daemon, children, run, begun = None, [], None, time.monotonic()
    gpus, with_mokd = o.gpus or o.ep, o.sweep or o.spans or not {"mok", "mok16"}.isdisjoint(o.candidates.split(","))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mok-peers-"))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(o.ep)}
    if os.environ.get("MOK_TEST_MPS_PIPE"):
        environment["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["MOK_TEST_MPS_PIPE"]
    if not os.environ.get("MOK_PEERS_GLUE"):
        import glue
        environment["MOK_PEERS_GLUE"] = glue.build()
    try:
        if o.spans:
            import spans
            run = spans.Run()
            environment["MOK_PEERS_SPANS"] = str(run.folder)
        if with_mokd:
            environment["MOK_SOCKET"], environment["MOK_PEERS_UP"] = str(folder / "s"), str(folder / "up")
        children = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env={**environment, "MOK_PEERS_RANK": str(r), "RANK": str(r), "LOCAL_RANK": str(r)})
                    for r in range(o.ep)]
        if with_mokd:  # while the ranks load PyTorch, which takes longer
            import daemon as daemons
            daemon = daemons.Daemon(o.ep, gpus, o.memory, first_gpu=o.first_gpu, folder=folder)
            daemon.await_up()
            (folder / "up").touch()
        for how in spans.HOW if run else ():
            run.take(daemon.socket, how, o.limit / 2)
        code = wait_for(children, max(o.limit - (time.monotonic() - begun), 1))
        if code and daemon:
            print(daemon.log(), file=sys.stderr)
        return 1 if code else 0
    finally:
        for c in children:
            if c.poll() is None:
                c.kill()
                c.wait()
        if daemon:
            daemon.stop()
        if run:
            run.close()
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- a rank

def await_mokd(seconds=60):
    """Until the starter says that all devices are up."""
    up, until = os.environ.get("MOK_PEERS_UP"), time.monotonic() + seconds
    while up and not os.path.exists(up):
        if time.monotonic() > until:
            raise SystemExit(f"peers: mokd is not up after {seconds} s")
        time.sleep(0.02)


def other_baseline(path, p, inputs):
    """Class Core of another baseline's common.py, for one rank; tokens must name distinct experts."""
    sys.path.append(path)
    import common
    core = common.Core(p.tokens, p.topk, p.local, p.first, p.hidden, p.intermediate, inputs.w13, inputs.w2, bwd=True)
    ids = inputs.ids.long()
    return core, (lambda: core.fwd(inputs.x, ids, inputs.weight)), (lambda: (core.fwd(inputs.x, ids, inputs.weight), core.bwd(inputs.d_out)))


class Candidates:
    """What is compared on one problem: name -> op -> something to call."""

    def __init__(self, o, p, inputs, ranks, number, timed=True):
        import timing
        import torch
        names = o.candidates.split(",")
        self.back = "backward" in o.ops
        self.calls, self.errors, self.mok, self.strong = {}, {}, None, None
        results = {}
        barrier = (lambda: ranks.dist.barrier()) if p.ranks > 1 else None
        if "strong" in names and (p.ranks == 1 or ranks.nccl):
            import glue
            import strong
            self.strong = s = strong.Strong(p, inputs, glue.Glue(), self.back)
            results["strong"] = [s.forward().clone()] + ([*(t.clone() for t in s.backward()), s.dw13.clone(), s.dw2.clone()] if self.back else [])
            self.graphs = [timing.graph(f, barrier) for f in ([s.forward, s.both] if self.back else [s.forward])] if timed else []
            self.calls["strong"] = dict(zip(("forward", "forward+backward"), (g.replay for g in self.graphs)))
        if "naive" in names and (p.ranks == 1 or ranks.nccl):
            import naive
            n = naive.Naive(p, inputs)
            results["naive"] = list(n.both()) if self.back else [n.forward()]
            self.calls["naive"] = {"forward": n.forward, **({"forward+backward": n.both} if self.back else {})}
        if o.baseline and p.ranks == 1 and p.routing != "hot-expert" and p.local in (4, 6, 8, 10):
            core, forward, both = other_baseline(o.baseline, p, inputs)
            results["other"] = [forward().clone()]
            graphs = [timing.graph(f) for f in ([forward, both] if self.back else [forward])]
            self.calls["other"] = dict(zip(("forward", "forward+backward"), (g.replay for g in graphs)))
            self.other = core, forward, both, graphs  # with the memory that the graphs use
        if "mok" in names:
            import mok
            self.mok = m = mok.Mok(p, inputs, os.environ["MOK_SOCKET"], f"peers{number}", backward=self.back,
                                   context={"full": mok.FULL, "recompute": mok.RECOMPUTE}[o.context])
            first = None
            for _ in range(1 if timed else 3):  # a repeat gives the same bits
                (m.both if self.back else m.forward)()
                if m.cuda:
                    torch.cuda.synchronize()
                self.rows = m.reap()
                bits = [t.clone() for t in ([m.out, m.d_x, m.d_weight, m.d_gate, m.d_down] if self.back else [m.out])] if not timed else []
                first = first or bits
                if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, bits)):
                    raise SystemExit("peers: mok's repeat differs")
            results["mok"] = [m.out] + ([m.d_x, m.d_weight, torch.cat([m.d_gate, m.d_up], 1), m.d_down] if self.back else [])
            self.calls["mok"] = {"forward": m.forward, **({"backward": m.backward, "forward+backward": m.both} if self.back else {})}
        self.mok16 = self.with_bf16_gradients(o, p, inputs, number, results) if "mok16" in names and self.back else None
        self.results = results  # until they are compared

    def with_bf16_gradients(self, o, p, inputs, number, results):
        """Backward alone is its own; None where libmok or mokd has no such gradients."""
        import mok
        import torch
        try:
            m = mok.Mok(p, inputs, os.environ["MOK_SOCKET"], f"peers16-{number}", context={"full": mok.FULL, "recompute": mok.RECOMPUTE}[o.context],
                        gradient_dtype=mok.DTYPE_BF16)
        except RuntimeError as e:
            print(f"peers: no BF16 weight gradients: {e}", file=sys.stderr)
            return None
        m.both()
        m.reap()
        results["mok16"] = [m.out, m.d_x, m.d_weight, torch.cat([m.d_gate, m.d_up], 1), m.d_down]
        self.calls["mok16"] = {"backward": m.backward, "forward+backward": m.both}
        return m

    def reap(self):
        for m in (self.mok, self.mok16):
            if m:
                m.reap()

    def compare(self, want=None):
        """Against `want`, or each against the first."""
        import check
        want = want or next(iter(self.results.values()))
        found = {n: check.errors(r, want) for n, r in self.results.items() if r is not want}
        self.results = {}
        return found

    def close(self):
        for m in (self.mok, self.mok16):
            if m:
                m.close()


def transfers(strong, p, ranks, number=20):
    """The strong baseline's two transfers alone: GB/s into each GPU, all at once."""
    import measure
    both = strong.between
    found = measure.in_rows({"gather": lambda: (both.gather(strong.x, strong.ids, strong.weight)), "pull": lambda: (both.barrier(), both.pull(both.sum[0]))}, ranks, lambda: None, 3, number)
    size = (p.ranks - 1) * p.tokens * p.hidden * 2
    return {n + "_gb_s": size / ms * 1e-6 for n, ms in found.items()}


def traffic(p, inputs, ranks, mok, forward_ms):
    """Bytes that mok's forward moves into the busiest GPU: rows pulled for its experts and results pushed for its tokens; and
    what the links say, over a hundred forwards."""
    import measure
    import torch
    ids = inputs.ids.long()
    to = torch.bincount((ids[ids >= 0] // p.local), minlength=p.ranks).float()
    once = torch.stack([(ids // p.local == r).any(1).sum() for r in range(p.ranks)]).float()
    sent, unique = torch.stack(ranks.gathered(to)), torch.stack(ranks.gathered(once))
    foreign = lambda m: (m.sum(0) - m.diag() + m.sum(1) - m.diag()).max().item() * p.hidden * 2
    found = {"link_bytes": foreign(sent), "link_bytes_once_a_rank": foreign(unique), "link_gb_s_if_spread": foreign(sent) / forward_ms * 1e-6}
    gpu = torch.cuda.current_device()
    before = measure.link_bytes(gpu)
    for _ in range(5):
        for _ in range(20):
            mok.forward()
        torch.cuda.synchronize()
        mok.reap()
    after = measure.link_bytes(gpu)
    seen = (after[1] - before[1]) / 100 if before and after else -1.0
    found["link_bytes_seen"] = ranks.largest([seen])[0]
    return found


def measure_one(o, p, ranks, dense, number):
    import measure
    import problem
    inputs = problem.Inputs(p)
    c = Candidates(o, p, inputs, ranks, number)
    errors = c.compare()
    entries = {(n, op): f for n, calls in c.calls.items() for op, f in calls.items()}
    entries["dense", ""] = dense.graph.replay
    after = c.reap
    dense.warm(30)
    ms = measure.alternate(entries, o.rounds, ranks, after, [k for k in entries if k[0] == "naive"])
    row = measure.in_rows({k: f for k, f in entries.items() if k[0] in ("mok", "mok16", "strong", "dense")}, ranks, after)
    for t in (ms, row):
        for n in c.calls:
            if (n, "forward+backward") in t and (n, "backward") not in t:
                t[n, "backward"] = t[n, "forward+backward"] - t[n, "forward"]
    rate = 2 * measure.DENSE**3 * 1e-9 / ms["dense", ""]  # TFLOP/s
    first = "mok" if c.mok else "strong" if c.strong else next(iter(c.calls))
    extra = {"sharing": ("mps" if os.environ.get("MOK_TEST_MPS_PIPE") else "slices") if c.mok else None, "gpus": o.gpus or o.ep, "context": o.context,
             "errors": errors, "how": "through mokd" if c.mok else "CUDA graph"}
    if c.mok:
        extra["busiest_rows"] = int(ranks.largest([float(c.rows)])[0])
    if c.strong and p.ranks > 1:
        extra.update(transfers(c.strong, p, ranks))
    if c.mok and p.ranks > 1:
        extra.update(traffic(p, inputs, ranks, c.mok, ms["mok", "forward"]))
    for op in measure.OPS:
        if (first, op) not in ms:
            continue
        own, gflop, theirs = ms[first, op], p.gflop(op), ms.get(("strong", op)) if first != "strong" else None
        record = {**measure.origin(), "engine": "cuda" if c.mok else "torch", "op": op, "precision": "bf16", "shape": p.name, "ep": p.ranks, "tokens": p.tokens,
                  "routing": p.routing, "ms": own, "gflop": gflop, "dense_tflops": rate, "peer": "strong unfused baseline, same loop" if theirs else None,
                  "peer_ms": theirs, "command": measure.command(), "share_of_dense": gflop / own / rate}
        record["of"] = first
        if theirs:
            record["over_peer"], record["peer_share_of_dense"] = own / theirs, gflop / theirs / rate
        for n, member in (("naive", "naive_ms"), ("other", "other_ms"), ("mok16", "bf16_gradients_ms")):
            if (n, op) in ms:
                record[member] = ms[n, op]
        if (first, op) in row:
            record["queued_ms"], record["queued_peer_ms"] = row[first, op], row.get(("strong", op)) if first != "strong" else None
        if c.mok and p.ranks > 1:  # what the busiest rank's products alone would take
            record["floor_ms"] = extra["busiest_rows"] / (p.tokens * p.topk) * gflop / rate
        if ranks.rank == 0:
            measure.emit({**record, **extra})
    c.close()


def sweep_one(o, p, ranks, dense):
    """One layer a setting, all in turn."""
    import measure
    import mok
    import problem
    option, _, settings = o.sweep.partition("=")
    inputs, layers = problem.Inputs(p), {}
    for setting in settings.split(","):
        layers[setting] = mok.Mok(p, inputs, os.environ["MOK_SOCKET"], f"{p.name}-{option}-{setting}", backward=False, **{option: int(setting)})
        layers[setting].forward()
        layers[setting].reap()
    entries = {**{s: m.forward for s, m in layers.items()}, "dense": dense.graph.replay}
    ms = measure.alternate(entries, o.rounds, ranks, lambda: [m.reap() for m in layers.values()])
    for setting, m in layers.items():
        if ranks.rank == 0:
            measure.emit({**measure.origin(), "engine": "cuda", "op": "forward", "precision": "bf16", "shape": p.name, "ep": p.ranks, "tokens": p.tokens,
                          "routing": p.routing, "ms": ms[setting], "gflop": p.gflop("forward"), "dense_tflops": 2 * measure.DENSE**3 * 1e-9 / ms["dense"],
                          "command": measure.command(), "sharing": "mps" if os.environ.get("MOK_TEST_MPS_PIPE") else "slices", "gpus": o.gpus or o.ep, "sweep": option, "setting": int(setting), "over_plan": ms[setting] / ms["0"] if "0" in ms else None})
        m.close()


def run_for_spans(o, p, ranks, dense):
    import measure
    import mok
    import problem
    import spans
    m = mok.Mok(p, problem.Inputs(p), os.environ["MOK_SOCKET"], "spans", backward=False)
    dense.warm()
    for how in spans.HOW:
        path = spans.Run(os.environ["MOK_PEERS_SPANS"]).play(m, ranks, how)
        about = {**measure.origin(), "op": "forward", "shape": p.name, "ep": p.ranks, "tokens": p.tokens, "routing": p.routing, "gpus": o.gpus or o.ep,
                 "sharing": "mps" if os.environ.get("MOK_TEST_MPS_PIPE") else "slices", "command": measure.command(), "how": how}
        for record in spans.records(path, about) if path and ranks.rank == 0 else ():
            measure.emit(record)
    m.close()


def check_all(o, ranks):
    """Exit code 1 if a candidate is further from FP64 than BF16 explains."""
    import check
    import problem
    bad, number = 0, 0
    for name, tokens in (("tiny", 96), ("small", 333), ("tiny", 5)):
        for routing in problem.ROUTINGS:
            p = problem.make(name, ranks.ranks, ranks.rank, tokens, routing)
            inputs = problem.Inputs(p)
            want = check.reference(p, inputs, ranks)
            c = Candidates(o, p, inputs, ranks, f"-check{number}", timed=False)
            number += 1
            for candidate, found in c.compare(want).items():
                wrong = ranks.largest([float(not all(e < check.BOUND for e in found.values()))])[0] > 0  # a NaN is too
                bad += wrong
                if ranks.rank == 0:
                    print(f"check: EP {ranks.ranks}, {name}, {tokens} tokens, {routing}, {candidate}: {'WRONG' if wrong else 'ok'} {found}", file=sys.stderr, flush=True)
            c.close()
    return 1 if bad else 0


def play(o):
    import gc
    import measure
    import problem
    import torch
    begun = time.monotonic()
    ranks = measure.Ranks(o.ep, int(os.environ["MOK_PEERS_RANK"]), o.gpus or o.ep, o.first_gpu)
    await_mokd()
    torch.set_grad_enabled(False)
    with torch.cuda.stream(torch.cuda.Stream()):
        if o.check:
            torch.set_grad_enabled(True)
            code = check_all(o, ranks)
        else:
            dense, number, code = measure.Dense(), 0, 0
            for name, tokens, routing in itertools.product(o.shape.split(","), o.tokens, o.routing.split(",")):
                if ranks.largest([time.monotonic() - begun])[0] > 0.75 * o.limit:
                    print(f"peers: {name}, {tokens} tokens, {routing} left out, {o.limit:.0f} s are nearly over", file=sys.stderr)
                    code = 1
                    continue
                p = problem.make(name, o.ep, ranks.rank, tokens, routing)
                if o.sweep:
                    sweep_one(o, p, ranks, dense)
                elif o.spans:
                    run_for_spans(o, p, ranks, dense)
                else:
                    measure_one(o, p, ranks, dense, number)
                number += 1
                gc.collect()
                torch.cuda.empty_cache()
                if ranks.rank == 0:
                    print(f"peers: [{time.monotonic() - begun:.0f} s] {name}, {tokens} tokens, {routing}", file=sys.stderr, flush=True)
    ranks.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # symmetric memory and NCCL need no orderly end


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = arguments()
    if "MOK_PEERS_RANK" in os.environ:
        play(options)
    else:
        sys.exit(start(options))
