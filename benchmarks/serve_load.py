# SPDX-License-Identifier: Apache-2.0
"""64 clients for minutes against a server of a tiny model with all that it has: errors, lost requests, and its memory.

Requests of all kinds (benchmarks/served.py) to a model in int4 with n-gram drafts, a prefix cache that overflows, and
adapters that are loaded and unloaded meanwhile; a twentieth of the clients go away. Writes benchmarks/results/serve_load.md.

python benchmarks/serve_load.py [--minutes 10] [--clients 64]
"""

import argparse
import asyncio
import itertools
import random
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from report import write_report
from served import WrongAnswerError, ask, build, mixed, serving

from sporeloom.core.lines import first_line
from sporeloom.serve.bench import BenchServeConfig, bench

RESULTS = Path(__file__).parent / "results" / "serve_load.md"
INPUT, OUTPUT = 32, 32
WATCH_S = 2.0


def memory_mb(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def client(url, number, until, counts, wrong):
    draw = random.Random(number)
    with httpx.Client(base_url=url, timeout=300) as http:
        for path, body in mixed(10**9, seed=number, models=("town", "town", "poet")):
            if time.monotonic() > until:
                return
            counts["asked"] += 1
            try:
                if draw.random() < 0.05:
                    http.post(path, json=body, timeout=draw.uniform(0.01, 0.3))
                else:
                    ask(http, path, body)
                counts["answered"] += 1
            except httpx.ReadTimeout:
                counts["left"] += 1
            except (WrongAnswerError, httpx.HTTPError) as error:
                wrong.append(f"{type(error).__name__}: {error}")


def change_adapters(url, until, counts, wrong):
    """Load adapters, ask for an answer of theirs, and unload them, again and again."""
    with httpx.Client(base_url=url, timeout=300) as http:
        for number in itertools.count():
            if time.monotonic() > until:
                return
            name = f"runtime-{number}"
            loaded = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "clerk"})
            counts["busy" if loaded.status_code == 409 else "loaded"] += 1
            if loaded.status_code == 200:
                body = {"model": name, "prompt": "小镇", "max_tokens": 4, "temperature": 0}
                answer = http.post("/v1/completions", json=body)
                gone = http.post("/v1/unload_lora_adapter", json={"lora_name": name})
                if (answer.status_code, gone.status_code) != (200, 200):
                    wrong.append(f"{answer.text} {gone.text}")
            elif loaded.status_code != 409:
                wrong.append(loaded.text)
            time.sleep(0.5)


def watch(pid, until, seen):
    while time.monotonic() < until:
        seen.append(memory_mb(pid))
        time.sleep(WATCH_S)


def throughput(url, concurrency):
    config = BenchServeConfig(
        base_url=url, model="town", input_len=INPUT, output_len=OUTPUT, num_prompts=6 * concurrency,
        max_concurrency=concurrency, ignore_eos=True,
    )  # fmt: skip
    return asyncio.run(bench(config))["output_throughput"]


def load(server, num_clients, minutes):
    """Counts of requests, what was wrong, and MB of memory over time."""
    until, counts, wrong, seen = time.monotonic() + 60 * minutes, Counter(), [], []
    with ThreadPoolExecutor(num_clients + 2) as pool:
        running = [
            pool.submit(watch, server.process.pid, until, seen),
            pool.submit(change_adapters, server.url, until, counts, wrong),
        ]
        running += [pool.submit(client, server.url, n, until, counts, wrong) for n in range(num_clients)]
        for each in running:
            each.result()
    return counts, wrong, seen


def main():
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        build(folder := Path(name))
        flags = ("--weights", "int4", "--speculate", "ngram", "--embeddings", "last", "--prefix-cache-gb", 0.02)
        flags += ("--lora-modules", f"poet={folder / 'poet'}", "--runtime-lora-folder", folder, "--max-loras", 2)
        with serving(folder / "town", *flags) as server:
            checked = list(mixed(20, seed=99))
            with httpx.Client(base_url=server.url, timeout=300) as http:
                before = [ask(http, *each) for each in checked]
                full = [throughput(server.url, number) for number in (1, 8)]
                counts, wrong, seen = load(server, asked.clients, asked.minutes)
                left_over = server.metric("num_requests_running") + server.metric("num_requests_waiting")
                after = [ask(http, *each) for each in checked]
        with serving(folder / "town") as server:
            plain = [throughput(server.url, number) for number in (1, 8)]
    wrong += [f"{left_over:.0f} requests are still there"] if left_over else []
    wrong += [f"{checked[n]}: another answer than before" for n in range(20) if before[n] != after[n]]
    first = seen[len(seen) // 5]
    lines = [
        f"{asked.clients} clients for {asked.minutes:g} minutes: {counts['asked']:,} requests, {counts['answered']:,} "
        f"answered in full, {counts['left']:,} given up by their clients, {len(wrong)} wrong or lost. Meanwhile "
        f"adapters were loaded and unloaded {counts['loaded']} times "
        f"({counts['busy']} times no slot was free). 20 requests "
        "that were answered before were answered with the same bits afterwards.",
        "",
        f"Memory of the server after a fifth of the time {first:.0f} MB, at the end {seen[-1]:.0f} MB: "
        f"{seen[-1] / first - 1:+.1%}.",
        "",
        f"Before, with {INPUT} tokens in and {OUTPUT} out: {full[0]:.0f} tokens/s with 1 client, {full[1]:.0f} with 8. A "
        "single client has the places of the other sequences for its drafts, and its random texts repeat themselves. "
        f"A server without adapters and drafts: {plain[0]:.0f} and {plain[1]:.0f}, {plain[1] / plain[0]:.1f} times. "
        "Of so small a model HTTP takes most of the time; `benchmarks/results/serve.md` has one of 350M dimensions.",
    ]
    print("\n".join([*wrong[:10], *lines]))
    if wrong:
        raise SystemExit(f"{len(wrong)} wrong or lost")
    write_report(RESULTS, "A server under load", f"serve_load.py --minutes {asked.minutes:g}", lines)


if __name__ == "__main__":
    main()
