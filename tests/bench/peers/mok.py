# SPDX-License-Identifier: Apache-2.0
"""A layer through mokd from Python: libmok by ctypes, its buffers as torch tensors, operations in the order of torch's current
stream. Mirrors client/include/mok/mok.h; test code only."""
import ctypes
import os
import pathlib

import torch

P, U32, U64, I64, F, C = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_float, ctypes.c_char_p
NONE, FULL, RECOMPUTE = range(3)
OVERWRITE_WGRAD = 2
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


def structure(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


View = structure("View", ("buffer", P), ("offset", U64), ("bytes", U64))
Session = structure("Session", ("size", ctypes.c_size_t), ("socket_path", C), ("job", C), ("queue_entries", U32), ("timeout_ms", U64), ("weight", U32), ("resume_ms", U64))
Device = structure("Device", ("index", U32), ("kind", U32), ("name", ctypes.c_char * 64), ("units", U32), ("up", U32), ("memory_bytes", U64), ("memory_used", U64))
Group = structure("Group", ("size", ctypes.c_size_t), ("name", C), ("ranks", U32), ("rank", U32), ("device", U32), ("timeout_ms", U64), ("flags", U32))
Layer = structure("Layer", ("size", ctypes.c_size_t), *[(n, U32) for n in ("hidden", "intermediate", "experts", "topk", "max_tokens", "precision", "shared_intermediate")],
                  ("clamp", F), ("ring_bytes", U64), ("minibatch_rows", U32), ("comm_units", U32), ("gradient_dtype", U32), ("wgrad_precision", U32), ("transposed_weights", U32))
LAYER_BEFORE_GRADIENT_DTYPE = Layer.gradient_dtype.offset  # what a libmok without it takes
DTYPE_BF16 = 1
Memory = structure("Memory", *[(n, U64) for n in ("symmetric_bytes", "private_bytes", "context_full_bytes", "context_recompute_bytes")])
PARAMETERS = ("gate", "up", "down", "d_gate", "d_up", "d_down")
Params = structure("Params", ("size", ctypes.c_size_t), *[(n, View) for n in PARAMETERS],
                   *[(n, View) for n in ("shared_gate", "shared_up", "shared_down", "d_shared_gate", "d_shared_up", "d_shared_down", "gate_scale", "up_scale", "down_scale", "gate_transposed", "up_transposed", "down_transposed")])
Forward = structure("Forward", ("size", ctypes.c_size_t), ("tokens", U32), ("context_mode", U32), ("flags", U32), ("timeout_ns", U64),
                    *[(n, View) for n in ("x", "ids", "topk_weight", "out", "context")])
Backward = structure("Backward", ("size", ctypes.c_size_t), ("tokens", U32), ("context_mode", U32), ("flags", U32), ("timeout_ns", U64),
                     *[(n, View) for n in ("x", "context", "d_out", "d_x", "d_topk_weight")])
Result = structure("Result", ("code", ctypes.c_int), ("engine", U32), ("precision", U32), ("rows", U64), ("dropped", U64), ("device_ns", U64))

CALLS = {
    "session_open": [P, P], "session_close": [P], "device_list": [P, P, ctypes.c_size_t], "group_join": [P, P, P],
    "buffer_alloc_symmetric": [P, U64, U64, P], "buffer_alloc_private": [P, U32, U64, P], "layer_memory_query": [P, P, P],
    "layer_create": [P, P, U64, P], "layer_bind": [P, P], "layer_describe": [P, P, ctypes.c_size_t], "wait": [P, U64, I64, P],
    "layer_forward": [P, P, P], "layer_backward": [P, P, P], "layer_forward_on_stream": [P, P, P, P], "layer_backward_on_stream": [P, P, P, P],
}


def load(build=None):
    """libmok of a build tree, or of a packed one."""
    build = pathlib.Path(build or os.environ["MOK_BUILD_DIR"])
    for path in (build / "client" / "libmok.so.1", *sorted((build / "lib").glob("libmok.so.*"))):
        if path.exists():
            break
    else:
        raise SystemExit(f"peers: no libmok.so in {build}")
    for needed in sorted((build / "lib").glob("libprotobuf-c.so.*")):  # of a packed build; the rest of its libraries is not for this process
        ctypes.CDLL(str(needed), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.mok_last_error.restype = C
    library.mok_buffer_data.restype, library.mok_buffer_data.argtypes = P, [P]
    for name, arguments in CALLS.items():
        getattr(library, "mok_" + name).argtypes = arguments
    return library


class Client:
    """A session. `device_kind` of Device: 1 host, 2 CUDA."""

    def __init__(self, socket, library=None, timeout_ms=30000):
        self.library = library or load()
        options = Session(size=ctypes.sizeof(Session), socket_path=socket.encode(), job=b"peers", timeout_ms=timeout_ms)
        self.session = P()
        self.call("session_open", ctypes.byref(options), ctypes.byref(self.session))

    def call(self, name, *arguments):
        code = getattr(self.library, "mok_" + name)(*arguments)
        if code < 0:
            raise RuntimeError(f"mok_{name}: {code}: {self.library.mok_last_error().decode()}")
        return code

    def devices(self):
        found = (Device * 64)()
        return list(found[:self.call("device_list", self.session, found, 64)])

    def close(self):
        self.library.mok_session_close(self.session)


class Array:
    """Device memory for torch."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


def tensor(address, count, cuda):
    if cuda:
        return torch.as_tensor(Array(address, count), device="cuda")
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)


class Mok:
    """One rank of a layer through mokd; inputs are copied in. forward(), backward() and both() go to the current stream,
    their results are looked at by reap(). Weight gradients are overwritten. `options`: of the layer, as in mok.h."""

    def __init__(self, p, inputs, socket, group="peers", library=None, backward=True, context=FULL, **options):
        self.p, self.context_mode, self.tickets = p, context if backward else NONE, []
        self.client = c = Client(socket, library)
        self.cuda = c.devices()[p.rank].kind == 2
        self.group, self.layer = P(), P()
        joining = Group(size=ctypes.sizeof(Group), name=group.encode(), ranks=p.ranks, rank=p.rank, device=p.rank, timeout_ms=60000)
        c.call("group_join", c.session, ctypes.byref(joining), ctypes.byref(self.group))
        size = ctypes.sizeof(Layer) if options.get("gradient_dtype") else LAYER_BEFORE_GRADIENT_DTYPE
        gradient = BF16 if options.get("gradient_dtype") == DTYPE_BF16 else F32
        made = Layer(size=size, hidden=p.hidden, intermediate=p.intermediate, experts=p.experts, topk=p.topk, max_tokens=max(p.tokens, 1),
                     precision=1, **options)
        self.memory = Memory()
        c.call("layer_memory_query", self.group, ctypes.byref(made), ctypes.byref(self.memory))
        c.call("layer_create", self.group, ctypes.byref(made), 60000, ctypes.byref(self.layer))
        self.views, half = {}, p.intermediate
        self.x = self.symmetric("x", BF16, p.tokens, p.hidden, value=inputs.x)
        self.ids = self.private("ids", I32, p.tokens, p.topk, value=inputs.ids)
        self.weight = self.private("topk_weight", F32, p.tokens, p.topk, value=inputs.weight)
        self.out = self.private("out", BF16, p.tokens, p.hidden)
        self.private("gate", BF16, p.local, half, p.hidden, value=inputs.w13[:, :half])
        self.private("up", BF16, p.local, half, p.hidden, value=inputs.w13[:, half:])
        self.private("down", BF16, p.local, p.hidden, half, value=inputs.w2)
        bound = PARAMETERS[:3]
        if backward:
            self.d_out = self.symmetric("d_out", BF16, p.tokens, p.hidden, value=inputs.d_out)
            self.d_x = self.private("d_x", BF16, p.tokens, p.hidden)
            self.d_weight = self.private("d_topk_weight", F32, p.tokens, p.topk)
            self.d_gate = self.private("d_gate", gradient, p.local, half, p.hidden)
            self.d_up = self.private("d_up", gradient, p.local, half, p.hidden)
            self.d_down = self.private("d_down", gradient, p.local, p.hidden, half)
            self.allocate("context", self.memory.context_full_bytes if context == FULL else self.memory.context_recompute_bytes)
            bound = PARAMETERS
        params = Params(size=ctypes.sizeof(Params), **{n: self.views[n] for n in bound})
        c.call("layer_bind", self.layer, ctypes.byref(params))
        view = lambda *names: {n: self.views[n] for n in names}
        self.inference = Forward(size=ctypes.sizeof(Forward), tokens=p.tokens, context_mode=NONE, **view("x", "ids", "topk_weight", "out"))
        if backward:
            self.training = Forward(size=ctypes.sizeof(Forward), tokens=p.tokens, context_mode=context, **view("x", "ids", "topk_weight", "out", "context"))
            self.gradient = Backward(size=ctypes.sizeof(Backward), tokens=p.tokens, context_mode=context, flags=OVERWRITE_WGRAD,
                                     **view("x", "context", "d_out", "d_x", "d_topk_weight"))
        if self.cuda:
            torch.cuda.synchronize()

    def allocate(self, name, size, symmetric=False):
        buffer, c = P(), self.client
        if symmetric:
            c.call("buffer_alloc_symmetric", self.group, size, 60000, ctypes.byref(buffer))
        else:
            c.call("buffer_alloc_private", c.session, self.p.rank, size, ctypes.byref(buffer))
        self.views[name] = View(buffer, 0, 0)
        return tensor(c.library.mok_buffer_data(buffer), size, self.cuda)

    def private(self, name, dtype, *shape, value=None, symmetric=False):
        size = max(torch.empty(shape, dtype=dtype, device="meta").numel() * torch.empty((), dtype=dtype).element_size(), 16)
        made = self.allocate(name, size, symmetric).view(dtype)[:torch.empty(shape, device="meta").numel()].view(shape)
        if value is not None:
            made.copy_(value)
        return made

    def symmetric(self, name, dtype, *shape, value=None):
        return self.private(name, dtype, *shape, value=value, symmetric=True)

    def submit(self, op, arguments):
        ticket = U64()
        if self.cuda:
            stream = torch.cuda.current_stream().cuda_stream
            self.client.call(f"layer_{op}_on_stream", self.layer, ctypes.byref(arguments), stream, ctypes.byref(ticket))
        else:
            self.client.call(f"layer_{op}", self.layer, ctypes.byref(arguments), ctypes.byref(ticket))
        self.tickets.append(ticket)

    def forward(self):
        self.submit("forward", self.inference)

    def backward(self):
        self.submit("backward", self.gradient)

    def both(self):
        self.submit("forward", self.training)
        self.submit("backward", self.gradient)

    def reap(self):
        """Waits for what was submitted; the last operation's rows here."""
        result = Result()
        for ticket in self.tickets:
            self.client.call("wait", self.client.session, ticket, 60 * 10**9, ctypes.byref(result))
            if result.code < 0:
                raise RuntimeError(f"an operation: {result.code}: {self.client.library.mok_last_error().decode()}")
        self.tickets.clear()
        return result.rows

    def describe(self):
        text = ctypes.create_string_buffer(8192)
        self.client.call("layer_describe", self.layer, text, len(text))
        return text.value.decode()

    def close(self):
        self.client.close()
