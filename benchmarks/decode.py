# SPDX-License-Identifier: Apache-2.0
"""Decoded tokens/s on one CPU process: with compiled kernels, by MindSpore's operators, and beside Hugging Face transformers'
GPT-2 of the same dims on PyTorch where that is installed.

PanGu 350M's dims, float32, greedy; all workers take turns in one run. Also: the limit, what reading the weights once and the
keys and values of every row must take at the bandwidth measured before each turn, as a share of a step; and cached against
recomputed decoding.
Writes benchmarks/results/decode.md. `pip install -e '.[benchmark]'`, then `python benchmarks/decode.py`.
"""

import argparse
import os
import platform
import statistics
import threading
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from turns import Worker, serve

CONTEXTS, BATCHES = (64, 512, 1000), (1, 8)
AT_512 = {"batch": 1, "context": 512}
ROUNDS, STEPS_A_TURN, WARM_UP = 5, 8, 40
DIMS = {"vocab_size": 40000, "hidden_size": 1024, "num_layers": 24, "num_heads": 16, "seq_len": 1024}
LARGE = np.empty(2**28, np.float32)  # 1 GiB, once it is filled
RESULTS = Path(__file__).resolve().parent / "results" / "decode.md"


def timed(step, steps) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


class Ours:
    """The package's own path: KV cache, graph, sampler."""

    def __init__(self):
        import mindspore as ms  # noqa: PLC0415 (each worker loads its own framework only)

        from sporeloom.inference.sampling import History, Sampler, SamplingConfig  # noqa: PLC0415
        from sporeloom.models.config import ModelConfig  # noqa: PLC0415
        from sporeloom.runtime.engine import Engine  # noqa: PLC0415
        from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415

        ms.set_device("CPU")
        self.version = f"MindSpore {ms.__version__}"
        self.engine, self.config = Engine.start(SINGLE_DEVICE), ModelConfig(**DIMS, dropout_rate=0.0)
        self.sampler, self.history = Sampler(SamplingConfig()), History([], [])
        self.weights, self.steps = {}, {}

    def network(self, caches=None, weights="float32"):
        """A network; those of one kind share their weights."""
        from mindspore import Tensor  # noqa: PLC0415

        from sporeloom.inference.memory import side_by_side  # noqa: PLC0415
        from sporeloom.inference.model import build_model  # noqa: PLC0415
        from sporeloom.models.weight_formats import WEIGHT_FORMATS  # noqa: PLC0415
        from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415

        net = build_model("pangu", self.config, SINGLE_DEVICE, caches, WEIGHT_FORMATS[weights])
        draw = np.random.default_rng(0)
        parameters = list(net.get_parameters())
        for p, place in zip(parameters, side_by_side(parameters), strict=True):
            if ".cache." in p.name:
                place[...] = 0
                p.set_data(Tensor.from_numpy(place))
                continue
            key = (p.name, str(p.dtype), p.shape)
            if key not in self.weights:
                value = draw.standard_normal(p.shape, np.float32) * 0.02
                place[...] = value if key[1] == "Float32" else (value * 1000).astype(np.int8).astype(place.dtype)
                self.weights[key] = Tensor.from_numpy(place)
            p.set_data(self.weights[key])
        return net

    def choose(self, logits) -> list[int]:
        return [self.sampler.choose(row, self.history) for row in logits.values()]

    def cached(self, batch, context, weights):
        from sporeloom.inference.mixed import cached  # noqa: PLC0415
        from sporeloom.models.slots import num_slots_for  # noqa: PLC0415

        slots = num_slots_for(context + STEPS_A_TURN)
        decoding = cached(self.engine, self.network((batch, slots), weights), self.config, batch, slots)
        decoding.slot_table.lengths[:] = context

        def step():
            self.choose(decoding.step({}, dict.fromkeys(range(batch), 11)))
            if decoding.slot_table.lengths[0] == context + STEPS_A_TURN:
                decoding.slot_table.lengths[:] = context

        return step

    def recomputed(self, batch, context, weights):
        from sporeloom.inference.uncached import UncachedDecoder  # noqa: PLC0415

        decoding = UncachedDecoder(self.engine, self.network(weights=weights), self.config, batch)

        def step():
            for row in range(batch):
                decoding.tokens[row] = [11] * (context - 1)
            self.choose(decoding.step({}, dict.fromkeys(range(batch), 11)))

        return step

    def __call__(self, case):
        kind, batch, context = case["kind"], case["batch"], case["context"]
        weights = case.get("weights", "float32")
        key = (kind, batch, context, weights)
        if key not in self.steps:
            self.steps = {}  # one network with its cache at a time
            self.steps[key] = getattr(self, kind)(batch, context, weights)
            timed(self.steps[key], WARM_UP if kind == "cached" else 2)  # kernels choose their threads by trying
        return {"seconds": timed(self.steps[key], STEPS_A_TURN if kind == "cached" else 1)}


