#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The mesh of three real daemons: what happens to one, the others notice within the time-out, and about the others they
notice nothing. Every scenario begins and ends with all up."""
import os
import signal
import subprocess
import sys
import time

from netns import BUILD, PORT, Rack, fail

SECOND_NS = 1_000_000_000


def expect(condition, text):
    if not condition:
        fail(text)


def untouched(rack, a, b):
    """Returns a check that a and b have not lost each other since."""
    before = [rack.view(x, y)["epoch"] for x, y in ((a, b), (b, a))]

    def check():
        after = [rack.view(x, y)["epoch"] for x, y in ((a, b), (b, a))]
        expect(before == after, f"n{a} and n{b} have lost each other: epochs {before} became {after}, "
               f"{rack.view(a, b)['error']!r}, {rack.view(b, a)['error']!r}")
    return check


def all_find_each_other(rack):
    rack.wait("round trips are measured", lambda: all(rack.view(a, b)["rtt_ns"] > 0 for a in range(3) for b in range(3)
                                                      if a != b))
    for a in range(3):
        for b in range(3):
            node = rack.view(a, b)
            expect(node["self"] == (a == b), f"n{a}'s view of itself")
            expect(node["state"] == "up" and node["inventory_agrees"] and node["link_domain"] == "rack", str(node))
            expect(len(node["boot_id"]) == 32, str(node))
            expect(abs(node["clock_offset_ns"]) < SECOND_NS, f"one clock, but n{a} sees an offset: {node}")
    table = rack.mokctl(0, "rack").stdout
    expect("ROUND TRIP" in table and "n2" in table, table)


def a_killed_node_is_lost_and_comes_back_with_a_new_boot_id(rack):
    others = untouched(rack, 0, 1)
    before = rack.view(0, 2)
    rack.kill(2)
    rack.wait("n2 is suspected", lambda: rack.state(0, 2) in ("suspect", "lost"))
    rack.wait("n2 is lost", lambda: rack.state(0, 2) == "lost" and rack.state(1, 2) == "lost")
    others()
    rack.start(2)
    rack.wait_all_up()
    after = rack.view(0, 2)
    expect(after["boot_id"] != before["boot_id"], "the boot id is the old one")
    expect(after["epoch"] > before["epoch"], "the epoch is the old one")
    others()


def a_hanging_node_is_lost_although_its_connections_stand(rack):
    others = untouched(rack, 0, 1)
    before = rack.view(0, 2)
    rack.signal(2, signal.SIGSTOP)
    rack.wait("the hanging n2 is lost", lambda: rack.state(0, 2) == "lost" and rack.state(1, 2) == "lost")
    rack.signal(2, signal.SIGCONT)
    rack.wait_all_up()
    after = rack.view(0, 2)
    expect(after["boot_id"] == before["boot_id"], "it was not restarted")
    expect(after["epoch"] > before["epoch"], "what was agreed before the hang must be void")
    expect(rack.view(2, 0)["epoch"] > 1, "the other side must know too")
    others()


def a_cut_cable_is_noticed_on_both_sides(rack):
    others = untouched(rack, 0, 1)
    rack.link(2, False)
    rack.wait("n2 is lost on all sides", lambda: all(rack.both(a, 2, "lost") for a in (0, 1)))
    others()
    rack.link(2, True)
    rack.wait_all_up()
    others()


def a_one_way_partition_ends_the_link_on_both_sides(rack):
    checks = [untouched(rack, 0, 1), untouched(rack, 1, 2)]
    rack.cut(0, 2)
    rack.wait("n0 and n2 lose each other", lambda: rack.both(0, 2, "lost"))
    rack.heal()
    rack.wait_all_up()
    for check in checks:
        check()


def delay_and_loss_are_no_failure(rack):
    checks = [untouched(rack, 0, 1), untouched(rack, 0, 2), untouched(rack, 1, 2)]
    rack.delay("all", 2, 40)
    rack.delay(2, "all", 40)
    rack.lose("all", "all", 1)
    rack.wait("the delay is seen", lambda: rack.view(0, 2)["rtt_ns"] > 75_000_000)
    time.sleep(3)
    expect(rack.view(0, 1)["rtt_ns"] < rack.view(0, 2)["rtt_ns"], "the delay is n2's alone")
    for check in checks:
        check()
    rack.heal()
    expect(rack.all_up(), "delay and loss made a node disappear")


def steps_of_the_wall_clock_do_nothing_but_show(rack):
    path = f"{rack.dir}/clock"
    rack.kill(2)
    with open(path, "w", encoding="ascii") as file:
        file.write("0\n")
    rack.start(2, env={"LD_PRELOAD": f"{BUILD}/tests/rack/libclock_step.so", "MOK_TEST_CLOCK": path})
    rack.wait_all_up()
    checks = [untouched(rack, 0, 2), untouched(rack, 1, 2)]
    for hours in (1, -24):
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(f"{hours * 3600}\n")
        os.rename(path + ".new", path)
        rack.wait(f"n0 sees n2's clock {hours} hours off",
                  lambda h=hours: abs(rack.view(0, 2)["clock_offset_ns"] - h * 3600 * SECOND_NS) < 60 * SECOND_NS)
    for check in checks:
        check()
    rack.kill(2)
    rack.start(2)
    rack.wait_all_up()


def report_33_a_flood_without_a_key_stalls_nobody(rack):
    rack.kill(0)
    rack.start(0, prefix=("prlimit", "--nofile=2048"))  # so that the flood is larger than what it may have
    rack.wait_all_up()
    checks = [untouched(rack, 0, 2)]
    most = rack.rack(0)["max_connections"]
    flood = rack.spawn(3, f"{BUILD}/tests/rack/flood", rack.address(0), str(PORT), "300", "1500")
    rack.kill(1)
    rack.wait("the flood is larger than the bound", lambda: "new connections are turned away" in rack.log(0))
    rack.start(1)  # whose address is of the inventory, comes in all the same
    rack.wait("n1 comes back during the flood", lambda: rack.state(0, 1) == "up")
    seen = 0
    for _ in range(20):
        seen = max(seen, rack.rack(0)["connections"])  # mokd answers its own clients meanwhile
        time.sleep(0.1)
    expect(flood.poll() is None, "the flood has ended by itself")
    flood.terminate()
    flood.wait()
    expect(seen < 2 * most, f"{seen} connections at once, the bound is {most}")
    expect(sum(rack.view(0, n)["malformed"] for n in (1, 2)) == 0, "the flood was taken for words of a peer")
    for check in checks:
        check()
    rack.wait("the flood's connections are gone", lambda: rack.rack(0)["connections"] <= 8)
    for i in (1, 0):  # and the door is open again
        rack.kill(i)
        rack.start(i)
        rack.wait_all_up()


def a_peer_with_a_key_that_sends_garbage_hurts_itself_alone(rack):
    others = untouched(rack, 0, 1)
    rack.kill(2)
    garbage = rack.spawn(2, f"{BUILD}/tests/rack/garbage", f"{rack.dir}/n2/rack.key", rack.public[0],
                         f"{rack.address(0)}:{PORT}", "3")
    expect(garbage.wait() == 0, "no garbage was sent")
    view = rack.view(0, 2)
    expect(view["malformed"] > 100, f"the garbage did not arrive: {view}")
    expect(view["state"] != "up", f"garbage made a link: {view}")
    others()
    rack.start(2)
    rack.wait_all_up()
    others()


def a_reload_removes_a_node_and_adds_it_again(rack):
    others = untouched(rack, 0, 1)
    rack.write_config(0, inventory=[0, 1])
    rack.signal(0, signal.SIGHUP)
    rack.wait("n2 is no longer in n0's inventory", lambda: rack.view(0, 2) is None)
    rack.wait("n2 has heard n0's goodbye", lambda: rack.state(2, 0) == "left")
    rack.wait("n2 says why n0 does not come back", lambda: "refuses the key" in rack.view(2, 0)["error"])
    others()
    expect(not rack.view(0, 1)["inventory_agrees"], "the inventories differ, and nobody says so")
    rack.wait("n0's doctor says it too", lambda: "not in the inventory in the last 5 minutes, the last one " in
              rack.mokctl(0, "doctor", check=False).stdout)
    rack.write_config(0, inventory=[0, 1, 2])
    rack.signal(0, signal.SIGHUP)
    rack.wait("n2 is back", lambda: rack.view(0, 2) is not None and rack.all_up())
    said = rack.mokctl(0, "doctor", check=False).stdout
    expect("not in the inventory" not in said, f"what is mended is reported: {said}")
    others()


def a_reload_with_an_error_changes_nothing(rack):
    before = rack.rack(0)["inventory"]
    rack.write_config(0, more="[node n9]\naddress = nowhere\n")
    rack.signal(0, signal.SIGHUP)
    time.sleep(0.3)
    expect(rack.rack(0)["inventory"] == before and rack.all_up(), "half a configuration was taken over")
    rack.write_config(0)


def a_node_that_ends_in_order_has_left_and_is_not_lost(rack):
    others = untouched(rack, 0, 1)
    expect(rack.stop(2) == 0, "mokd did not end in order")
    rack.wait("n2 has left", lambda: rack.state(0, 2) == "left" and rack.state(1, 2) == "left")
    expect("stopped in order" in rack.view(0, 2)["error"], str(rack.view(0, 2)))
    rack.start(2)
    rack.wait_all_up()
    others()


SCENARIOS = [
    all_find_each_other,
    a_killed_node_is_lost_and_comes_back_with_a_new_boot_id,
    a_hanging_node_is_lost_although_its_connections_stand,
    a_cut_cable_is_noticed_on_both_sides,
    a_one_way_partition_ends_the_link_on_both_sides,
    delay_and_loss_are_no_failure,
    steps_of_the_wall_clock_do_nothing_but_show,
    report_33_a_flood_without_a_key_stalls_nobody,
    a_peer_with_a_key_that_sends_garbage_hurts_itself_alone,
    a_reload_removes_a_node_and_adds_it_again,
    a_reload_with_an_error_changes_nothing,
    a_node_that_ends_in_order_has_left_and_is_not_lost,
]


def main():
    chosen = [s for s in SCENARIOS if len(sys.argv) < 2 or s.__name__ in sys.argv[1:]]
    with Rack(3, extra=1) as rack:
        rack.start_all()
        rack.wait_all_up()
        for scenario in chosen:
            began = time.monotonic()
            scenario(rack)
            print(f"{time.monotonic() - began:5.1f} s  {scenario.__name__.replace('_', ' ')}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.CalledProcessError) as error:
        print("failed:", error, getattr(error, "stderr", ""))
        sys.exit(1)
