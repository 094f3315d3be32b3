# SPDX-License-Identifier: Apache-2.0
"""What a layer of experts costs on one CPU process beside the products in it: a forward and backward pass of both, in turn.

8 experts, 2 for each token, one sequence of 512 tokens, capacity factor 1: each expert has 128 rows. And without a capacity
limit (16 experts, 2 for each token): experts that compute their own rows, as a part of the time and memory of experts with
capacity for all tokens; the same of training steps on two processes with expert parallelism.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import decoder_specs
from sporeloom.nn.moe import ExpertMLPs, MoE
from sporeloom.nn.routing import Router

ROOT = Path(__file__).resolve().parents[1]
TOKENS, WIDTHS, REPEATS = 512, ((512, 2048), (1024, 4096)), 15
STEPS, ROUNDS = 8, 3


def experts_of(config):
    """Parameters of the experts of the first layer."""
    return decoder_specs(config).within(f"{config.layers[0]}.mlp")


class Products(nn.Cell):
    """The experts on rows that lie ready, and the product of the router."""

    def __init__(self, config):
        super().__init__()
        specs = experts_of(config)
        self.experts = ExpertMLPs(config, specs.within("experts"), ms.float32)
        self.router = Router(config, specs.within("router"))

    def construct(self, rows, x):
        return ops.ReduceSum()(self.experts(rows)) + ops.ReduceSum()(self.router(x)[1])


class Layer(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.layer = MoE(config, experts_of(config), ms.float32, 0)

    def construct(self, x, tokens, shares):
        y, losses = self.layer(x, tokens, shares)
        return ops.ReduceSum()(y) + losses[0]


class Step(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net, self.weights = net, ms.ParameterTuple(net.trainable_params())
        self.grad = ops.GradOperation(get_all=True, get_by_list=True)

    def construct(self, *inputs):
        return self.grad(self.net, self.weights)(*inputs)


def seconds(step, inputs):
    start = time.perf_counter()
    step(*inputs)[0][0].asnumpy()
    return time.perf_counter() - start


def config_of(d, ffn, num_experts, capacity_factor):
    experts = {"num_experts": num_experts, "experts_per_token": 2, "normalize": "before_drop"}
    return ModelConfig(
        vocab_size=64,
        hidden_size=d,
        num_layers=1,
        num_heads=1,
        ffn_hidden_size=ffn,
        dropout_rate=0.0,
        query_layer=False,
        experts={**experts, "capacity_factor": capacity_factor, "balance_loss": 0.01, "router_z_loss": 0.001},
    )


def peak_kb(sorts_rows, d, ffn):
    """Resident memory at the peak of a process that computes the layer, less that before its first step."""
    step, inputs = without_limit(sorts_rows, d, ffn)
    before = peak_of_process()
    seconds(step, inputs)
    return peak_of_process() - before


def peak_of_process():
    """Resident memory of this process at its peak so far, in KB (Linux)."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def without_limit(sorts_rows, d, ffn):
    """A step of experts without a capacity limit, and its inputs."""
    layer = Layer(config_of(d, ffn, 16, None)).set_train()
    layer.layer.sorts_rows = sorts_rows
    x = np.random.default_rng(0).normal(size=(TOKENS, d)).astype(np.float32)
    tokens, shares = np.zeros((1, TOKENS), np.int32), np.ones(1, np.float32)
    return Step(layer), [Tensor(each) for each in (x, tokens, shares)]


