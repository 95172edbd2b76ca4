# SPDX-License-Identifier: Apache-2.0
"""mokd for a benchmark: a configuration, the process, and until all its devices are up. Programs come from MOK_BUILD_DIR; under
the MPS control daemon whose pipe directory MOK_TEST_MPS_PIPE names, if it does."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import mok


class Daemon:
    def __init__(self, ranks, gpus, memory_gib, kind="cuda", poll_us=20000, first_gpu=0, folder=None):
        self.folder = folder or pathlib.Path(tempfile.mkdtemp(prefix="mok-peers-"))
        self.socket = str(self.folder / "s")
        pipe = os.environ.get("MOK_TEST_MPS_PIPE")
        lines = ["[daemon]", f"socket = {self.socket}", f"poll_us = {poll_us}"]
        if pipe:
            lines += ["sharing = mps", f"mps_pipe = {pipe}"]
        for r in range(ranks):
            lines += [f"[device d{r}]", f"kind = {kind}", f"memory = {memory_gib}G", f"cuda = {first_gpu + r % gpus}" if kind == "cuda" else "threads = 1"]
        (self.folder / "mokd.conf").write_text("\n".join(lines) + "\n")
        build = pathlib.Path(os.environ["MOK_BUILD_DIR"])
        libraries = [str(build / "lib")] if (build / "lib").is_dir() else []
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries + [p for p in (os.environ.get("LD_LIBRARY_PATH"),) if p])}
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen([build / "daemon" / "mokd" / "mokd", "--config", self.folder / "mokd.conf"], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def await_up(self, seconds=30):
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            try:
                client = mok.Client(self.socket, timeout_ms=2000)
                up = all(d.up for d in client.devices())
                client.close()
                if up:
                    return
            except RuntimeError:
                pass
            time.sleep(0.05)
        raise SystemExit("peers: mokd did not come up:\n" + self.log())

    def log(self):
        return (self.folder / "log").read_text()[-4000:]

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
