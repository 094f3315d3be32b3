# SPDX-License-Identifier: Apache-2.0
"""How a server of PanGu-350M's dimensions answers: 8 requests at once against one, and a long prompt beside a short one.

    python benchmarks/serve.py [--size 350m]

Random weights: what is generated does not matter. One process, float32. Where torch, transformers and fastapi are installed
(`pip install -e '.[benchmark]' fastapi`) the same is asked of `transformers serve` with a GPT-2 of the same dimensions,
without its continuous batching, which needs the memory of an accelerator (4.57.1 ends with a TypeError on CPU).
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import psutil
from report import write_report

from sporeloom.checkpoint.model_folder import save_checkpoint
from sporeloom.core.lines import file_lines, first_line, stream_lines
from sporeloom.data.tokenizer import load_tokenizer
from sporeloom.models.family import family_module, size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.runtime.launch import free_port
from sporeloom.serve.bench import BenchServeConfig, bench

RESULTS = Path(__file__).parent / "results" / "serve.md"
TEXT = Path(__file__).parents[1] / "examples" / "small_town.txt"
INPUT, OUTPUT, LONG, STREAM = 32, 32, 512, 128
CASES = ((INPUT, OUTPUT), (INPUT, 128), (8, OUTPUT))
"""Tokens of a prompt and of an answer."""
PEERS = ("torch", "transformers", "fastapi")
FIGURES = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "processor_ms")


def random_checkpoint(folder, size):
    config, draw = size_config("pangu", size), np.random.default_rng(0)
    train = family_module("pangu", "tokenizer").train_tokenizer
    (folder / "tokenizer.model").write_bytes(train(file_lines(TEXT), 800))
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
        body = {"prompt": [50] * INPUT, "max_tokens": STREAM, "temperature": 0, "ignore_eos": True, "stream": True}
        came = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in stream_lines(answer.aiter_bytes()):
                if line.startswith("data: {"):
                    came.append(time.perf_counter())
        return np.diff(came), np.asarray(came[1:]), await later if later else None


def throughput(url, concurrency, ignore_eos=True, input_len=INPUT, output_len=OUTPUT, num_warmups=1, **more):
    config = BenchServeConfig(
        base_url=url, input_len=input_len, output_len=output_len, num_prompts=2 * concurrency, max_concurrency=concurrency,
        ignore_eos=ignore_eos, num_warmups=num_warmups, **more,
    )  # fmt: skip
    return asyncio.run(bench(config))


def processor_s(process):
    """Seconds of processor time of a running process so far."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def processor_time(told):
    """Processor time of a token, for the table; of another server nothing is known."""
    return f"{told['processor_ms']:.0f} ms" if "processor_ms" in told else ""


def line(n, prompt, answer, told):
    """A row of the table."""
    times = f"{told['mean_ttft_ms']:.0f} ms | {told['mean_tpot_ms']:.0f} ms | {processor_time(told)}"
    return f"| {n} | {prompt} | {answer} | {told['output_throughput']:.1f} | {times} |"


def medians(server, rounds, prompt, answer):
    """One request at a time and eight at once by turns, as other work on the machine hits both: medians of each figure, with
    the milliseconds of processor time of an output token. All prompts are new: the prefix cache has none of them."""
    throughput(server.url, 8, input_len=prompt, output_len=2, seed=prompt + answer)
    found = {1: [], 8: []}
    for number in range(rounds):
        for n, of_n in found.items():
            before = processor_s(server.process)
            seed = 10000 * prompt + 100 * answer + 10 * number + n
            told = throughput(server.url, n, input_len=prompt, output_len=answer, num_warmups=0, seed=seed)
            assert not told["failed"], told
            told["processor_ms"] = (processor_s(server.process) - before) / told["total_output_tokens"] * 1e3
            of_n.append({name: told[name] for name in FIGURES})
            print(n, prompt, answer, of_n[-1], flush=True)
    return [{name: float(np.median([one[name] for one in of_n])) for name in FIGURES} for of_n in found.values()]


def measure(server, rounds):
    told, url = [medians(server, rounds, *case) for case in CASES], server.url
    calm, _, _ = asyncio.run(gaps_of_a_stream(url, []))
    long_prompt = {"prompt": list(range(20, 20 + LONG)), "max_tokens": 1}
    busy, came, (start, end) = asyncio.run(gaps_of_a_stream(url, [long_prompt]))
    beside = busy[(came > start) & (came < end)]
    alone = time.perf_counter()
    httpx.post(f"{url}/v1/completions", json={**long_prompt, "prompt": long_prompt["prompt"][::-1]}, timeout=600)
    return told, calm, beside, end - start, time.perf_counter() - alone


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen


