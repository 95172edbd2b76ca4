# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium that a test looks at a page with: told what to do over two pipes, in its DevTools protocol."""

import base64
import json
import os
import select
import subprocess
import time

PATIENCE = 60


class Browser:
    """One page. What it asked for and what it complained of is kept."""

    def __init__(self, program, profile):
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()

        def hand_over():  # its ends of the pipes are 3 and 4
            high = os.dup(to_read), os.dup(from_write)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.log = open(os.path.join(profile, "browser.log"), "wb")
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars", "--window-size=1280,1500"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, preexec_fn=hand_over, close_fds=False)
        os.close(to_read)
        os.close(from_write)
        self.to, self.come = to_write, from_read
        self.buffer, self.last, self.session = b"", 0, None
        self.requests, self.complaints = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Network", "Log", "Runtime"):
            self.call(part + ".enable")

    def _message(self, end):
        while b"\0" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.come], [], [], left)[0]:
                raise AssertionError("the browser does not answer")
            data = os.read(self.come, 1 << 20)
            if not data:
                raise AssertionError("the browser ended")
            self.buffer += data
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def _note(self, event):
        parameters = event["params"]
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event["method"] == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(parameters["exceptionDetails"]["text"])

    def call(self, method, **parameters):
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._message(end)
            if answer.get("id") == self.last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if "method" in answer:
                self._note(answer)

    def value(self, expression):
        """What an expression of the page's script gives; as JSON can say it."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def picture(self):
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def close(self):
        try:
            os.write(self.to, json.dumps({"id": self.last + 1, "method": "Browser.close"}).encode() + b"\0")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.log.close()
