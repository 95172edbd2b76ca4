# SPDX-License-Identifier: Apache-2.0
"""The scripts for GPU machines are Python, and mok.py's structures are those of mok.h. Needs neither PyTorch nor a GPU.
usage: test_peers.py ABI, the program of abi.c."""
import ast
import ctypes
import pathlib
import subprocess
import sys
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
print("FAILED" if failed else "OK")
sys.exit(failed > 0)