@contextlib.contextmanager
def running(words, says):
    """A server that was started so, once it says where it answers."""
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            while not (found := re.search(says, Path(log.name).read_text())):
                assert server.poll() is None, Path(log.name).read_text()
                time.sleep(0.2)
            yield Server(found[1], server)
        finally:
            server.terminate()
            server.wait(60)


def theirs(folder, size):
    """The same of `transformers serve`: a GPT-2 of the same dims, a token a character, texts of as many characters."""
    import torch  # noqa: PLC0415 (optional)
    import transformers  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    dims = size_config("pangu", size)
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), dims.vocab_size - 1)}
    vocab["<|end|>"] = dims.vocab_size - 1
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=dims.vocab_size, n_positions=1024, n_embd=dims.hidden_size, n_layer=dims.num_layers, n_head=dims.num_heads,
        eos_token_id=dims.vocab_size - 1,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    prompts = folder / "prompts.jsonl"
    draw = np.random.default_rng(0)
    texts = ["".join(map(chr, draw.integers(97, 123, INPUT))) for _ in range(16)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = [str(Path(sys.executable).with_name("transformers")), "serve", "--force-model", str(folder)]
    more = {"endpoint": "/v1/chat/completions", "dataset_name": "custom", "dataset_path": prompts, "model": str(folder)}
    more["ignore_eos"] = False
    with running(
        [*words, "--device", "cpu", "--dtype", "float32", "--port", str(free_port())], r"running on (\S+)"
    ) as server:
        found = [throughput(server.url, n, **more) for n in (1, 8)]
    for told in found:  # it counts no tokens, and ends with a piece of text that holds none
        assert not told["failed"] and told["total_output_tokens"] >= told["completed"] * OUTPUT, told
        told["output_throughput"] = told["completed"] * OUTPUT / told["duration_s"]
    return f"transformers {transformers.__version__} on PyTorch {torch.__version__}", found


def main():
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--size", default="350m")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        checkpoint = random_checkpoint(Path(name), arguments.size)
        words = [sys.executable, "-m", "sporeloom", "serve", str(checkpoint), "--port", "0", "--max-model-len", "640"]
        with running(words, r"is served at (\S+)") as server:
            ours, calm, beside, seconds, alone = measure(server, arguments.rounds)
        peer, peers = theirs(Path(name), arguments.size) if all(map(find_spec, PEERS)) else ("", [])
    rows, ratios = [], []
    for (prompt, answer), of_case in zip(CASES, ours, strict=True):
        rows += [line(n, prompt, answer, told) for n, told in zip((1, 8), of_case, strict=True)]
        one, eight = of_case
        ratio = eight["output_throughput"] / one["output_throughput"]
        cheaper = one["processor_ms"] / eight["processor_ms"]
        ratios.append(f"{prompt} in and {answer} out {ratio:.1f} times (processor time {cheaper:.1f})")
    rows += [line(f"{n}, {peer}", INPUT, OUTPUT, told) for n, told in zip((1, 8), peers, strict=False)]
    lines = [
        f"PanGu {arguments.size}, prompts all new. Medians of {arguments.rounds} rounds of one request at a time and eight "
        f"at once by turns; load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}.",
        "",
        "| requests at once | tokens in | tokens out | tokens/s | TTFT, mean | TPOT, mean | processor time a token |",
        "|---" * 7 + "|",
        *rows,
        "",
        f"Tokens/s of 8 requests at once against one at a time, with {', '.join(ratios)}; target: 5 at {OUTPUT} out.",
        "A prompt is as much work in company as alone.",
        "",
        f"Inter-token latency of a stream: {np.median(calm) * 1e3:.0f} ms alone; {np.median(beside) * 1e3:.0f} ms, at most "
        f"{beside.max() * 1e3:.0f} ms, while a prompt of {LONG} tokens is prefilled, which takes {seconds:.1f} s: "
        f"{np.median(beside) / np.median(calm):.1f} times (target: at most 2).",
        "",
        f"A prompt of {LONG} tokens alone: {alone:.1f} s to its first token.",
    ]
    print("\n".join(lines))
    write_report(RESULTS, "A server of 350M dimensions", "serve.py", lines)


if __name__ == "__main__":
    main()
