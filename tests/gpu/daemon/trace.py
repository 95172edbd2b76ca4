#!/usr/bin/env python3
"""mokctl trace of GPUs that train: operations, phases, and what the device did in each, from its own clock; nothing else is told.
usage: trace.py [FILE to keep the last trace in]; needs MOK_BUILD_DIR. Exit code 77: no GPU. MOK_TEST_MPS_PIPE: under that MPS."""
import collections, json, os, shutil, subprocess, sys, tempfile

from train import EMULATED, MOKCTL, Run, Stack, gpus

EVERYWHERE = {"forward", "backward", "schedule", "gate, up", "down", "d hidden", "d input", "wgrad", "reduce", "prepare"}
SLACK = 1000 # us: the end of an operation is when the dispatcher saw it


def names_of(ranks):
    return EVERYWHERE | ({"dispatch", "main", "waits for ranks to be ready"} if ranks > 1 else {"whole"})


def by_name(events):
    found = collections.defaultdict(list)
    for e in events:
        found[e["pid"] - 1, e["name"]].append(e)
    return found


def missing(ranks, found):
    return [(device, n) for device in range(ranks) for n in names_of(ranks) if not found[device, n]]


def trace(stack, ranks, out):
    """A second of a job that trains; another one where a slow machine did not get through a step in it."""
    job = Run(stack, f"traced{ranks}", "--engine", "cuda", "--ranks", str(ranks), "--steps", "1000000")
    for _ in range(60):
        assert job.process.poll() is None, open(job.out).read()
        subprocess.run([MOKCTL, "trace", "--seconds", "1", "--out", out], check=True)
        with open(out) as f:
            events = json.load(f)["traceEvents"]
        if not missing(ranks, by_name(events)):
            break
    job.process.terminate()
    assert job.process.wait(60) == 130, open(job.out).read()
    return events


def check(ranks, events):
    found, names = by_name(events), names_of(ranks)
    assert not missing(ranks, found), f"there is no {missing(ranks, found)}"
    assert not any(found[ranks, n] for n in names), "a device that did nothing tells of work"
    spans, begun = collections.defaultdict(list), {}
    for e in events: # the operations of each layer
        if e["ph"] == "b" and e.get("cat") == "operation":
            begun[e["id"]] = e
        elif e["ph"] == "e" and e.get("cat") == "operation":
            b = begun.pop(e["id"])
            spans[b["pid"], b["args"]["layer"]].append((b["ts"], e["ts"]))
    work = [e for e in events if e["ph"] == "X" and "macrobatch" in e.get("args", {})]
    for e in work: # what had not ended when the trace did is no operation of it
        of, end = spans[e["pid"], e["args"]["layer"]], e["ts"] + e["dur"]
        inside = any(a - SLACK <= e["ts"] and end <= b + SLACK for a, b in of)
        assert inside or not of or end > max(b for _, b in of), f"{e} is of no operation"
    print(f"  {ranks} ranks: {len(work)} pieces of work, {sum(map(len, spans.values()))} operations")
    for name in sorted(names):
        of = [e["dur"] for e in found[0, name] if "dur" in e]
        if of:
            print(f"    {name:12} {len(of):6} spans, {sum(of) / len(of):9.2f} us each")


def main():
    if gpus() == 0:
        print("skipped: no NVIDIA GPU here")
        return 77
    work = tempfile.mkdtemp(prefix="mok-trace-")
    stack = Stack(work)
    try:
        for ranks in (1,) if EMULATED else (1, 2):
            check(ranks, trace(stack, ranks, sys.argv[1] if len(sys.argv) > 1 else f"{work}/trace.json"))
        stack.stop()
    finally:
        for process in Run.all + [stack.mokd]:
            if process.poll() is None:
                process.kill()
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
