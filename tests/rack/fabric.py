# SPDX-License-Identifier: Apache-2.0
"""Groups over two hosts of one link domain, by fabric handles: two daemons in network namespaces that do not see each other's
sockets, with emulated GPUs whose fabric is a folder that both see. A training run has the bits of one host; a daemon or a
worker that is killed ends the others' operations with rank and node; a host without a fabric is refused at the join."""
import json
import os
import re
import signal
import subprocess
import tempfile
import time

from netns import BUILD, Apart, fail

MODEL = ["--engine", "cuda", "--batch", "2", "--seq", "8", "--hidden", "32", "--intermediate", "16",
         "--experts", "4", "--layers", "1",
         "--window", "2", "--micro-batches", "1", "--text", __file__, "--quiet"]


class Hosts(Apart):
    def __init__(self, fabric=(True, True), **options):
        super().__init__(2, kind="cuda", devices=2, memory="512M", **options)
        self.fabric = fabric

    def __enter__(self):
        # In memory: a write to a page of a file on a disk waits for that.
        shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = tempfile.TemporaryDirectory(prefix="mok-fabric-", dir=shm)
        return super().__enter__()

    def __exit__(self, *why):
        super().__exit__(*why)
        self.folder.cleanup()

    def start(self, i, env=None, prefix=()):
        super().start(i, env={"MOK_EMULATED_FABRIC": self.folder.name if self.fabric[i] else ""}, prefix=prefix)

    def up(self):
        self.start_all()
        self.wait_all_up()
        self.wait("workers are up",
                  lambda: all(d["state"] == "up" for i in (0, 1) for d in self.status(i, "devices")["devices"]))


def train(rack, name, nodes, steps, log):
    command = [f"{BUILD}/client/examples/train_moe_lm", "--ranks", str(len(nodes)), "--job", name,
               "--steps", str(steps),
               "--log", log, *MODEL]
    for node in nodes:
        command += ["--socket", rack.socket(node)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)


def result(process, log):
    output = process.communicate(timeout=240)[0]
    if process.returncode:
        fail(output)
    with open(log, encoding="utf-8") as file:
        return [json.loads(line)["loss"] for line in file], re.search("^parameters (.*)", output, re.M).group(1)


def operations_of(rack, name):
    return sum(j["ops_done"] for j in rack.status(0, "jobs")["jobs"] if j["job"] == name)


def the_bits_are(rack, logs, name, nodes, wanted=None):
    log = f"{logs}/{name}"
    got = result(train(rack, name, nodes, 2, log), log)
    if wanted and got != wanted:
        fail(f"{name}, on nodes {nodes}: {got}, on one host {wanted}")
    return got


def who_is_killed_is_named(rack, logs, name, nodes, kill, says):
    log = f"{logs}/{name}"
    process = train(rack, name, nodes, 100000, log)
    rack.wait(f"job {name} makes steps", lambda: operations_of(rack, name) >= 3)
    if [g["fabric"] for g in rack.status(0, "groups")["groups"] if g["name"] == name] != [True]:
        fail("mokctl groups does not say that the group goes by the fabric")
    start = time.monotonic()
    kill()
    rack.wait("the group has ended on node 0",
              lambda: all(g["state"] != "ready" for g in rack.status(0, "groups")["groups"] if g["name"] == name))
    took = time.monotonic() - start
    if took > 2 * rack.timeout_ms / 1000 + 3:
        fail(f"{name}: node 0 learnt it after {took:.2f} s")
    output = process.communicate(timeout=120)[0]
    # A rank that is between two operations hears from its job first; then mokd's log has what it would have heard.
    ends = [line for line in rack.log(0).splitlines(True) if "group: failed" in line and f"name={name} " in line]
    heard = output if "MOK_EPEER" in output else "".join(ends)
    if process.returncode == 0 or not re.search(says, heard):
        fail(f"{name}: rank and node are not named ({says}): {output}{heard}")
    print(f"{name}: ended after {took:.2f} s")


def worker_of(rack, node):
    children = subprocess.run(["pgrep", "-P", str(mokd_of(rack, node)), "-f", "mok-worker"], capture_output=True,
                              text=True)
    return int(children.stdout.split()[0])


def mokd_of(rack, node):
    return rack.status(node)["pid"]


def a_host_without_a_fabric_is_refused(logs):
    with Hosts(fabric=(True, False)) as rack:
        rack.up()
        start = time.monotonic()
        output = train(rack, "none", [0, 1], 1, f"{logs}/none").communicate(timeout=60)[0]
        took = time.monotonic() - start
        for says in ("MOK_ENOTSUP", "not on one host",
                     r"rank 1 \(node n1\) exports no fabric handles: .*no IMEX channel"):
            if not re.search(says, output):
                fail(f"the refusal does not say {says}: {output}")
        print(f"no fabric on node 1: refused after {took:.2f} s")


def main():
    with tempfile.TemporaryDirectory() as logs:
        a_host_without_a_fabric_is_refused(logs)
        with Hosts() as rack:
            rack.up()
            one = the_bits_are(rack, logs, "one", [0, 0])
            the_bits_are(rack, logs, "two", [0, 1], one)
            who_is_killed_is_named(rack, logs, "worker", [0, 1], lambda: os.kill(worker_of(rack, 1), signal.SIGKILL),
                                   r"rank 1 .*node n1")
            rack.wait("the worker is up again",
                      lambda: all(d["state"] == "up" for d in rack.status(1, "devices")["devices"]))
            # Whose device had the board.
            who_is_killed_is_named(rack, logs, "daemon", [1, 0], lambda: rack.kill(1), r"rank 0 .*node n1")
            rack.start(1)
            rack.wait_all_up()
            the_bits_are(rack, logs, "turned", [1, 0], one)
            print(f"losses {one[0]}, parameters {one[1]}")


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
