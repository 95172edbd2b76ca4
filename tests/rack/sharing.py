# SPDX-License-Identifier: Apache-2.0
"""The rack is shared: a node is drained from another one and upgraded while the others work."""
import os
import subprocess
import tempfile

from netns import BUILD, Rack, fail

MODEL = ["--experts", "6", "--hidden", "32", "--intermediate", "32", "--layers", "2", "--seq", "32", "--batch", "4"]


def job(rack, name, nodes, steps, log):
    """Rank r on node nodes[r]."""
    command = [f"{BUILD}/client/examples/train_moe_lm", "--ranks", str(len(nodes)), "--job", name,
               "--steps", str(steps),
               "--log", log, *MODEL]
    for node in nodes:
        command += ["--socket", rack.socket(node)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)
    rack.spawned.append(process)
    return process


def steps_of(log):
    try:
        with open(log, encoding="utf-8") as file:
            return len(file.readlines())
    except FileNotFoundError:
        return 0


def expect_job(rack, name, nodes, logs, says=None):
    """A job of two steps: runs, or does not and says so."""
    process = job(rack, name, nodes, 2, f"{logs}/{name}")
    output = process.communicate(timeout=120)[0]
    if (process.returncode == 0) != (says is None) or any(s not in output for s in says or []):
        fail(f"job {name} on nodes {nodes} ends with {process.returncode}, not as expected ({says}): {output}")


def expect_refusal(rack, node, *command, says):
    result = rack.mokctl(node, *command, check=False)
    if result.returncode == 0 or says not in result.stderr:
        fail(f"mokctl {' '.join(command)} ends with {result.returncode}: {result.stderr}")


def a_node_is_drained_from_another_one_and_upgraded_while_others_work(rack, logs):
    log, other = f"{logs}/running", f"{logs}/other"
    running, others = job(rack, "running", [0, 1], 100000, log), job(rack, "others", [0, 2], 100000, other)
    rack.wait("both jobs make steps", lambda: steps_of(log) >= 2 and steps_of(other) >= 2)

    states = rack.status(2, "drain", "n1")
    if [d["state"] for d in states] != ["draining", "open"] and [d["state"] for d in states] != ["draining", "drained"]:
        fail(f"n1 after mokctl drain n1 on n2: {states}")
    rack.wait("n0 sees that n1 drains", lambda: rack.view(0, 1)["draining"])
    if rack.view(0, 2)["draining"] or "draining" not in rack.mokctl(0, "rack").stdout:
        fail("mokctl rack does not say who drains")
    before = steps_of(log)
    rack.wait("what runs on n1 goes on", lambda: steps_of(log) > before + 2)
    expect_job(rack, "refused", [2, 1], logs, ["MOK_EDRAIN"])
    expect_job(rack, "elsewhere", [0, 2], logs)

    running.kill()
    running.wait()
    done = rack.status(2, "drain", "n1", "--wait")
    if any(d["state"] != "drained" for d in done):
        fail(f"n1 is drained, but {done}")
    if rack.stop(1) != 0:
        fail("n1 did not stop in order")
    before = steps_of(other)
    rack.wait("n1 has left", lambda: rack.state(0, 1) == "left")
    expect_refusal(rack, 2, "undrain", "n1", says="node n1 is left")
    rack.start(1)  # as another version would be
    rack.wait_all_up()
    rack.wait("the others went on meanwhile", lambda: steps_of(other) > before + 2)
    expect_job(rack, "again", [0, 1], logs)
    others.kill()
    others.wait()


def one_device_of_another_node_is_drained_and_opened_again(rack):
    states = [d["state"] for d in rack.status(0, "drain", "n2:host1")]
    if states != ["open", "drained"]:
        fail(f"n2 after mokctl drain n2:host1 on n0: {states}")
    if rack.view(1, 2)["draining"]:
        fail("one device of two is not the node")
    states = [d["state"] for d in rack.status(1, "undrain", "n2")]
    if states != ["open", "open"]:
        fail(f"n2 after mokctl undrain n2 on n1: {states}")
    expect_refusal(rack, 0, "drain", "n2:host9", says='no device "host9" among the 2 of node n2')
    expect_refusal(rack, 0, "drain", "n7:host0", says='no node "n7"')
    expect_refusal(rack, 0, "drain", "nobody", says="no node of that name")


def main():
    with Rack(3, devices=2) as rack, tempfile.TemporaryDirectory() as logs:
        rack.start_all()
        rack.wait_all_up()
        a_node_is_drained_from_another_one_and_upgraded_while_others_work(rack, logs)
        one_device_of_another_node_is_drained_and_opened_again(rack)
        for i in range(3):
            if rack.stop(i) != 0:
                fail(f"n{i} did not end in order")


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