def dropless():
    """Time and memory of experts that compute their own rows, relative to experts with capacity for all tokens."""
    print("\n| D | F | time | memory |\n|---|---|---|---|")
    d, ffn = WIDTHS[0]
    runs = [without_limit(sorts_rows, d, ffn) for sorts_rows in (True, False)]
    for run in runs:
        seconds(*run)
    times = np.array([[seconds(*run) for run in runs] for _ in range(REPEATS // 3)])
    asked = [[sys.executable, __file__, "--peak", how] for how in ("sorted", "slots")]
    peaks = [int(subprocess.run(a, capture_output=True, text=True, check=True).stdout) for a in asked]
    print(f"| {d} | {ffn} | {statistics.median(times[:, 0] / times[:, 1]):.2f} | {peaks[0] / peaks[1]:.2f} |")


def trained(folder, model, strategy):
    """Median time of a step of two ranks that train, without the first two, and memory of the larger process in GB."""
    flags = ["--model", "pangu", "--size", "tiny", "--config", model, "--strategy", strategy, "--launch", "--overwrite"]
    sizes = ["--seq-len", str(TOKENS // 2), "--batch-size", "4", "--steps", str(STEPS)]
    data = ["--data", str(ROOT / "examples/small_town.txt"), "--output-dir", str(folder / "run")]
    words = [sys.executable, "-m", "sporeloom", "train", *flags, *sizes, *data]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    memory = float(re.search(r"([\d.]+) GB in the largest process", done.stdout + done.stderr)[1])
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().split("\n") if line]
    return statistics.median(line["step_time_s"] for line in lines[2:]), memory, lines[-1]["loss"]


def on_two_ranks():
    """The same of training with ep 2, where ranks gather tokens, and where they exchange rows in equal parts: by rules
    without those of sorted rows."""
    d, ffn = WIDTHS[0]
    experts = {"num_experts": 16, "experts_per_token": 2, "normalize": "before_drop", "balance_loss": 0.01}
    sizes = {"num_layers": 2, "hidden_size": d, "num_heads": 8, "ffn_hidden_size": ffn, "seq_len": TOKENS // 2}
    rules = (ROOT / "parallel_configs/rules/experts.yaml").read_text()
    rules = rules.replace("base: decoder.yaml", f"base: {ROOT / 'parallel_configs/rules/decoder.yaml'}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model.json"
        model.write_text(json.dumps({**sizes, "dropout_rate": 0.0, "experts": experts}))
        (folder / "exchange.yaml").write_text(re.sub(r"(?m)^  (order|own|by_expert|by_token)\..*\n", "", rules))
        ways = {"gather": "experts", "exchange": folder / "exchange.yaml"}
        for way, of in ways.items():
            (folder / f"{way}_ep2.yaml").write_text(f"mesh: {{dp: 2, ep: 2}}\nrules: {of}\n")
        found = [[trained(folder, str(model), str(folder / f"{way}_ep2.yaml")) for way in ways] for _ in range(ROUNDS)]
    assert all(abs(one[2] - other[2]) < 1e-4 for one, other in found), "both are exact"
    ratios = [[one[i] / other[i] for one, other in found] for i in range(2)]
    print("\n| D | F | time with ep 2 | memory of a process |\n|---|---|---|---|")
    print(f"| {d} | {ffn} | {statistics.median(ratios[0]):.2f} | {statistics.median(ratios[1]):.2f} |")


def main():
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    if "--peak" in sys.argv:
        print(peak_kb(sys.argv[-1] == "sorted", *WIDTHS[0]))
        return
    print("| D | F | products | layer | layer / products |\n|---|---|---|---|---|")
    for d, ffn in WIDTHS:
        config = config_of(d, ffn, 8, 1.0)
        rng = np.random.default_rng(0)
        x = Tensor(rng.normal(size=(TOKENS, d)).astype(np.float32))
        rows = Tensor(rng.normal(size=(8, TOKENS * 2 // 8, d)).astype(np.float32))
        tokens, shares = Tensor(np.zeros((1, TOKENS), np.int32)), Tensor(np.ones(1, np.float32))
        runs = [(Step(Products(config)), (rows, x)), (Step(Layer(config).set_train()), (x, tokens, shares))]
        for run in runs:
            seconds(*run)
        times = np.array([[seconds(*run) for run in runs] for _ in range(REPEATS)])
        products, layer = (statistics.median(column) for column in times.T)
        ratio = statistics.median(times[:, 1] / times[:, 0])
        print(f"| {d} | {ffn} | {1e3 * products:.0f} ms | {1e3 * layer:.0f} ms | {ratio:.2f} |")
    dropless()
    on_two_ranks()


if __name__ == "__main__":
    main()
