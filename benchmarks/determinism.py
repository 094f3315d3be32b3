# SPDX-License-Identifier: Apache-2.0
"""200 mixed requests to servers of all kinds: is an answer the same alone, among the others, with drafts and on a mesh?

Chats, completions, tools, JSON schemas, repetitions that are drafted, prompts that the prefix cache has, adapters, int8,
embeddings and reranking; greedy and sampled, streamed and in one piece. Writes benchmarks/results/determinism.md.

python benchmarks/determinism.py [--requests 200]
"""

import argparse
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from report import write_report
from served import ADAPTERS, ROOT, ask, build, mixed, serving

from sporeloom.core.lines import first_line

RESULTS = Path(__file__).parent / "results" / "determinism.md"
TOLERANCE = 1e-5
"""Largest difference of a log-probability, or of a number of a vector, between meshes, or between kernels and operators."""
TP2 = ROOT / "parallel_configs" / "pangu_tiny_tp2.yaml"
NGRAM = ("--speculate", "ngram", "--num-speculative-tokens", 4)


@dataclass(frozen=True)
class Kind:
    """A kind of server."""

    name: str
    flags: tuple
    reference: int | None
    """Number of the kind whose answers must be equal."""
    is_exact: bool = True
    """Whether to the bit."""
    has_adapters: bool = False


def kinds(folder):
    drafts = ("--speculate", "model", "--draft-model", folder / "small", "--num-speculative-tokens", 4)
    modules = ("--lora-modules", *(f"{name}={folder / name}" for name in ADAPTERS))
    mesh = ("--strategy", TP2, "--launch")
    return [
        Kind("one device", (), None),
        Kind("n-gram drafts", NGRAM, 0),
        Kind("draft model", drafts, 0),
        Kind("adapters, n-gram drafts", (*modules, *NGRAM), 0, False, True),
        Kind("tp 2, 2 processes", mesh, 0, False),
        Kind("tp 2, adapters, n-gram drafts", (*mesh, *modules, *NGRAM), 3, False, True),
        Kind("int8", ("--weights", "int8"), None),
        Kind("int8, draft model", ("--weights", "int8", *drafts), 6),
        Kind("tp 2, draft model", (*mesh, *drafts), 4),
        Kind("no prefix cache, chunks of 7", ("--prefix-cache-gb", 0, "--prefill-chunk", 7), 0),
        Kind("int4", ("--weights", "int4"), None),
        Kind("int4, draft model", ("--weights", "int4", *drafts), 10),
        Kind("int4, adapters, n-gram drafts", ("--weights", "int4", *modules, *NGRAM), 10, False, True),
        Kind("tp 2, int4, n-gram drafts", (*mesh, "--weights", "int4-g32", *NGRAM), None),
        Kind("w8a8, KV cache of int8", ("--weights", "w8a8", "--kv-cache", "int8"), None),
        Kind("w8a8, KV cache of int8, n-gram drafts", ("--weights", "w8a8", "--kv-cache", "int8", *NGRAM), 14),
    ]


def alone(url, requests):
    with httpx.Client(base_url=url, timeout=300) as http:
        return [ask(http, *each) for each in requests]


def together(url, requests, seed=0):
    """All at once, in another order, among others whose clients go away."""
    draw = random.Random(seed)
    order = draw.sample(range(len(requests)), len(requests))
    done = threading.Event()

    def leave(each):
        path, body = each
        while not done.is_set():
            try:
                httpx.post(f"{url}{path}", json={**body, "seed": draw.randrange(1000)}, timeout=draw.uniform(0.02, 0.3))
            except httpx.TimeoutException:
                time.sleep(0.2)

    with (
        httpx.Client(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as http,
        ThreadPoolExecutor(3) as leaving,
        ThreadPoolExecutor(64) as pool,
    ):
        for each in requests[:3]:
            leaving.submit(leave, each)
        try:
            found = dict(zip(order, pool.map(lambda place: ask(http, *requests[place]), order), strict=True))
        finally:
            done.set()
    return [found[place] for place in range(len(requests))]


def different(found, expected, tolerance=0.0):
    """Numbers of the answers that are not equal, and the largest difference of two numbers."""
    wrong, most = [], 0.0
    for number, ((said, numbers), (other_said, others)) in enumerate(zip(found, expected, strict=True)):
        if said != other_said or len(numbers) != len(others):
            wrong.append(number)
            continue
        largest = float(np.abs(np.subtract(numbers, others)).max(initial=0.0))
        most = max(most, largest)
        if not largest <= tolerance:
            wrong.append(number)
    return wrong, most


def measure(folder, chosen, requests, plain):
    """Yield the row of each kind of server in the table, and whether all answers are as they must be. `plain`: which of the
    requests name no adapter."""
    answers = {}
    for number, kind in chosen.items():
        mine = requests if kind.has_adapters else [requests[place] for place in plain]
        with serving(folder / "town", "--embeddings", "last", *kind.flags) as server:
            answers[number] = own = alone(server.url, mine)
            many = together(server.url, mine)
            drafted = server.metric("spec_decode_num_accepted_tokens_total")
            reused = server.metric("prefix_cache_hits_total")
        wrong, _ = different(many, own)
        shown = [mine[place] for place in wrong]
        against, most = "", ""
        if kind.reference is not None:
            reference = answers[kind.reference]
            if len(reference) < len(own):
                own, mine = [own[place] for place in plain], [mine[place] for place in plain]
            others, largest = different(own, reference, 0.0 if kind.is_exact else TOLERANCE)
            against, most = f"{len(others)} of {len(own)} ({chosen[kind.reference].name})", f"{largest:.0e}"
            shown += [mine[place] for place in others]
        row = f"| {kind.name} | {len(many)} | {len(wrong)} | {against} | {most} | {drafted:.0f} | {reused:.0f} |"
        print(row, *shown[:4], flush=True)
        yield row, not shown


def main():
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--requests", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        build(folder := Path(name))
        requests = list(mixed(asked.requests, models=("town", "town", *ADAPTERS)))
        plain = [place for place, (_, body) in enumerate(requests) if body["model"] == "town"]
        missing = asked.requests - len(plain)  # the others name an adapter
        requests += list(mixed(missing, seed=1))
        plain += range(asked.requests, len(requests))
        rows, right = [], []
        for row, is_right in measure(folder, dict(enumerate(kinds(folder))), requests, plain):
            rows.append(row)
            right.append(is_right)
            report(asked.requests, missing, rows)
    if not all(right):
        raise SystemExit("answers differ")


def report(count, with_adapters, rows):
    """Write the table, also of the servers so far: all take an hour on a busy machine."""
    lines = [
        f"{count} requests without adapters to every kind of server, and {with_adapters} with adapters where there are some; "
        "alone one after another, then all from 64 clients in another order, while other clients go away. openPangu's "
        "tiny model with 2 layers and random weights.",
        "",
        "| server | requests | alone and together differ | differ from another server | largest difference | drafted tokens "
        "accepted | prompt tokens reused |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Texts, tool calls and reasons of ends must be equal everywhere. Log-probabilities and vectors must be equal to the "
        "bit, but between meshes, and between the fixed batches that adapters need and those of the kernels, within "
        f"{TOLERANCE:g}.",
    ]
    write_report(RESULTS, "Determinism of the server", f"determinism.py --requests {count}", lines)


if __name__ == "__main__":
    main()
