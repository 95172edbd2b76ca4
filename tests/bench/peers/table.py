# SPDX-License-Identifier: Apache-2.0
"""Prints layer.py's JSON lines as a table. usage: table.py FILE..."""
import json
import sys

HEAD = ("shape", "op", "EP", "T", "routing", "sharing", "ms", "of dense", "strong ms", "of dense", "over strong", "naive ms", "other ms", "queued over strong", "floor ms")


def cell(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def percent(value):
    return "-" if value is None else f"{100 * value:.1f} %"


print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
for path in sys.argv[1:]:
    for line in open(path):
        r = json.loads(line) if line.startswith("{") else {}
        if "share_of_dense" not in r or "of" not in r:
            continue
        queued = r["queued_ms"] / r["queued_peer_ms"] if r.get("queued_peer_ms") else None
        print("| " + " | ".join([r["shape"], r["op"], str(r["ep"]), str(r["tokens"]), r["routing"], r.get("sharing") or "-", cell(r["ms"]), percent(r["share_of_dense"]),
                                 cell(r.get("peer_ms")), percent(r.get("peer_share_of_dense")), cell(r.get("over_peer")), cell(r.get("naive_ms")), cell(r.get("other_ms")),
                                 cell(queued), cell(r.get("floor_ms"))]) + " |")
