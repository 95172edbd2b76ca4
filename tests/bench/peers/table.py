# SPDX-License-Identifier: Apache-2.0
"""Prints the JSON lines of layer.py and of mok-bench layer as tables. usage: table.py FILE..."""
import json
import sys


def cell(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def percent(value):
    return "-" if value is None else f"{100 * value:.1f} %"


def queued(r):
    return r["queued_ms"] / r["queued_peer_ms"] if r.get("queued_peer_ms") else None


COMMON = [("shape", lambda r: r["shape"]), ("op", lambda r: r["op"]), ("EP", lambda r: cell(r["ep"])), ("T", lambda r: cell(r["tokens"])),
          ("routing", lambda r: r["routing"]), ("sharing", lambda r: r.get("sharing") or "-"), ("ms", lambda r: cell(r["ms"]))]
TABLES = [
    ("beside the baselines", lambda r: "of" in r, COMMON + [
        ("of dense", lambda r: percent(r["share_of_dense"])), ("strong ms", lambda r: cell(r.get("peer_ms"))), ("of dense", lambda r: percent(r.get("peer_share_of_dense"))),
        ("over strong", lambda r: cell(r.get("over_peer"))), ("BF16 gradients ms", lambda r: cell(r.get("bf16_gradients_ms"))), ("naive ms", lambda r: cell(r.get("naive_ms"))), ("other ms", lambda r: cell(r.get("other_ms"))),
        ("queued, over strong", lambda r: cell(queued(r))), ("floor ms", lambda r: cell(r.get("floor_ms"))),
        ("MB in, computed", lambda r: cell(r["link_bytes"] * 1e-6, 0) if "link_bytes" in r else "-"),
        ("MB in, links say", lambda r: cell(r["link_bytes_seen"] * 1e-6, 0) if r.get("link_bytes_seen", -1) >= 0 else "-"),
        ("gather, pull GB/s", lambda r: f"{r['gather_gb_s']:.0f}, {r['pull_gb_s']:.0f}" if "gather_gb_s" in r else "-")]),
    ("sweeps", lambda r: "sweep" in r and "over_plan" in r, COMMON + [("setting", lambda r: f"{r['sweep']} {r['setting'] or 'plan'}"), ("over the plan's", lambda r: cell(r["over_plan"]))]),
    ("mok-bench layer", lambda r: "op" in r and "ms" in r and "of" not in r and "sweep" not in r, COMMON + [
        ("peer ms", lambda r: cell(r.get("peer_ms"))), ("peer", lambda r: r.get("peer") or "-"), ("cost us", lambda r: cell(r.get("cost_us"), 1)),
        ("queued, cost us", lambda r: cell(r.get("queued_cost_us"), 1))]),
]

lines = [json.loads(line) for path in sys.argv[1:] for line in open(path) if line.startswith("{")]
for title, belongs, columns in TABLES:
    rows = [r for r in lines if belongs(r)]
    if rows:
        print(f"\n{title}\n\n| " + " | ".join(h for h, _ in columns) + " |\n|" + "---|" * len(columns))
        for r in rows:
            print("| " + " | ".join(f(r) for _, f in columns) + " |")
