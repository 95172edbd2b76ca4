# SPDX-License-Identifier: Apache-2.0
"""Jobs over daemons in network namespaces of their own: a training run gives the numbers that it gives on one node, and
links that are cut, one way or both, or a daemon that is killed in the middle of it, end it on all nodes with the name
of the rank and the node that is gone, within twice the time-out; the job then runs again."""
import json
import os
import signal
import subprocess
import tempfile
import time

from netns import BUILD, Apart, Rack, fail

RANKS = 3
MODEL = ["--experts", "6", "--hidden", "32", "--intermediate", "32", "--layers", "2", "--seq", "32", "--batch", "4"]


def job(rack, name, steps, log, nodes=None):
    """Ranks on nodes 0, 1, 2 ..., all on node 0 where `nodes` says so."""
    nodes = range(RANKS) if nodes is None else nodes
    command = [f"{BUILD}/client/examples/train_moe_lm", "--ranks", str(RANKS), "--job", name, "--steps", str(steps),
               "--log", log, *MODEL]
    for node in nodes:
        command += ["--socket", rack.socket(node)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)


def losses(log):
    with open(log, encoding="utf-8") as file:
        return [json.loads(line)["loss"] for line in file]


def steps_of(log):
    try:
        with open(log, encoding="utf-8") as file:
            return len(file.readlines())
    except FileNotFoundError:
        return 0


def the_numbers_are_those_of_one_node(rack, logs):
    for name, nodes in (("one", [0] * RANKS), ("three", None)):
        process = job(rack, name, 6, f"{logs}/{name}", nodes)
        output = process.communicate(timeout=120)[0]
        if process.returncode:
            fail(f"job {name}: {output}")
    if losses(f"{logs}/one") != losses(f"{logs}/three"):
        fail(f"the losses differ: {losses(logs + '/one')} and {losses(logs + '/three')}")


def a_loss_ends_the_job(rack, logs, name, hurt, heal, says):
    log = f"{logs}/{name}"
    process = job(rack, name, 100000, log)
    rack.wait(f"job {name} makes steps", lambda: steps_of(log) >= 2)
    groups = [g for g in rack.status(0, "groups")["groups"] if g["name"] == name]
    if len(groups) != 1 or groups[0]["node"] != ["n0", "n1", "n2"]:
        fail(f"mokctl groups does not say where the ranks are: {groups}")
    start = time.monotonic()
    hurt()

    def ended():
        states = [g["state"] for i in (0, 1) for g in rack.status(i, "groups")["groups"] if g["name"] == name]
        return "ready" not in states

    rack.wait(f"group {name} has ended on nodes 0 and 1", ended)
    took = time.monotonic() - start
    # What the machine's load may add is not the rack's.
    if took > 2 * rack.timeout_ms / 1000 + 3:
        fail(f"{name}: the others learnt it after {took:.2f} s")
    output = process.communicate(timeout=120)[0]
    if process.returncode == 0 or not any(s in output for s in says):
        fail(f"{name}: the job does not name who is gone ({says}): {output}")
    heal()
    rack.wait_all_up()
    again = job(rack, name, 2, log + "-again")
    output = again.communicate(timeout=120)[0]
    if again.returncode:
        fail(f"{name}: the job does not run again: {output}")
    print(f"{name}: ended after {took:.2f} s")


def two_hosts_are_told_why_they_have_no_group():
    with Apart(2, devices=2) as rack, tempfile.TemporaryDirectory() as logs:
        rack.start_all()
        rack.wait_all_up()
        start = time.monotonic()
        process = job(rack, "apart", 2, f"{logs}/apart", [0, 1, 1])
        output = process.communicate(timeout=60)[0]
        took = time.monotonic() - start
        if process.returncode == 0 or "MOK_ENOTSUP" not in output or "no way for memory between node" not in output:
            fail(f"a group over two hosts: {output}")
        if "not on one host" not in output or "exports no fabric handles" not in output:
            fail(f"the reason is missing: {output}")
        if took > 20:
            fail(f"the refusal took {took:.1f} s")
        print(f"two hosts: refused after {took:.2f} s")


def a_node_of_the_version_before_takes_part(rack, logs):
    """As in the middle of an upgrade: node 2 speaks the older protocol alone."""
    rack.stop(2)
    rack.write_config(2, rack="newest_protocol = 1\n")
    rack.start(2)
    rack.wait_all_up()
    spoken = [rack.view(a, b)["protocol"] for a, b in ((0, 1), (0, 2), (2, 0))]
    if spoken != [2, 1, 1]:
        fail(f"the protocols spoken are {spoken}")
    refused = rack.mokctl(0, "drain", "n2", check=False)  # by its own mokd alone
    if refused.returncode == 0 or "speaks version 1" not in refused.stderr:
        fail(f"draining a node of the version before: {refused.stderr}")
    process = job(rack, "versions", 2, f"{logs}/versions")
    output = process.communicate(timeout=120)[0]
    if process.returncode:
        fail(f"a job over two versions: {output}")
    rack.stop(2)
    rack.write_config(2)
    rack.start(2)
    rack.wait_all_up()


def main():
    two_hosts_are_told_why_they_have_no_group()
    with Rack(3, devices=RANKS) as rack, tempfile.TemporaryDirectory() as logs:
        rack.start_all()
        rack.wait_all_up()
        the_numbers_are_those_of_one_node(rack, logs)
        rack.delay("all", "all", 40)
        process = job(rack, "slow", 2, f"{logs}/slow")
        output = process.communicate(timeout=120)[0]
        if process.returncode:
            fail(f"a job over slow links: {output}")
        rack.delay("all", "all", 0)
        gone = ["node n2 was lost", "node n2: its daemon closed the link"]
        a_loss_ends_the_job(rack, logs, "down", lambda: rack.link(2, False), lambda: rack.link(2, True), gone)
        a_loss_ends_the_job(rack, logs, "both", lambda: (rack.cut(2, "all"), rack.cut("all", 2)), rack.heal, gone)
        # Who is not heard by one of two is lost to both; who cannot be heard by node 2 is, to node 2.
        a_loss_ends_the_job(rack, logs, "oneway", lambda: rack.cut(2, 0), rack.heal, ["node n2", "node n0"])

        def restart():
            rack.start(2)

        a_loss_ends_the_job(rack, logs, "killed", lambda: rack.kill(2), restart, gone)
        a_loss_ends_the_job(rack, logs, "stopped", lambda: rack.signal(2, signal.SIGSTOP),
                            lambda: rack.signal(2, signal.SIGCONT), gone)
        a_node_of_the_version_before_takes_part(rack, logs)
        for i in range(3):
            if rack.stop(i) != 0:
                fail(f"n{i} did not end in order")


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