class Theirs:
    """GPT2LMHeadModel with transformers' own cache."""

    def __init__(self):
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415

        torch.set_grad_enabled(False)
        self.version = f"transformers {transformers.__version__} on PyTorch {torch.__version__}"
        self.config = transformers.GPT2Config(
            vocab_size=DIMS["vocab_size"],
            n_embd=DIMS["hidden_size"],
            n_layer=DIMS["num_layers"],
            n_head=DIMS["num_heads"],
            n_positions=DIMS["seq_len"],
        )
        self.model = transformers.GPT2LMHeadModel(self.config).eval()
        self.steps = {}

    def cached(self, batch, context):
        import torch  # noqa: PLC0415
        from transformers import DynamicCache  # noqa: PLC0415

        cache = DynamicCache(config=self.config)
        shape = (batch, DIMS["num_heads"], context, DIMS["hidden_size"] // DIMS["num_heads"])
        for layer in range(DIMS["num_layers"]):
            cache.update(torch.zeros(shape), torch.zeros(shape), layer)
        tokens = torch.full((batch, 1), 11)

        def step():
            output = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            output.logits[:, -1].argmax(-1)
            if cache.get_seq_length() == context + STEPS_A_TURN:
                cache.crop(context)

        return step

    def __call__(self, case):
        key = (case["batch"], case["context"])
        if key not in self.steps:
            self.steps = {key: self.cached(*key)}
            timed(self.steps[key], STEPS_A_TURN)
        return {"seconds": timed(self.steps[key], STEPS_A_TURN)}


def read_bandwidth() -> float:
    """Bytes/s that all cores together read from memory now, by the best of three ways."""
    best = 0.0
    for work in (np.sum, np.max, lambda part: part.dot(part)):
        parts = [threading.Thread(target=work, args=(p,)) for p in np.array_split(LARGE, os.cpu_count())]
        start = time.perf_counter()
        for part in parts:
            part.start()
        for part in parts:
            part.join()
        best = max(best, LARGE.nbytes / (time.perf_counter() - start))
    return best


def weight_bytes() -> int:
    """Of all matrices a token is multiplied with: those of the layers, and the word table in the head."""
    d = DIMS["hidden_size"]
    return 4 * (DIMS["num_layers"] * (12 * d * d + 13 * d) + DIMS["vocab_size"] * d)


def cache_bytes(batch: int, context: int) -> int:
    """Of the keys and values of all rows."""
    return 2 * 4 * DIMS["num_layers"] * batch * context * DIMS["hidden_size"]


def share_of_limit(case, seconds, bandwidths, with_cache: bool = True) -> float:
    """What reading takes at least, of what a step took: the median over the turns, each by the bandwidth before it."""
    num_bytes = weight_bytes() + (cache_bytes(*case) if with_cache else 0)
    return statistics.median(num_bytes / width / taken for taken, width in zip(seconds, bandwidths, strict=True))


def measure(workers, case, bandwidths) -> list[list[float]]:
    seconds = [[] for _ in workers]
    for _ in range(ROUNDS):
        bandwidths.append(read_bandwidth())
        for worker, taken in zip(workers, seconds, strict=True):
            taken.append(worker.ask(case)["seconds"])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=["ours", "operators", "theirs"])
    if name := parser.parse_args().worker:
        if name == "operators":
            os.environ["SPORELOOM_KERNELS"] = "0"
        worker = Theirs() if name == "theirs" else Ours()
        return serve(worker, worker.version)
    LARGE.fill(1.0)
    bandwidths: list[float] = []
    names = ["ours", "operators", *(["theirs"] if find_spec("torch") and find_spec("transformers") else [])]
    workers = [Worker(__file__, name) for name in names]
    cases = [{"batch": batch, "context": context} for batch in BATCHES for context in CONTEXTS]
    found, widths = {}, {}
    for case in cases:
        before = len(bandwidths)
        found[tuple(case.values())] = measure(workers, {"kind": "cached", **case}, bandwidths)
        widths[tuple(case.values())] = bandwidths[before:]
        print(f"{case}: {found[tuple(case.values())]}", flush=True)
    coarse = {
        name: measure(workers[:2], {"kind": "cached", **AT_512, "weights": name}, bandwidths)
        for name in ("int8", "int4")
    }
    recomputed = measure(workers[:1], {"kind": "recomputed", **AT_512}, bandwidths)[0]
    versions = [worker.version for worker in workers]
    for worker in workers:
        worker.close()
    report(versions, found, widths, bandwidths, recomputed, coarse)


