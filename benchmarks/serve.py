# SPDX-License-Identifier: Apache-2.0
"""How a server of PanGu-350M's dimensions answers: 8 requests at once against one, and a long prompt beside a short one.

    python benchmarks/serve.py [--size 350m]

Random weights: what is generated does not matter. One process, float32.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from report import write_report

from mindloom.checkpoint.model_folder import save_checkpoint
from mindloom.data.tokenizer import load_tokenizer
from mindloom.models.family import family_module, size_config
from mindloom.models.parameters import parameter_shapes
from mindloom.serve.bench import BenchServeConfig, bench

RESULTS = Path(__file__).parent / "results" / "serve.md"
TEXT = Path(__file__).parents[1] / "examples" / "small_town.txt"
INPUT, OUTPUT, LONG = 32, 32, 512


def random_checkpoint(folder, size):
    config, draw = size_config("pangu", size), np.random.default_rng(0)
    train = family_module("pangu", "tokenizer").train_tokenizer
    (folder / "tokenizer.model").write_bytes(train(TEXT.read_text(encoding="utf-8").splitlines(), 800))
    weights = {
        name: (draw.standard_normal(shape, np.float32) * 0.02) + name.endswith("norm.weight")
        for name, shape in parameter_shapes(config).items()
    }
    tokenizer = load_tokenizer("pangu", folder / "tokenizer.model", config)
    save_checkpoint(folder / "checkpoint", weights, "pangu", config, tokenizer.save)
    return folder / "checkpoint"


async def gaps_of_a_stream(url, others):
    """Seconds between the tokens of a stream, and when each came; `others`: what is asked while it runs, after a second."""

    async def ask_later(client):
        await asyncio.sleep(1.0)
        start = time.perf_counter()
        for body in others:
            await client.post("/v1/completions", json=body)
        return start, time.perf_counter()

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        later = asyncio.ensure_future(ask_later(client)) if others else None
        body = {"prompt": [50] * INPUT, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True}
        came = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    came.append(time.perf_counter())
        return np.diff(came), np.asarray(came[1:]), await later if later else None


def measure(url):
    def throughput(concurrency):
        config = BenchServeConfig(
            base_url=url, input_len=INPUT, output_len=OUTPUT, num_prompts=2 * concurrency, max_concurrency=concurrency,
            ignore_eos=True, num_warmups=1,
        )  # fmt: skip
        return asyncio.run(bench(config))

    one, eight = throughput(1), throughput(8)
    calm, _, _ = asyncio.run(gaps_of_a_stream(url, []))
    long_prompt = {"prompt": list(range(20, 20 + LONG)), "max_tokens": 1}
    busy, came, (start, end) = asyncio.run(gaps_of_a_stream(url, [long_prompt]))
    beside = busy[(came > start) & (came < end)]
    return one, eight, calm, beside, end - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="350m")
    parser.add_argument("--prefill-chunk", default="16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.NamedTemporaryFile("w+") as log:
        checkpoint = random_checkpoint(Path(name), arguments.size)
        words = [sys.executable, "-m", "mindloom", "serve", str(checkpoint), "--port", "0", "--max-model-len", "640"]
        server = subprocess.Popen([*words, "--prefill-chunk", arguments.prefill_chunk], stdout=log, stderr=log)
        try:
            while not (found := re.search(r"is served at (\S+)", Path(log.name).read_text())):
                assert server.poll() is None, Path(log.name).read_text()
                time.sleep(0.2)
            one, eight, calm, beside, seconds = measure(found[1])
        finally:
            server.terminate()
            server.wait(60)
    ratio = eight["output_throughput"] / one["output_throughput"]
    lines = [
        f"PanGu {arguments.size}, {INPUT} tokens in, {OUTPUT} out, --prefill-chunk {arguments.prefill_chunk}.",
        "",
        "| requests at once | tokens/s | TTFT, mean | TPOT, mean |",
        "|---|---|---|---|",
        *(
            f"| {n} | {told['output_throughput']:.1f} | {told['mean_ttft_ms']:.0f} ms | {told['mean_tpot_ms']:.0f} ms |"
            for n, told in ((1, one), (8, eight))
        ),
        "",
        f"8 at once give {ratio:.1f} times the tokens/s of one at a time (target: 5).",
        "",
        f"Between two tokens of a stream: {np.median(calm) * 1e3:.0f} ms alone; {np.median(beside) * 1e3:.0f} ms, at most "
        f"{beside.max() * 1e3:.0f} ms, while a prompt of {LONG} tokens is worked through, which takes {seconds:.1f} s: "
        f"{np.median(beside) / np.median(calm):.1f} times (target: at most 2).",
    ]
    print("\n".join(lines), json.dumps({"one": one, "eight": eight}))
    write_report(RESULTS, "A server of 350M dimensions", "serve.py", lines)


if __name__ == "__main__":
    main()
