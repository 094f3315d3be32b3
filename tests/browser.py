# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests, told what to do over its own protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
import time

import pytest

aiohttp = pytest.importorskip("aiohttp")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
TIMEOUT_S = 60


class Page:
    """One page. Errors of its scripts and messages of its console are kept in `complaints`."""

    def __init__(self, socket):
        self.socket, self.number, self.complaints = socket, 0, []

    async def call(self, method, **parameters):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            message = await asyncio.wait_for(self.socket.receive_json(), TIMEOUT_S)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"]))
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]

    async def run(self, script):
        """The value of an expression of JavaScript, awaited."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script):
        """Wait until an expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not await self.run(script):
            assert time.monotonic() < deadline, script
            await asyncio.sleep(0.05)

    async def shoot(self, path):
        """A picture of what is seen."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


def browse(url, folder, work, width=1200, height=800):
    """Let `work`, a coroutine function, use a page at `url`. Returns what it returns."""
    words = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
    ]
    words += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "--no-first-run", "about:blank"]
    browser = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_browse(url, folder, work, width, height))
    finally:
        browser.terminate()
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait(10)


async def _browse(url, folder, work, width, height):
    port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + TIMEOUT_S
    while not (port_file.exists() and port_file.read_text().strip()):
        assert time.monotonic() < deadline, "Chromium did not start"
        await asyncio.sleep(0.05)
    port = port_file.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            (target,) = [each for each in await answer.json() if each["type"] == "page"]
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            for domain in ("Runtime", "Page", "Log"):
                await page.call(f"{domain}.enable")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            await page.call("Emulation.setDeviceMetricsOverride", **size)
            await page.call("Page.navigate", url=url)
            await page.until("document.readyState === 'complete'")
            return await work(page)
