#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The status page in a browser, loaded once: what it shows follows what mokd does, and it asks nobody else for anything.

usage: status_page.py CHROMIUM PORT DIRECTORY MOKD_PID; MOK_BUILD_DIR, MOK_SOURCE_DIR and MOK_SOCKET are set.
"""

import os
import re
import signal
import subprocess
import sys
import time

from browser import Browser

PATIENCE = 60
CHROMIUM, PORT, DIRECTORY, MOKD = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
BUILD = os.environ["MOK_BUILD_DIR"]

# What is to be seen, as one object: text of tiles by name; lines of them; rows of tables; shares and heat as they are
# drawn. null: the page is not there yet.
LOOK = """(() => {
  if (document.readyState !== "complete" || !document.getElementById("health")) return null;
  const texts = (root, query) => [...root.querySelectorAll(query)].map(e => e.textContent);
  const rows = id => [...document.querySelectorAll(`#${id} tbody tr`)].map(row => texts(row, "th,td"));
  return {
    looks: Number(document.body.dataset.looks ?? 0),
    health: document.getElementById("health").textContent,
    tiles: Object.fromEntries([...document.querySelectorAll("#tiles .tile")].map(t =>
      [t.querySelector("dt").textContent, { text: t.querySelector("dd").textContent, line: t.querySelector("path")?.getAttribute("d") }])),
    devices: rows("devices"), jobs: rows("jobs"), experts: rows("experts"), recent: rows("recent"),
    shares: Object.fromEntries([...document.querySelectorAll("#shares tbody tr")].map(row =>
      [row.querySelector("th").textContent, [...row.querySelectorAll(".track > i")].map(i => i.getBoundingClientRect().width /
        row.querySelector(".track").getBoundingClientRect().width)])),
    heat: [...document.querySelectorAll("#experts .heat")].map(h => [...h.children].map(i => getComputedStyle(i).backgroundColor)),
    labels: [...document.querySelectorAll("#experts .heat")].map(h => h.getAttribute("aria-label")),
    none: texts(document, "p.none"),
  };
})()"""


class Page:
    def __init__(self):
        profile = os.path.join(DIRECTORY, "profile")
        os.mkdir(profile)
        self.browser = Browser(CHROMIUM, profile)
        self.browser.call("Page.navigate", url=f"http://127.0.0.1:{PORT}/")

    def look(self):
        return self.browser.value(LOOK)

    def until(self, what, good):
        """The first look at the page that is so."""
        end = time.monotonic() + PATIENCE
        while True:
            seen = self.look()
            if seen is not None and good(seen):
                return seen
            assert time.monotonic() < end, f"{what}: not shown: {seen}"
            time.sleep(0.1)


def train(name):
    log = open(os.path.join(DIRECTORY, name), "wb")
    return subprocess.Popen(
        [f"{BUILD}/client/examples/train_moe_lm", "--job", name, "--ranks", "2", "--devices", "0,1", "--text",
         os.environ["MOK_SOURCE_DIR"] + "/README.md", "--steps", "1000000"], stdout=log, stderr=log)


def number(text):
    match = re.match(r"([0-9.]+)([KMB]?)", text)
    return float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2]] if match else 0


def idle_it_says_so(page):
    seen = page.until("devices", lambda seen: seen["looks"] >= 1)
    assert "all 2 devices are up" in seen["health"], seen["health"]
    assert [row[0] for row in seen["devices"]] == ["host0", "host1"], seen["devices"]
    assert seen["tiles"]["Sessions"]["text"] == "0", seen["tiles"]
    for text in ("No job is connected.", "No layer is open.", "None since mokd started."):
        assert text in seen["none"], f"{text}: {seen['none']}"


def a_job_appears_and_its_numbers_move(page):
    first = page.until("a job", lambda seen: len(seen["jobs"]) == 2 and len(seen["experts"]) >= 2
                       and number(seen["tiles"]["Operations a second"]["text"]) > 0
                       and all(number(row[5]) > 0 for row in seen["devices"]))
    assert first["tiles"]["Sessions"]["text"] == "2", first["tiles"]
    assert all(row[0] == "train_moe_lm" for row in first["jobs"]), first["jobs"]
    assert any(row[0] == "train_moe_lm · layer 0 · rank 1" for row in first["experts"]), first["experts"]
    assert all(re.match(r"[0-9]+ experts; most: expert [0-9]+ with [0-9.]+ of the mean", label) for label in first["labels"])
    cells = first["heat"][0]
    assert len(cells) >= 2 and len(set(cells)) >= 2, f"all experts have one colour: {cells}"

    # The next looks: each of these is another than before.
    parts = {
        "operations": lambda seen: seen["tiles"]["Operations a second"],
        "rows": lambda seen: seen["tiles"]["Rows a second"],
        "a device's numbers": lambda seen: seen["devices"][0],
        "a job's numbers": lambda seen: seen["jobs"][0],
        "colours of experts": lambda seen: seen["heat"],
        "what is said of them": lambda seen: seen["labels"],
    }
    still = set(parts)

    def moved(seen):
        still.difference_update({name for name in still if parts[name](seen) != parts[name](first)})
        return not still and seen["looks"] >= first["looks"] + 2

    later = page.until("numbers that move", moved)
    assert len(later["tiles"]["Operations a second"]["line"]) > len(first["tiles"]["Operations a second"]["line"] or "")
    # Alone on its device, a rank has all of it.
    assert all(len(shares) == 1 and shares[0] > 0.98 for shares in later["shares"].values()), later["shares"]


def a_second_job_takes_its_share_and_gives_it_back(page):
    second = train("second")
    try:
        seen = page.until("two shares of a device", lambda seen: len(seen["jobs"]) == 4 and
                          all(len(shares) == 2 and min(shares) > 0.1 for shares in seen["shares"].values()))
        assert set(seen["shares"]) == {"host0", "host1"}, seen["shares"]
    finally:
        second.send_signal(signal.SIGTERM)
        second.wait()
    page.until("one share again", lambda seen: len(seen["jobs"]) == 2 and
               all(len(shares) == 1 for shares in seen["shares"].values()))


def errors_appear_as_they_happen(page):
    before = page.look()["recent"]
    worker = subprocess.run(["pgrep", "-P", str(MOKD), "-f", "mok-worker:host1"], capture_output=True, text=True,
                            check=True)
    os.kill(int(worker.stdout), signal.SIGKILL)
    seen = page.until("a lost worker", lambda seen: len(seen["recent"]) > len(before) and
                      any("worker lost" in row[2] for row in seen["recent"]))
    row = next(row for row in seen["recent"] if "worker lost" in row[2])
    assert "was ended by signal 9" in row[3] and row[1].endswith(("error", "warning")), row
    seen = page.until("the next worker", lambda seen: "all 2 devices are up" in seen["health"] and
                      seen["devices"][1][10] == "1")


def dark_and_light_differ(page):
    pictures = []
    for scheme in ("dark", "light"):
        page.browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        pictures.append(page.browser.picture())
        assert pictures[-1].startswith(b"\x89PNG"), "no picture"
        if "MOK_TEST_SHOTS" in os.environ:
            with open(os.path.join(os.environ["MOK_TEST_SHOTS"], scheme + ".png"), "wb") as file:
                file.write(pictures[-1])
    assert pictures[0] != pictures[1], "dark and light look the same"


def it_asked_nobody_else_and_complained_of_nothing(page):
    own = f"http://127.0.0.1:{PORT}/"
    strange = [url for url in page.browser.requests if not url.startswith((own, "data:", "about:"))]
    assert not strange, f"asked for {strange}"
    assert page.browser.requests.count(own) == 1, "loaded more than once"
    assert page.browser.requests.count(own + "status.json") >= 3, page.browser.requests
    assert not page.browser.complaints, page.browser.complaints


def without_mokd_it_says_so(page):
    os.kill(MOKD, signal.SIGTERM)
    page.until("that nobody answers", lambda seen: "mokd does not answer" in seen["health"])


def main():
    page, job = Page(), None
    try:
        idle_it_says_so(page)
        job = train("train_moe_lm")
        a_job_appears_and_its_numbers_move(page)
        a_second_job_takes_its_share_and_gives_it_back(page)
        errors_appear_as_they_happen(page)
        dark_and_light_differ(page)
        it_asked_nobody_else_and_complained_of_nothing(page)
        without_mokd_it_says_so(page)
    finally:
        if job:
            job.kill()
            job.wait()
        page.browser.close()
    print("OK")


main()
