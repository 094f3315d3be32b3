# SPDX-License-Identifier: Apache-2.0
"""Decoding one sequence on one CPU process beside llama.cpp built for this processor, on a quiet machine and beside a program
that keeps one core busy.

PanGu 350M's dims against llama.cpp's GPT-2 of the same dims, random weights, context 512: int8 and w8a8 beside Q8_0, int4 in
groups of 32 beside Q4_0, float32 beside F32, each with a thread for each core; all workers take turns in one run.
Writes benchmarks/results/decode_busy.md. `pip install --no-binary llama-cpp-python llama-cpp-python gguf`, here or into
another environment (`--peer-python`), then `python benchmarks/decode_busy.py`. Where llama.cpp's AMX kernels end in a
segmentation fault, as on virtual machines that hide AMX, give CMAKE_ARGS="-DGGML_NATIVE=OFF" and the other features by name.
"""

import argparse
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
from turns import Worker, serve

DIMS = {"vocab_size": 40000, "hidden_size": 1024, "num_layers": 24, "num_heads": 16, "seq_len": 1024}
CONTEXT, TURNS, STEPS_A_TURN, WARM_UP, TARGET = 512, 9, 16, 8, 1.5
RESULTS = Path(__file__).resolve().parent / "results" / "decode_busy.md"
OURS = {
    "int4-g32": "sporeloom int4, groups of 32",
    "w8a8": "sporeloom w8a8",
    "int8": "sporeloom int8",
    "float32": "sporeloom float32",
}
NAMES = {**OURS, "Q4_0": "llama.cpp Q4_0", "Q8_0": "llama.cpp Q8_0", "F32": "llama.cpp F32"}


class Sporeloom:
    """The package's own path: KV cache, graph, compiled kernels, sampler."""

    def __init__(self, weights: str):
        from decode import Ours  # noqa: PLC0415

        ours = Ours()
        self.version = ours.version
        self.step = ours.cached(1, CONTEXT, weights)


class LlamaCpp:
    """A GPT-2 of random weights by llama.cpp."""

    def __init__(self, weights: str):
        import llama_cpp  # noqa: PLC0415

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(path, weights)
            threads = os.cpu_count()
            self.model = llama_cpp.Llama(
                str(path), n_ctx=1024, n_threads=threads, n_threads_batch=threads, use_mmap=False, verbose=False
            )
        features = llama_cpp.llama_print_system_info().decode()
        self.version = f"llama-cpp-python {llama_cpp.__version__} ({features.strip()})"
        self.model.eval([11] * CONTEXT)

    def step(self) -> None:
        self.model.eval([11])
        if self.model.n_tokens >= CONTEXT + STEPS_A_TURN:
            self.model.n_tokens = CONTEXT


def write_gguf(path: Path, weights: str) -> None:
    """A GPT-2 of `DIMS` with random weights, its matrices in `weights`."""
    import gguf  # noqa: PLC0415

    d, kind = DIMS["hidden_size"], gguf.GGMLQuantizationType[weights]
    writer, draw = gguf.GGUFWriter(path, "gpt2"), np.random.default_rng(0)
    writer.add_context_length(DIMS["seq_len"])
    writer.add_embedding_length(d)
    writer.add_block_count(DIMS["num_layers"])
    writer.add_feed_forward_length(4 * d)
    writer.add_head_count(DIMS["num_heads"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(DIMS["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, columns: int, kind=kind) -> None:
        value = draw.standard_normal((rows, columns), np.float32) * 0.02
        data = value if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(value, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    def vector(name: str, value: float, length: int = d) -> None:
        writer.add_tensor(name, np.full(length, value, np.float32))

    matrix("token_embd.weight", DIMS["vocab_size"], d)
    matrix("position_embd.weight", DIMS["seq_len"], d, gguf.GGMLQuantizationType.F32)
    matrix("output.weight", DIMS["vocab_size"], d)
    for norm in [
        "output_norm",
        *(f"blk.{i}.{n}" for i in range(DIMS["num_layers"]) for n in ("attn_norm", "ffn_norm")),
    ]:
        vector(f"{norm}.weight", 1.0)
        vector(f"{norm}.bias", 0.0)
    for i in range(DIMS["num_layers"]):
        for name, rows, columns in (
            ("attn_qkv", 3 * d, d),
            ("attn_output", d, d),
            ("ffn_up", 4 * d, d),
            ("ffn_down", d, 4 * d),
        ):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
            vector(f"blk.{i}.{name}.bias", 0.0, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextlib.contextmanager
def busy_cores(count: int):
    """So many programs that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(workers: dict[str, Worker], busy: int) -> dict[str, list[float]]:
    """Seconds a token of each worker, turn by turn."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    with busy_cores(busy):
        for _ in range(TURNS):
            for name, worker in workers.items():
                seconds[name].append(worker.ask()["seconds"])
    return seconds


def work(name: str) -> None:
    worker = Sporeloom(name) if name in OURS else LlamaCpp(name)
    for _ in range(WARM_UP):
        worker.step()

    def turn(_) -> dict:
        start = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            worker.step()
        return {"seconds": (time.perf_counter() - start) / STEPS_A_TURN}

    serve(turn, worker.version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has llama-cpp-python and gguf")
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker)
    workers = {
        name: Worker(__file__, name, sys.executable if name in OURS else arguments.peer_python) for name in NAMES
    }
    load = os.getloadavg()[0]
    found = {busy: measure(workers, busy) for busy in (0, 1)}
    versions = [workers["int8"].version, workers["Q8_0"].version]
    for worker in workers.values():
        worker.close()
    report(found, versions, load)


def report(found: dict[int, dict[str, list[float]]], versions: list[str], load: float) -> None:
    quiet, busy = ({name: statistics.median(taken) * 1e3 for name, taken in found[count].items()} for count in (0, 1))
    lines = [
        "# Decoding beside llama.cpp, on a quiet and on a busy machine",
        "",
        f"{date.today()}, {os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, "
        f"{versions[0]}; {versions[1]}. {DIMS}, one sequence, context {CONTEXT}, {TURNS} alternating turns of "
        f"{STEPS_A_TURN} tokens, {os.cpu_count()} threads each; load before the run {load:.1f}. Busy: one other program "
        "that computes without end. llama.cpp has OpenMP's threads, its default. `python benchmarks/decode_busy.py`",
        "",
        "| | quiet, ms a token (by turn) | busy, ms a token (by turn) | busy / quiet |",
        "|---|---|---|---|",
    ]
    for name, shown in NAMES.items():
        spans = [
            f"{m[name]:.1f} ({min(found[c][name]) * 1e3:.1f} .. {max(found[c][name]) * 1e3:.1f})"
            for c, m in ((0, quiet), (1, busy))
        ]
        lines.append(f"| {shown} | {spans[0]} | {spans[1]} | {busy[name] / quiet[name]:.2f} |")
    lines += [
        "",
        *(
            f"{theirs} takes {quiet[theirs] / quiet[ours]:.2f} times as long as {ours} on a quiet machine (target: "
            f"{TARGET}), {busy[theirs] / busy[ours]:.2f} times on a busy one."
            for ours, theirs in (("int4-g32", "Q4_0"), ("int8", "Q8_0"), ("w8a8", "Q8_0"))
        ),
        "",
        "llama.cpp rounds activations to int8 and multiplies bytes, as `--weights w8a8` does; `int4` and `int8` multiply "
        "floats, and give what the dequantized weights give. With AVX2 to widen int4 takes longer than memory does.",
    ]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