def report(versions, found, widths, bandwidths, recomputed, coarse) -> None:
    medians = {key: [statistics.median(taken) for taken in each] for key, each in found.items()}
    bandwidth = statistics.median(bandwidths)
    has_peer = len(versions) > 2
    peer = versions[2] if has_peer else "no peer: PyTorch is not installed"
    lines = [
        "# Decoding on one CPU process",
        "",
        f"{date.today()}, {os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, fp32, greedy; "
        f"{DIMS}. {versions[0]}, with compiled kernels (ours) and without (operators); {peer}; "
        f"{ROUNDS} alternating turns of {STEPS_A_TURN} tokens each. `python benchmarks/decode.py`",
        "",
        f"Read bandwidth: {bandwidth / 1e9:.1f} GB/s, the median over all turns ({min(bandwidths) / 1e9:.0f} .. "
        f"{max(bandwidths) / 1e9:.0f}). A step reads {weight_bytes() / 1e9:.2f} GB of weights and all rows' keys and values, "
        f"{cache_bytes(1, 1000) / 1e9:.2f} GB at context 1000. The limit is the time that takes.",
        "",
        "| batch | context | ours, ms a step | tokens/s | operators, ms | ratio (by turn) | of the limit | by weights alone |"
        + " peer, ms | ratio |" * has_peer,
        "|---|---|---|---|---|---|---|---|" + "---|---|" * has_peer,
    ]
    for (batch, context), (ours, operators, *theirs) in medians.items():
        ratios = [y / x for x, y in zip(*found[batch, context][:2], strict=True)]
        lines.append(
            f"| {batch} | {context} | {ours * 1e3:.1f} | {batch / ours:.1f} | {operators * 1e3:.1f} "
            f"| {operators / ours:.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) "
            + "".join(
                f"| {share_of_limit((batch, context), found[batch, context][0], widths[batch, context], of_cache):.2f} "
                for of_cache in (True, False)
            )
            + "|"
            + "".join(f" {seconds * 1e3:.1f} | {seconds / ours:.2f} |" for seconds in theirs)
        )
    shares = {context: share_of_limit((1, context), found[1, context][0], widths[1, context]) for context in CONTEXTS}
    lines += ["", "| | measured | target |", "|---|---|---|", *targets(medians, shares, recomputed, coarse)]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def targets(medians, shares, recomputed, coarse) -> list[str]:
    """Rows of the second table."""
    cached = medians[1, 512][0]
    eight, eight_by_operators = map(statistics.median, coarse["int8"])
    four, four_by_operators = map(statistics.median, coarse["int4"])
    rows = [
        *((f"share of the limit, batch 1 at context {c}", f"{share:.2f}", "0.75") for c, share in shares.items()),
        ("time at context 1000 against 64", f"{medians[1, 1000][0] / medians[1, 64][0]:.2f}", "at most 1.3"),
        ("tokens/s of 8 rows against 1, at 512", f"{8 * cached / medians[8, 512][0]:.1f}", ""),
        (f"int8 at 512, {eight * 1e3:.1f} ms: times as fast as float32", f"{cached / eight:.1f}", "2.5"),
        ("int8 at 512 by MindSpore's operators, ms", f"{eight_by_operators * 1e3:.0f}", ""),
        (f"int4 at 512, {four * 1e3:.1f} ms: times as fast as int8", f"{eight / four:.1f}", ""),
        ("int4 at 512 by MindSpore's operators, ms", f"{four_by_operators * 1e3:.0f}", ""),
        ("cached against recomputed at 512", f"{statistics.median(recomputed) / cached:.0f}", "20"),
    ]
    if len(medians[1, 512]) > 2:
        slowest = min(times[2] / times[0] for (batch, _), times in medians.items() if batch == 8)
        rows.append(("tokens/s of 8 rows against the peer's, lowest of the contexts", f"{slowest:.2f}", "2"))
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    main()
