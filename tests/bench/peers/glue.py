# SPDX-License-Identifier: Apache-2.0
"""The glue kernels, compiled by nvcc the first time they are asked for. Calls go to torch's current stream."""
import ctypes
import hashlib
import os
import pathlib
import subprocess
import tempfile

import torch

P, I, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
CALLS = {
    "plan": [P, I, I, I, I, P, P, P, P, P, P, P],
    "expand": [P, I, I, I, I, I, P, P, P, P, P],
    "swiglu": [P, I, P, P, P],
    "swiglu_backward": [P, P, I, P, P, P, P, P, P, P],
    "reduce": [P, I, I, I, P, P, P, P],
    "push": [I, I, I, P, P, P, P],
    "pull": [I, I, P, L, P, P],
    "pick": [I, P, P, I, I, P, P],
}


def build():
    """Path of the library; MOK_PEERS_GLUE names one that is there already."""
    if os.environ.get("MOK_PEERS_GLUE"):
        return os.environ["MOK_PEERS_GLUE"]
    source = pathlib.Path(__file__).with_name("glue.cu")
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    path = pathlib.Path(tempfile.gettempdir()) / f"mok-peers-{os.getuid()}-{key}.so"
    if not path.exists():
        made = f"{path}.{os.getpid()}"
        subprocess.run(["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90,code=sm_90", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden",
                        "-o", made, str(source)], check=True)
        os.rename(made, path)
    return str(path)


class Glue:
    def __init__(self):
        self.library = ctypes.CDLL(build())
        for name, arguments in CALLS.items():
            getattr(self.library, "glue_" + name).argtypes = arguments

    def __call__(self, name, *arguments):
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None
        code = getattr(self.library, "glue_" + name)(*plain, stream)
        if code:
            raise RuntimeError(f"glue_{name}: CUDA error {code}")
