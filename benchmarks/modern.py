# SPDX-License-Identifier: Apache-2.0
"""openPangu-Embedded and CodeGeeX4 shapes of 100M parameters beside transformers, on one CPU process: a training step, and
a decoded token.

Three workers take turns in one run: ours, transformers eager, transformers compiled (torch.compile). Writes
benchmarks/results/modern.md. `pip install -e '.[benchmark]'`, then `python benchmarks/modern.py`.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import numpy as np
from turns import Worker, serve

SHAPES = {
    "embedded": ("pangu", "embedded_1b", {"hidden_size": 768, "num_layers": 10, "num_heads": 12, "num_kv_heads": 6}),
    "codegeex4": ("codegeex", "4_9b", {"hidden_size": 768, "num_layers": 10, "num_heads": 12, "num_kv_heads": 2}),
}
COMMON = {
    "vocab_size": 32000,
    "seq_len": 1024,
    "head_dim": 64,
    "ffn_hidden_size": 2048,
    "eod_id": 2,
    "loss_ignore_id": 2,
}
TRAIN = (2, 512)
CONTEXT, BATCHES = 512, (1, 8)
ROUNDS, STEPS, TOKENS, WARM_UP = 5, 2, 8, 3
RESULTS = Path(__file__).resolve().parent / "results" / "modern.md"


def config_of(shape):
    from sporeloom.models.family import size_config  # noqa: PLC0415 (each worker loads its own framework only)

    family, size, dims = SHAPES[shape]
    more = {"rope_dim": 32} if shape == "codegeex4" else {}
    return family, dataclasses.replace(
        size_config(family, size), **COMMON, **dims, **more, stop_ids=(), compute_dtype="float32", dropout_rate=0.0
    )


def samples():
    return np.random.RandomState(0).randint(10, COMMON["vocab_size"], (TRAIN[0], TRAIN[1] + 1))


class Ours:
    def __init__(self):
        import mindspore as ms  # noqa: PLC0415

        from sporeloom.runtime.engine import Engine  # noqa: PLC0415
        from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415

        ms.set_device("CPU")
        ms.set_context(mode=ms.GRAPH_MODE)
        self.version, self.engine = f"MindSpore {ms.__version__}", Engine.start(SINGLE_DEVICE)

    def train(self, shape, _):
        from mindspore import Tensor  # noqa: PLC0415

        from sporeloom.data.batch import make_batch  # noqa: PLC0415
        from sporeloom.models.family import family_module  # noqa: PLC0415
        from sporeloom.parallel.parallelize import parallelize  # noqa: PLC0415
        from sporeloom.parallel.step import TrainStep  # noqa: PLC0415
        from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415
        from sporeloom.train.optim import AdamW  # noqa: PLC0415

        family, config = config_of(shape)
        net = family_module(family, "model").ModelWithLoss(config)
        optimizer = AdamW(net.trainable_params(), bias_correction=True)
        step = TrainStep(net, optimizer, parallelize(net, SINGLE_DEVICE), rank=0, max_grad_norm=1.0).set_train()
        inputs, numbers = [Tensor(a) for a in make_batch(samples(), 2, 2)], itertools.count(1)
        call = self.run_of(step)

        def run():
            optimizer.prepare(next(numbers), 1e-4)
            float(call(*inputs)[0].asnumpy())

        return run

    def run_of(self, step):
        """How the engine runs a step, as `sporeloom train` does."""
        return functools.partial(self.engine.run, step)

    def decode(self, shape, batch):
        from mindspore import Tensor  # noqa: PLC0415

        from sporeloom.inference.memory import side_by_side  # noqa: PLC0415
        from sporeloom.inference.mixed import cached  # noqa: PLC0415
        from sporeloom.inference.model import build_model  # noqa: PLC0415
        from sporeloom.inference.sampling import History, Sampler, SamplingConfig  # noqa: PLC0415
        from sporeloom.models.slots import num_slots_for  # noqa: PLC0415
        from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415

        family, config = config_of(shape)
        slots, draw = num_slots_for(CONTEXT + TOKENS), np.random.default_rng(0)
        net = build_model(family, config, SINGLE_DEVICE, (batch, slots))
        parameters = list(net.get_parameters())
        for parameter, place in zip(parameters, side_by_side(parameters), strict=True):
            is_cache = ".cache." in parameter.name
            place[...] = 0 if is_cache else draw.standard_normal(parameter.shape, np.float32) * 0.02
            parameter.set_data(Tensor.from_numpy(place))
        decoding = cached(self.engine, net, config, batch, slots)
        decoding.slot_table.lengths[:] = CONTEXT
        sampler, history = Sampler(SamplingConfig()), History([], [])

        def run():
            logits = decoding.step({}, dict.fromkeys(range(batch), 11))
            [sampler.choose(row, history) for row in logits.values()]
            if decoding.slot_table.lengths[0] == CONTEXT + TOKENS:
                decoding.slot_table.lengths[:] = CONTEXT

        return run


class Theirs:
    def __init__(self, compiled):
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415

        torch.manual_seed(0)
        self.compiled = compiled
        way = "compiled" if compiled else "eager"
        self.version = f"transformers {transformers.__version__} on PyTorch {torch.__version__}, {way}"

    def model(self, shape):
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415

        from sporeloom.models.family import family_module  # noqa: PLC0415

        family, config = config_of(shape)
        values = family_module(family, "weights").PUBLISHED[0].write(config)
        kind = {"pangu": "Llama", "codegeex": "Glm"}[family]
        theirs = getattr(transformers, f"{kind}Config")(**{k: v for k, v in values.items() if k != "torch_dtype"})
        model = getattr(transformers, f"{kind}ForCausalLM")(theirs).float()
        if self.compiled:
            model.forward = torch.compile(model.forward)
        return model

    def train(self, shape, _):
        import torch  # noqa: PLC0415

        model = self.model(shape).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        ids = torch.from_numpy(samples())
        tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

        def run():
            logits = model(tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            float(loss.detach())

        return run

    def decode(self, shape, batch):
        import torch  # noqa: PLC0415
        from transformers import StaticCache  # noqa: PLC0415

        model = self.model(shape).eval()
        cache = StaticCache(config=model.config, max_cache_len=CONTEXT + TOKENS + 8)
        with torch.no_grad():
            model(torch.full((batch, CONTEXT), 11), past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens, place = torch.full((batch, 1), 11), itertools.cycle(range(CONTEXT, CONTEXT + TOKENS))

        def run():
            with torch.no_grad():
                at = torch.tensor([next(place)])
                output = model(tokens, past_key_values=cache, use_cache=True, cache_position=at, logits_to_keep=1)
                output.logits[:, -1].argmax(-1)

        return run


def work(worker):
    """Asked for a case, take a few steps of it and tell the seconds of one."""
    steps = {}

    def turn(case):
        key = (case["what"], case["shape"], case["batch"])
        if key not in steps:
            steps.clear()  # one model at a time
            steps[key] = getattr(worker, case["what"])(case["shape"], case["batch"])
            for _ in range(WARM_UP if case["what"] == "train" else 3 * TOKENS):
                steps[key]()
        count = STEPS if case["what"] == "train" else TOKENS
        start = time.perf_counter()
        for _ in range(count):
            steps[key]()
        return {"seconds": (time.perf_counter() - start) / count}

    serve(turn, worker.version)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=["ours", "eager", "compiled"])
    if name := parser.parse_args().worker:
        return work(Ours() if name == "ours" else Theirs(name == "compiled"))
    workers = [Worker(__file__, name) for name in ("ours", "eager", "compiled")]
    cases = [{"what": "train", "shape": shape, "batch": TRAIN[0]} for shape in SHAPES]
    cases += [{"what": "decode", "shape": shape, "batch": batch} for shape in SHAPES for batch in BATCHES]
    rows = []
    for case in cases:
        taken = np.array([[worker.ask(case)["seconds"] for worker in workers] for _ in range(ROUNDS)])
        medians = np.median(taken, 0)
        ratios = [statistics.median(taken[:, i] / taken[:, 0]) for i in (1, 2)]
        target = 1.0 if case["what"] == "train" else 1.3
        each = " | ".join(f"{1e3 * seconds:.1f}" for seconds in medians)
        rows.append(
            f"| {case['what']} | {case['shape']} | {case['batch']} | {each} | {ratios[0]:.2f} | {ratios[1]:.2f} | {target} |"
        )
        print(rows[-1], flush=True)
    for worker in workers:
        worker.close()
    lines = [
        "# 100M parameters of today's shapes beside transformers",
        "",
        f"{date.today()}, {os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, fp32; "
        f"{', '.join(worker.version for worker in workers)}. {ROUNDS} alternating turns; a training step of {TRAIN[0]} x "
        f"{TRAIN[1]} tokens with AdamW and clipping, a decoded token at context {CONTEXT}. `python benchmarks/modern.py`",
        "",
        "| | shape | batch | ours, ms | eager, ms | compiled, ms | ours x eager | ours x compiled | target |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
