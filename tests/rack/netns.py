# SPDX-License-Identifier: Apache-2.0
"""A rack on one machine: several mokd, each in a network namespace of its own, with real keys, joined by a hub that can
cut, lose and delay from any one to any other (hub.c). Needs root and `ip netns`; exits with 77 where it cannot.

    with Rack(3) as rack:
        rack.start_all()
        rack.wait_all_up()
        rack.cut(0, 2)                      # one way; cut(2, 0) too for both
        rack.wait("n2 is lost", lambda: rack.state(0, 2) == "lost")

Unix sockets do not care for network namespaces: clients and mokctl of node i use rack.socket(i).
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BUILD = os.environ.get("MOK_BUILD_DIR", "build/dev")
PORT = 7117
SKIPPED = 77
PATIENCE_S = 90  # of any wait: a loaded machine is not a failure


def skip(reason):
    print("skipped:", reason)
    sys.exit(SKIPPED)


def sh(*command, check=True):
    return subprocess.run(command, check=check, capture_output=True, text=True)


def fail(text):
    raise AssertionError(text)


class Rack:
    """`extra` ports of the hub have a namespace and an address, but no mokd and no place in the inventory."""

    def __init__(self, size, extra=0, heartbeat_ms=200, timeout_ms=2000, devices=1, link_domain="rack", config="",
                 memory="64M", kind="host"):
        self.size, self.extra = size, extra
        self.heartbeat_ms, self.timeout_ms = heartbeat_ms, timeout_ms
        self.devices, self.link_domain, self.config, self.memory = devices, link_domain, config, memory
        self.kind = kind  # of the devices: "host", or "cuda", all on the first GPU
        self.tag = f"mokr{os.getpid()}"
        self.dir = None
        self.hub = None
        self.processes = [None] * (size + extra)
        self.logs = [None] * (size + extra)
        self.spawned = []
        self.made = []
        self.public = []
        self.inventory = [list(range(size)) for _ in range(size)]

    # ---------------------------------------------------------------- making and unmaking

    def __enter__(self):
        if os.geteuid() != 0:
            skip("needs root, for network namespaces")
        if not shutil.which("ip"):
            skip("needs the program ip (iproute2)")
        try:
            self._make_namespaces()
        except subprocess.CalledProcessError as error:
            self._remove_namespaces()
            skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        try:
            self.dir = tempfile.mkdtemp(prefix="mok-rack-")
            self._start_hub()
            self._make_keys()
            for i in range(self.size):
                self.write_config(i)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind, value, trace):
        if kind not in (None, SystemExit):
            for i in range(self.size):
                self.show_log(i)
        for process in self.spawned:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        if self.hub:
            self.hub.stdin.close()
            self.hub.wait()
        self._remove_namespaces()
        if self.dir:
            shutil.rmtree(self.dir, ignore_errors=True)

    def namespace(self, i):
        return f"{self.tag}-{i}"

    def _make_namespaces(self):
        hub = self.namespace("hub")
        sh("ip", "netns", "add", hub)
        self.made.append(hub)
        for i in range(self.size + self.extra):
            name = self.namespace(i)
            sh("ip", "netns", "add", name)
            self.made.append(name)
            sh("ip", "-n", name, "link", "add", "eth0", "address", f"02:00:00:00:00:{i + 1:02x}", "type", "veth",
               "peer", "name", f"port{i}", "netns", hub)
            sh("ip", "-n", name, "address", "add", f"{self.address(i)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                sh("ip", "-n", name, "link", "set", link, "up")
            sh("ip", "-n", hub, "link", "set", f"port{i}", "up")
            sh("ip", "netns", "exec", name, f"{BUILD}/tests/rack/hub", "--plain", "eth0")

    def _remove_namespaces(self):
        for name in self.made:
            sh("ip", "netns", "delete", name, check=False)
        self.made = []

    def _start_hub(self):
        ports = [f"port{i}" for i in range(self.size + self.extra)]
        self.hub = subprocess.Popen(["ip", "netns", "exec", self.namespace("hub"), f"{BUILD}/tests/rack/hub", *ports],
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        if self.hub.stdout.readline() != "ok\n":
            skip("no packet sockets here")

    def _make_keys(self):
        for i in range(self.size):
            os.makedirs(f"{self.dir}/n{i}")
            sh(f"{BUILD}/client/mokctl", "keygen", "--out", f"{self.dir}/n{i}")
            self.public.append(open(f"{self.dir}/n{i}/rack.pub", encoding="ascii").read().split()[-1])

    # ---------------------------------------------------------------- nodes

    def address(self, i):
        return f"10.77.0.{i + 1}"

    def socket(self, i):
        return f"{self.dir}/n{i}/mokd.sock"

    def write_config(self, i, inventory=None, more="", rack=""):
        """The configuration of node i; `inventory`: the nodes that it knows; `rack`: more lines of [rack]."""
        if inventory is not None:
            self.inventory[i] = inventory
        text = "[daemon]\nlog_level = debug\n"
        for d in range(self.devices):
            if self.kind == "host":
                text += f"[device host{d}]\nthreads = 1\n"
            else:
                text += f"[device gpu{d}]\nkind = cuda\ncuda = 0\n"
            text += f"memory = {self.memory}\n"
        text += f"[rack]\nnode = n{i}\nkey = {self.dir}/n{i}/rack.key\n"
        text += f"heartbeat_ms = {self.heartbeat_ms}\ntimeout_ms = {self.timeout_ms}\n{rack}"
        if self.link_domain:
            text += f"link_domain = {self.link_domain}\n"
        for n in self.inventory[i]:
            text += f"[node n{n}]\naddress = {self.address(n)}:{PORT}\npublic_key = {self.public[n]}\n"
        with open(f"{self.dir}/n{i}/mokd.conf", "w", encoding="ascii") as file:
            file.write(text + self.config + more)

    def spawn(self, i, *command, env=None, log=None):
        """A program in the namespace of node i; killed at the end at the latest."""
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace(i), *command], stdin=subprocess.DEVNULL,
                                   stdout=log or subprocess.DEVNULL, stderr=log or subprocess.DEVNULL,
                                   env={**os.environ, **(env or {})})
        self.spawned.append(process)
        return process

    def start(self, i, env=None, prefix=()):
        self.logs[i] = f"{self.dir}/n{i}/log"
        with open(self.logs[i], "a", encoding="utf-8") as log:
            self.processes[i] = self.spawn(i, *prefix, f"{BUILD}/daemon/mokd/mokd",
                                           "--config", f"{self.dir}/n{i}/mokd.conf",
                                           "--runtime-dir", f"{self.dir}/n{i}", env=env, log=log)
        self.wait(f"n{i} answers", lambda: self.running(i) and self.mokctl(i, "version", check=False).returncode == 0)

    def start_all(self):
        for i in range(self.size):
            self.start(i)

    def running(self, i):
        code = self.processes[i].poll()
        if code is not None:
            self.show_log(i)
            fail(f"mokd of n{i} has ended with {code}")
        return True

    def signal(self, i, number):
        self.processes[i].send_signal(number)

    def kill(self, i):
        """kill -9."""
        self.processes[i].kill()
        self.processes[i].wait()

    def stop(self, i):
        self.processes[i].terminate()
        self.wait(f"n{i} stops", lambda: self.processes[i].poll() is not None)
        return self.processes[i].returncode

    def log(self, i):
        with open(self.logs[i], encoding="utf-8", errors="replace") as log:
            return log.read()

    def show_log(self, i):
        if self.logs[i] and os.path.exists(self.logs[i]):
            print(f"---- n{i}")
            # every look of a test leaves such a line
            lines = [line for line in self.log(i).splitlines() if "debug session: client left" not in line]
            print("\n".join(lines[-60:]))

    # ---------------------------------------------------------------- links

    def _order(self, *words):
        self.hub.stdin.write(" ".join(str(w) for w in words) + "\n")
        self.hub.stdin.flush()
        if self.hub.stdout.readline() != "ok\n":
            fail("the hub has ended")

    def cut(self, a, b):
        """Nothing more from a to b; a number or "all"."""
        self._order("drop", a, b)

    def heal(self, a="all", b="all"):
        self._order("pass", a, b)

    def delay(self, a, b, ms):
        self._order("delay", a, b, ms)

    def lose(self, a, b, percent):
        self._order("loss", a, b, percent)

    def link(self, i, up):
        sh("ip", "-n", self.namespace("hub"), "link", "set", f"port{i}", "up" if up else "down")

    # ---------------------------------------------------------------- looking

    def mokctl(self, i, *arguments, check=True):
        result = sh(f"{BUILD}/client/mokctl", "--socket", self.socket(i), *arguments, check=False)
        if check and result.returncode:
            fail(f"mokctl {' '.join(arguments)} on n{i} ends with {result.returncode}: {result.stderr}")
        return result

    def status(self, i, *command):
        return json.loads(self.mokctl(i, "--json", *(command or ("status",))).stdout)

    def rack(self, i):
        return self.status(i, "rack")

    def view(self, i, peer):
        """What node i knows of another; None: it is not in its inventory."""
        for node in self.rack(i)["nodes"]:
            if node["name"] == f"n{peer}":
                return node
        return None

    def state(self, i, peer):
        return self.view(i, peer)["state"]

    def both(self, a, b, state):
        return self.state(a, b) == state and self.state(b, a) == state

    def all_up(self, nodes=None):
        nodes = range(self.size) if nodes is None else nodes
        return all(node["state"] == "up" for i in nodes for node in self.rack(i)["nodes"]
                   if int(node["name"][1:]) in nodes)

    def seen(self, i):
        """What node i knows of the others, and what runs there; of one that stands still: that it says nothing."""
        try:
            rack, groups = (subprocess.run([f"{BUILD}/client/mokctl", "--socket", self.socket(i), *command],
                                           capture_output=True, text=True, timeout=5, check=False)
                            for command in (("rack",), ("groups",)))
        except subprocess.TimeoutExpired:
            return f"---- n{i} says nothing"
        return f"---- n{i} says\n{rack.stdout}{rack.stderr}{groups.stdout}{groups.stderr}"

    def wait(self, what, condition, patience_s=PATIENCE_S):
        end = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > end:
                fail("\n".join([f"in {patience_s} s not: {what}", *(self.seen(i) for i in range(self.size))]))
            time.sleep(0.02)

    def wait_all_up(self, nodes=None):
        self.wait("all are up", lambda: self.all_up(nodes))


class Apart(Rack):
    """Nodes do not see each other's directories, as if each were on another host: Unix sockets do care for those."""

    def spawn(self, i, *command, env=None, log=None):
        hidden = " && ".join(f"mount -t tmpfs none {self.dir}/n{n}" for n in range(self.size) if n != i)
        return super().spawn(i, "unshare", "-m", "sh", "-c", f'{hidden} && exec "$0" "$@"', *command, env=env, log=log)
