# SPDX-License-Identifier: Apache-2.0
"""The scripts for GPU machines are Python, and mok.py's structures are those of mok.h. Needs neither PyTorch nor a GPU.
usage: test_peers.py ABI, the program of abi.c."""
import ast
import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile
import types

HERE = pathlib.Path(__file__).resolve().parent
for path in [*HERE.glob("*.py"), *(HERE.parent.parent / "gpu").glob("*.py")]:
    ast.parse(path.read_text(), str(path))

torch = types.ModuleType("torch")  # its names are all that mok.py takes of it when it is imported
torch.bfloat16 = torch.float32 = torch.int32 = torch.uint8 = None
sys.modules["torch"] = torch
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE))
import mok

failed = 0
for line in subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True).stdout.splitlines():
    name, size, member, offset = line.split()
    mirror = getattr(mok, name)
    sizes = {ctypes.sizeof(mirror), mok.LAYER_BEFORE_GRADIENT_DTYPE} if name == "Layer" else {ctypes.sizeof(mirror)}
    if int(size) not in sizes or int(offset) != getattr(mirror, member).offset:
        failed += 1
        print(f"{name}: mok.h has {size} bytes and {member} at {offset}, mok.py {sorted(sizes)} and {getattr(mirror, member).offset}")
import spans

with tempfile.TemporaryDirectory() as folder:  # three operations, 100 us one behind the other; the second one's products begin later
    trace, late = pathlib.Path(folder) / "trace.json", (0, 5, 0)
    events = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "phases"}}]
    for n in range(3):
        events += [{"ph": "X", "pid": 1, "tid": 2, "name": what, "ts": 100 * n + begin, "dur": 10} for what, begin in (("prepare", -20), ("schedule", 0), ("main", 20 + late[n]))]
        events += [{"ph": ph, "cat": "operation", "pid": 1, "id": n, "name": "forward", "ts": 100 * n + at} for ph, at in (("b", -30), ("e", 50))]
    trace.write_text(json.dumps({"traceEvents": events}))
    found = list(spans.records(trace, {"how": "single"}))
want = {"how": "single", "rank": 0, "operations": 3, "operation_us": 80, "period_us": 100,
        "spans": [["prepare", "phases", -20, -10], ["schedule", "phases", 0, 10], ["main", "phases", 22.5, 32.5]]}
if found != [want]:
    failed += 1
    print(f"spans: {found}, must be {want}")
print("FAILED" if failed else "OK")
sys.exit(failed > 0)
