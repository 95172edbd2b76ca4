#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of README.md and tests/bench/README.md from tests/bench/results/*.jsonl.

Between `<!-- table NAME -->` and `<!-- end table -->` stands what this script makes of NAME's records:
    tables.py            rewrites both
    tables.py --print    prints the tables, changes nothing
    tables.py --check    exit code 1 when one is not what the results say
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"


def of_file(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")] if path.exists() else []


def records(name):
    """Of NAME.jsonl; a table of the CUDA engine also has what ep_scaling.sh wrote of its kind, ep<N>.jsonl. Of figures of the
    same thing the last one counts."""
    if name not in KINDS:
        return of_file(RESULTS / f"{name}.jsonl")
    paths = [RESULTS / f"{name.removesuffix('-more')}.jsonl", *sorted(RESULTS.glob("ep*.jsonl"))]
    what = ("shape", "op", "ep", "tokens", "routing", "sharing", "what", "peer", "sweep", "setting", "how", "rank")
    return list({(r.get("gpus") or r.get("ep"), *(r.get(k) for k in what)): r for path in paths for r in of_file(path) if KINDS[name](r)}.values())


def number(value, digits=2):
    return "-" if value is None else f"{value:,.{digits}f}"


SHOWN = 4  # commands below a table


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def build(r):
    return r.get("commit") or f"of {r['date']}"


def origin(rs):
    """When, on what, of which builds, and how; of many commands the first ones, since a row's own stands in its record."""
    first = rs[0]
    builds = sorted({build(r) for r in rs}) if first["device"].startswith("NVIDIA") else []
    commands = sorted({r["command"] for r in rs})
    more = f", and {len(commands) - SHOWN} more" if len(commands) > SHOWN else ""
    of = f"build {', '.join(builds)}; " if builds else ""
    return f"{first['date']}, {first['device']}; {first['driver']}; {of}" + ", ".join(f"`{c}`" for c in commands[:SHOWN]) + more


def queue(rs):
    rows = [[r["shape"], number(r["p50_us"], 1), number(r["p99_us"], 1)] for r in rs]
    return table(["no-op round trip", "p50 us", "p99 us"], rows)


def layer(rs):
    rows = [[r["shape"], r["op"], str(r["ep"]), str(r["tokens"]), r["routing"], number(r["ms"]),
             number(r["gflop"] / r["ms"] * 1e3, 1), number(r["peer_ms"] / r["ms"])] for r in rs]
    return table(["shape", "op", "EP", "tokens a rank", "routing", "ms", "GFLOP/s a rank", "of SGEMM"], rows)


def sweep(rs):
    rows = [[r["sweep"], r["setting"], r["op"], str(r["ep"]), str(r["threads"]), number(r["ms"]), number(r["relative"]),
             f"{r['schedule_share'] * 100:.2f} %", number(r["over_larger_part"])] for r in rs]
    head = ["sweep", "setting", "op", "EP", "threads", "ms", "over the first setting", "schedule", "over larger part"]
    return table(head, rows)


def peer(rs):
    rows = [[r["shape"], r["op"], str(r["ep"]), r["routing"], number(r["ms"]), number(r["peer_ms"]),
             number(r["peer_ms"] / r["ms"])] for r in rs]
    return table(["shape", "op", "EP", "routing", "MoK ms", "plain all-to-all ms", "plain over MoK"], rows)


def mxfp8(rs):
    rows = [[r["values"], r["rule"], number(r["value_error"], 6), number(r["product_error"], 6),
             f"{r['differs_from_per32'] * 100:.4f} %"] for r in rs]
    return table(["values", "scale rule", "error of the values", "error of a product", "values that differ from per32"], rows)


# A public unfused FP8 pipeline's forward of each shape, 2,048 tokens, EP 1, in ms, and the dense BF16 rate beside it in TFLOP/s.
PUBLIC_FP8_MS, PUBLIC_FP8_DENSE = {"kimi": 1.41, "glm": 1.28, "qwen": 0.62, "dsv4": 1.55}, 690


def over_public(r, dense_tflops):
    """A forward's time over the public pipeline's, had this card's dense rate been beside it."""
    if not dense_tflops or r["op"] != "forward" or r["shape"] not in PUBLIC_FP8_MS:
        return None
    return r["ms"] * dense_tflops / (PUBLIC_FP8_MS[r["shape"]] * PUBLIC_FP8_DENSE)


def mxfp8_cuda(rs):
    """Lines of tests/gpu/bench.py --precision mxfp8: what MXFP8 is beside BF16, and a dense product, in the same loop."""
    of = {(r["shape"], r["what"]): r for r in rs}
    rows = []
    for r in sorted((r for r in rs if "times_as_fast" in r), key=order):
        dense = of[r["shape"], "dense"]["tflops"]
        rows.append([r["shape"], "128 x 128" if "tiles" in r["what"] else "1 x 128", number(of[r["shape"], "mok"]["ms"], 3), number(r["ms"], 3),
                     number(r["times_as_fast"], 3), number(r["b2b_times_as_fast"], 3), number(dense, 0), number(over_public(r, dense), 3)])
    return table(["shape", "weights", "BF16 ms", "MXFP8 ms", "times as fast", "in a row", "dense BF16, TFLOP/s", "over the public pipeline"], rows)


def mxfp8_forward_cuda(rs):
    """Lines of tests/gpu/builds.py: what each way of the forward gave, the kept one among them."""
    rows = [[r["shape"], r["what"], number(r["bf16_ms"], 3), number(r["ms"], 3), number(r["times_as_fast"]), number(r["b2b_times_as_fast"])] for r in sorted(rs, key=order)]
    return table(["shape", "build", "BF16 ms", "MXFP8 ms", "times as fast as BF16, in turns", "in a row"], rows)


WAYS = {" tiles": "weights turned by the engine", " given": "given transposed, too", " given w8": "and MXFP8 weight gradients"}


def in_row_and_paused(r):
    return f"{number(r['b2b_ms'], 3)} ({number(r['b2b_times_as_fast'])}; {number(r['times_as_fast'])})"


def mxfp8_backward_cuda(rs):
    """Lines of tests/gpu/both.py: weights that the engine turns, that are given transposed, and MXFP8 weight gradients beside these."""
    timed = {(r["shape"], r["what"]): r for r in rs}
    rows = []
    for shape in dict.fromkeys(s for s, _ in timed):
        for op, end in (("backward", ""), ("forward+backward", " both")):
            rows.append([shape, op, number(timed[shape, f"bf16{end}"]["b2b_ms"], 3), *(in_row_and_paused(timed[shape, f"mok{way}{end}"]) for way in WAYS)])
    return table(["shape", "op", "BF16 ms", *WAYS.values()], rows)


def mxfp8_turned_cuda(rs):
    """The same of two builds: weight gradients' operands turned by a kernel of its own, and where they are made."""
    timed = {(r["shape"], r["what"]): r for r in rs}
    rows = []
    for shape in dict.fromkeys(s for s, _ in timed):
        for op, end in (("backward", ""), ("forward+backward", " both")):
            rows.append([shape, op, number(timed[shape, f"bf16{end}"]["b2b_ms"], 3), *(in_row_and_paused(timed[shape, f"{build} given w8{end}"]) for build in ("mok", "turn"))])
    return table(["shape", "op", "BF16 ms", "turned by a kernel of its own", "turned in d_hidden's epilogue"], rows)


def scales_cuda(rs):
    """Lines of tests/gpu/scales.py: what a rule of scales costs, with BF16 and with MXFP8 weight gradients."""
    rules = {"bf16": "BF16", "per128 tiles": "128 values", "per128 tiles wgrad": "with MXFP8 weight gradients", "per32": "32 values", "per32 wgrad": "with MXFP8 weight gradients"}
    timed = {(r["shape"], r["op"], r["what"]): r for r in rs}
    cell = lambda r: f"{number(r['ms'], 3)} ({number(r['times_as_fast'])})"
    rows = [[r["shape"], r["op"], *(cell(timed[r["shape"], r["op"], rule]) for rule in rules)]
            for r in sorted((r for r in timed.values() if r["what"] == "bf16"), key=order)]
    return table(["shape", "op", *rules.values()], rows)


def mxfp8_mokd(rs):
    """Through mokd, by mok-bench layer --beside-bf16: an operation of MXFP8 and the same of BF16, in turn. The build is told
    since not all rows are of one."""
    rows = []
    for r in sorted((r for r in rs if "bf16_ms" in r), key=lambda r: (order(r), r["wgrad"], r["transposed"])):
        weights = ("128 x 128" if "tiles" in r["precision"] else "1 x 128") + (", transposed too" if r["transposed"] else "")
        rows.append([r["shape"], r["op"], weights, r["wgrad"] if "backward" in r["op"] else "-", number(r["bf16_ms"], 3), number(r["ms"], 3),
                     number(r["bf16_ms"] / r["ms"], 3), number(r["bf16_queued_ms"] / r["queued_ms"], 3), number(r["dense_tflops"], 0),
                     number(over_public(r, r["dense_tflops"]), 3), r["commit"]])
    return table(["shape", "op", "weights", "weight gradients", "BF16 ms", "MXFP8 ms", "times as fast", "eight queued", "dense BF16, TFLOP/s", "over the public pipeline", "build"], rows)


def quantize_cuda(rs):
    rows = [[r["shape"], r["form"], number(r["ms"], 4), f"{r['gb_per_s']:,}", f"{r['copy_gb_per_s']:,}", number(r["of_copy"], 3)] for r in rs]
    return table(["weights", "form", "ms", "GB/s read and written", "a copy's GB/s", "of a copy"], rows)


def train_mxfp8(rs):
    rows = [[r["what"], str(r["steps"]), number(r["bf16_loss"][-1], 4), number(r["loss"][-1], 4), f"{r['last'] * 100:.2f} %",
             f"{r['furthest'] * 100:.2f} %", f"{r['on_average'] * 100:.2f} %"] for r in rs]
    return table(["run", "steps", "BF16's loss at the end", "its own", "away at the end", "at most", "on average"], rows)


def order(r):
    """Shapes and operations as they are told of."""
    shapes, ops = ["kimi", "glm", "qwen", "dsv4", "mixtral", "qwen3-30b", "small"], ["forward", "backward", "forward+backward"]
    place = lambda known, value: known.index(value) if value in known else len(known)
    return r.get("ep") or 1, r.get("routing") != "uniform", r.get("routing") or "", r.get("tokens") or 0, place(shapes, r["shape"]), place(ops, r["op"])


def percent(value):
    return "-" if value is None else f"{value * 100:.1f} %"


def layer_cuda(rs):
    """In process, beside a baseline: lines of tests/gpu/bench.py, and of tests/gpu/two_gpus.py with a peer put in."""
    rows = []
    for r in sorted((r for r in rs if r.get("what") not in ("baseline", "dense")), key=order):
        over = r.get("over_baseline") or (r["ms"] / r["peer_ms"] if r.get("peer_ms") else None)
        peer_ms = r.get("peer_ms") or (r["ms"] / over if over else None)
        what = r.get("peer") or r.get("what") or "-"
        rows.append([r["shape"], r["op"], str(r["ep"]), number(r["ms"], 3), number(peer_ms, 3), number(over, 3), percent(r["share_of_dense"]), what, build(r)])
    return table(["shape", "op", "EP", "ms", "baseline ms", "over the baseline", "of dense", "entry or baseline", "build"], rows)


def daemon_cuda(rs):
    rows = [[r["shape"], r["op"], str(r["ep"]), str(r.get("gpus", 1)), r["routing"], r["sharing"], number(r["ms"], 3), number(r["peer_ms"], 3), number(r["cost_us"], 0),
             number(r["queued_cost_us"], 0), build(r)] for r in sorted(rs, key=lambda r: (r["sharing"], order(r)))]
    return table(["shape", "op", "EP", "GPUs", "routing", "sharing", "through mokd ms", "in process ms", "cost us", "cost us, eight queued", "build"], rows)


def mokd_cuda(rs):
    """Through mokd beside our own PyTorch baselines: lines of peers/layer.py."""
    rows = []
    for r in sorted(rs, key=order):
        naive = r.get("naive_ms")
        rows.append([r["shape"], r["op"], str(r["ep"]), f"{r['tokens']:,}", r["routing"], r["sharing"], number(r["ms"], 3), number(r["peer_ms"], 3), number(r.get("over_peer"), 3),
                     number(r.get("bf16_gradients_ms"), 3), percent(r["share_of_dense"]), percent(r.get("peer_share_of_dense")), number(r.get("other_ms"), 3), number(naive, 2), number(naive / r["ms"]) if naive else "-",
                     number(r["ms"] / r["floor_ms"]) if r.get("floor_ms") else "-"])
    return table(["shape", "op", "EP", "tokens a rank", "routing", "sharing", "mokd ms", "strong ms", "over strong", "mokd, BF16 gradients ms", "of dense", "strong's", "other strong ms", "naive ms", "naive over mokd",
                  "over the busiest rank's floor"], rows)


def sweep_cuda(rs):
    rows = [[r["shape"], str(r["ep"]), str(r["gpus"]), r["sweep"], "the plan's choice" if r["setting"] == 0 else f"{r['setting']:,}", number(r["ms"], 3), number(r["over_plan"], 3)] for r in rs]
    return table(["shape", "EP", "GPUs", "option", "setting", "forward ms", "over the plan's"], rows)


def links_cuda(rs):
    """A forward's transfers into the GPU that gets most, as nvidia-smi counted them."""
    mb = lambda v: "-" if v is None or v < 0 else number(v * 1e-6, 0)
    rows = [[r["shape"], str(r["ep"]), r["routing"], r["sharing"], mb(r["link_bytes_seen"]), mb(r["link_bytes"]), number(r["link_bytes_seen"] / r["ms"] * 1e-6 if r["link_bytes_seen"] >= 0 else None, 0),
             number(r.get("gather_gb_s"), 0), number(r.get("pull_gb_s"), 0)] for r in sorted(rs, key=order)]
    return table(["shape", "EP", "routing", "sharing", "MB a forward", "with a pull a row", "GB/s, spread over the forward", "strong's gather alone, GB/s", "its pull, GB/s"], rows)


def spans_cuda(rs):
    """Lines of peers/layer.py --spans: phases of one operation on each rank. A rank's minibatches follow each other, so the first,
    one in the middle and the last one stand for all."""
    rows = []
    for r in rs:
        batches = sorted({s[1] for s in r["spans"] if s[1].startswith("minibatch")}, key=lambda name: int(name.split()[1]))
        told = {batches[0], batches[len(batches) // 2], batches[-1], "schedule and the rest"}
        rows += [[f"{r['how']}, {r['rank']}", what, "" if where == "schedule and the rest" else where, number(begin, 0), number(end, 0)] for what, where, begin, end in r["spans"] if where in told]
    return table(["how, rank", "what", "where", "from us", "to us"], rows)


def usual(r):
    return r["routing"] == "uniform" and r["tokens"] == 2048 and r["sharing"] == "mps"


KINDS = {"layer-cuda": lambda r: "share_of_dense" in r and "of" not in r and "date" in r and "cost_us" not in r, "daemon-cuda": lambda r: "cost_us" in r, "mokd-cuda": lambda r: r.get("of") == "mok" and usual(r),
         "mokd-cuda-more": lambda r: r.get("of") == "mok" and not usual(r), "sweep-cuda": lambda r: "over_plan" in r,
         "spans-cuda": lambda r: "spans" in r, "links-cuda": lambda r: r.get("of") == "mok" and r["op"] == "forward" and "link_bytes_seen" in r}


def restart(rs):
    rows = [[r["end"], r["shape"], str(r["tokens"]), number(r["recovered_ms"], 0), number(r["ms"], 0), number(r["max_ms"], 0)]
            for r in rs]
    return table(["mokd ends by", "shape", "tokens a rank", "session back ms", "next forward done ms", "slowest ms"], rows)


def sim(rs):
    rows = [[r["shape"], r["order"], f"{r['operations']:,}", "yes" if r["done"] else "no", number(r["over_busiest"], 3),
             number(r["bells_an_op"], 0), number(r["looks_an_op"], 1), str(r["visits_at_once"]), f"{r['schedule_slots']:,}", number(r["schedule_ms"])]
            for r in rs]
    head = ["nodes x devices", "order", "operations", "all done", "time over the busiest device's", "bells an op", "looks an op",
            "visits at once", "schedule: slots", "ms, one CPU thread"]
    return table(head, rows)


def groups(rs):
    rows = [[r["shape"], r["order"] + (", a node dies" if r["killed"] else ""), str(r["formed"]),
             "yes" if r["done"] and r["left"] == 0 else "no", f"{r['messages']:,}", number(r["messages_a_rank_and_call"]),
             f"{r['bytes']:,}", f"{r['largest']:,}", f"{r['busiest']:,}", number(r["form_ms"]),
             number(r["told_ms"]) if r["killed"] else "-"]
            for r in rs]
    head = ["nodes x devices", "joins", "groups formed", "all done, nothing left", "messages", "a rank and call", "bytes", "largest",
            "at the busiest node", "last join to commit, ms", "node's loss to the last end, ms"]
    return table(head, rows)


def metrics(rs):
    rows = []
    for r in rs:
        if r["op"] == "idle":
            rows += [["idle mokd, 2 devices", f"{r['mokd_cpu_percent']:.3f} % of a core, {r['mokd_resident_mb']:.1f} MB resident"],
                     ["idle worker", f"{r['worker_cpu_percent']:.3f} % of a core, {r['worker_resident_mb']:.1f} MB resident"]]
        else:
            few, many = r["scrapes_per_second"]
            rows += [["a scrape a second, of the cores of two devices", f"{r['cost_percent']:.3f} +- {r['cost_error']:.3f} %"],
                     [f"CPU of mokd and workers that a scrape of {r['scrape_bytes']:,} bytes costs, from {many} a second",
                      f"{r['scrape_ms']:.2f} +- {r['scrape_ms_error']:.2f} ms, {r['mokd_ms']:.2f} of them mokd's"],
                     [f"the same, from {few} a second", f"{r['few_scrape_ms']:.2f} +- {r['few_scrape_ms_error']:.2f} ms"],
                     ["throughput lost to a scrape a second, with the scraper on the same cores",
                      f"{r['throughput_percent']:.3f} +- {r['throughput_error']:.3f} %"],
                     ["counting an operation", f"{r['counting_ns']:.0f} ns, {r['counting_percent']:.4f} % of one of {r['ms'] * 1e3:.0f} us"]]
    return table(["what", "figure"], rows)


def crowd(rs):
    rows = [[r["shape"], f"{r['done']:,}", str(r["failed"]), number(r["ops_per_second"], 0), number(r["p50_ms"]), number(r["p99_ms"]),
             number(r["queue_p50_below_ms"]), number(r["queue_p99_below_ms"])] for r in rs]
    head = ["sessions x in flight", "done", "failed", "a second", "from submission p50 ms", "p99 ms", "waits for the device p50 below ms",
            "p99 below ms"]
    return table(head, rows)


def rack(rs):
    rows = [[r["shape"], number(r["p50_ms"]), number(r["p99_ms"]), number(r["leave_ms"]), number(r["one_node_p50_ms"])] for r in rs]
    return table(["a group over", "formed in ms, p50", "p99", "left in ms", "on one node, formed in ms"], rows)


def mesh(rs):
    rows = [[r["shape"], f"{r['commands']:,}", number(r["ms"], 0), number(r["per_ms"], 0), number(r["longest_gap_ms"], 1)] for r in rs]
    return table(["between", "commands", "ms", "commands a ms", "longest time without one, ms"], rows)


MAKERS = {
    "rack": rack, "mesh": mesh, "metrics": metrics, "crowd": crowd, "restart": restart, "sim-rack": sim,
    "sim-groups": groups, "layer-cuda": layer_cuda, "daemon-cuda": daemon_cuda, "mokd-cuda": mokd_cuda,
    "mokd-cuda-more": mokd_cuda, "sweep-cuda": sweep_cuda, "links-cuda": links_cuda, "spans-cuda": spans_cuda,
    "mxfp8": mxfp8, "mxfp8-cuda": mxfp8_cuda, "mxfp8-mokd": mxfp8_mokd, "mxfp8-backward-cuda": mxfp8_backward_cuda,
    "mxfp8-forward-cuda": mxfp8_forward_cuda, "mxfp8-turned-cuda": mxfp8_turned_cuda,
    "scales-cuda": scales_cuda, "quantize-cuda": quantize_cuda, "train-mxfp8": train_mxfp8, "queue": queue,
    "layer-host": layer, "sweep-host": sweep, "plain-host": peer,
}


def render(match):
    name = match.group(1)
    rs = records(name)
    body = MAKERS[name](rs) + f"\n\n<sub>{origin(rs)}</sub>" if rs else "(not measured yet)"
    return f"<!-- table {name} -->\n{body}\n<!-- end table -->"


PAGES = [ROOT / "README.md", ROOT / "tests" / "bench" / "README.md"]
BLOCK = re.compile(r"<!-- table ([\w-]+) -->\n.*?<!-- end table -->", flags=re.S)


def main():
    options = sys.argv[1:]
    if options not in ([], ["--print"], ["--check"]):
        sys.exit(f"tables.py: {' '.join(options)}: must be --print, --check or nothing")
    for path in PAGES:
        old = path.read_text()
        new = BLOCK.sub(render, old)
        if options == ["--print"]:
            for match in BLOCK.finditer(new):
                print(f"{match.group(1)}\n\n" + "\n".join(match.group(0).splitlines()[1:-1]) + "\n")
        elif options == ["--check"] and new != old:
            sys.exit(f"{path}: tables are not what tests/bench/results says; run tests/bench/tables.py")
        elif not options:
            path.write_text(new)


if __name__ == "__main__":
    main()
