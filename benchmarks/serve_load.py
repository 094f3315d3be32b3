# SPDX-License-Identifier: Apache-2.0
"""64 clients for minutes against a server of the tiny model: errors, lost requests, and the server's memory.

python benchmarks/serve_load.py CHECKPOINT [--minutes 5] [--clients 64]
"""

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from report import write_report

from sporeloom.core.lines import first_line

RESULTS = Path(__file__).parent / "results" / "serve_load.md"
TEXT = (Path(__file__).parents[1] / "examples" / "small_town.txt").read_text(encoding="utf-8")


def memory_mb(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


async def client(url, number, until, counts):
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < until:
            start = draw.randrange(len(TEXT) - 100)
            body = {
                "prompt": TEXT[start : start + draw.randint(2, 40)].strip() or "小镇",
                "max_tokens": draw.randint(1, 40),
            }
            body |= {"stream": draw.random() < 0.5, "logprobs": draw.choice([None, 2]), "seed": draw.randrange(100)}
            counts["asked"] += 1
            if draw.random() < 0.05:  # goes away
                try:
                    await asyncio.wait_for(http.post("/v1/completions", json=body), 0.05)
                except (asyncio.TimeoutError, httpx.HTTPError):
                    counts["left"] += 1
                    continue
                counts["answered"] += 1
                continue
            try:
                answer = await http.post("/v1/completions", json=body)
                whole = answer.text.rstrip().endswith("[DONE]") if body["stream"] else "usage" in answer.json()
                counts[
                    "answered" if answer.status_code == 200 and whole and '"error"' not in answer.text else "wrong"
                ] += 1
            except httpx.HTTPError:
                counts["wrong"] += 1


async def watch(pid, until, seen):
    while time.monotonic() < until:
        seen.append(memory_mb(pid))
        await asyncio.sleep(5)


async def load(url, pid, clients, minutes):
    until, seen = time.monotonic() + 60 * minutes, []
    counts = dict.fromkeys(("asked", "answered", "left", "wrong"), 0)
    await asyncio.gather(watch(pid, until, seen), *(client(url, n, until, counts) for n in range(clients)))
    return counts, seen


def main():
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("checkpoint")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile("w+") as log:
        words = [sys.executable, "-m", "sporeloom", "serve", arguments.checkpoint, "--port", "0"]
        server = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            while not (found := re.search(r"is served at (\S+)", Path(log.name).read_text())):
                assert server.poll() is None, Path(log.name).read_text()
                time.sleep(0.2)
            counts, seen = asyncio.run(load(found[1], server.pid, arguments.clients, arguments.minutes))
        finally:
            server.terminate()
            server.wait(60)
    first = seen[len(seen) // 5]
    lines = [
        f"{arguments.clients} clients for {arguments.minutes:g} minutes: {counts['asked']:,} requests, "
        f"{counts['answered']:,} answered in full, {counts['left']:,} given up by their clients, "
        f"{counts['wrong']:,} wrong or lost.",
        "",
        f"Memory of the server after a fifth of the time {first:.0f} MB, at the end {seen[-1]:.0f} MB: "
        f"{seen[-1] / first - 1:+.1%}.",
    ]
    print("\n".join(lines))
    write_report(RESULTS, "A server under load", "serve_load.py CHECKPOINT", lines)


if __name__ == "__main__":
    main()
