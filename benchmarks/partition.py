# SPDX-License-Identifier: Apache-2.0
"""The partitioner: collectives, bytes sent, seconds; writes results/partition.md.

`--large`: models of 2.6B to 200B, too, which take minutes.

A training step (AdamW, clipping) of rank 0 for every built-in strategy of four processes without a pipeline; seconds of
larger models, whose front end compiles one device's graph once for all ranks; and full commands.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.nn.utils import no_init_parameters
from report import ROOT, write_report
from strategy_names import family_and_size

from sporeloom.models.family import family_module, size_config
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.runtime.spmd.shard import decide, partition_for_rank
from sporeloom.strategy.config import Pipeline
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.train.optim import AdamW

RESULTS = ROOT / "benchmarks" / "results" / "partition.md"
CONFIGS = ROOT / "parallel_configs"
LARGE = [("2.6b", "pangu_2.6b_dp64_tp8"), ("13b", "pangu_13b_dp4_tp8_pp2"), ("200b", "pangu_200b_dp16_tp8_pp16")]


def partitioned(name: str, mesh: str = "") -> dict:
    """Partition rank 0 and the last rank. `mesh`: of a pipeline one stage's, with all layers."""

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    family, size = family_and_size(name)
    strategy, model = load_strategy(name), size_config(family, size)
    if mesh:
        strategy = dataclasses.replace(strategy, mesh=Mesh(**json.loads(mesh)), pipeline=Pipeline())
    batch = (4 * strategy.mesh.dp, model.seq_len)
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
        report = parallelize(net, strategy)
        step = TrainStep(net, AdamW(net.trainable_params()), report, 0, None, max_grad_norm=1.0).set_train()
    inputs = [(batch, np.int32)] * 3 + [(batch, np.float32)] * (1 + net.loss.num_inputs)
    inputs += [(batch, np.int32)] if model.dropout_rate else []
    start = time.perf_counter()
    graph = compile_for_one_device(step, inputs)
    front = time.perf_counter() - start
    decisions, seconds = decide(step, strategy.mesh), []
    for rank in (0, strategy.mesh.size - 1):
        start = time.perf_counter()
        _, sharded = partition_for_rank(graph, decisions, rank)
        seconds.append(time.perf_counter() - start)
    return {
        "front": front,
        "seconds": max(seconds),
        "nodes": len(graph.graph.node),
        "sent": sum(c.elements * np.dtype(c.dtype).itemsize for c in sharded.communications),
        "collectives": len(sharded.communications),
        "unsharded": dict(sharded.unsharded),
    }


def in_process(function: str, *arguments: str) -> dict:
    command = [sys.executable, __file__, function, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def ready(folder: Path) -> list[float]:
    """Seconds until four processes of PanGu tiny, dp2 tp2, are compiled: cold and warm."""
    (folder / "s.yaml").write_text("mesh: {dp: 2, tp: 2}\nrules: decoder\n")
    found = []
    for i in range(2):
        command = ["-m", "sporeloom", "train", "--data", "examples/small_town.txt", "--steps", "2", "--launch"]
        command += ["--strategy", str(folder / "s.yaml"), "--output-dir", str(folder / f"out{i}")]
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "SPORELOOM_CACHE": str(folder / "graphs")},
        )
        found.append(float(re.search(r"compiled in ([\d.]+) s", done.stderr)[1]))
    return found


def larger() -> list[str]:
    """Of models that take minutes to compile."""
    lines = ["", "## Larger models, all layers, the ranks of one stage", ""]
    lines += ["| model | mesh | nodes | front end, s | a rank, s | asked |", "|---|---|---|---|---|---|"]
    for size, name in LARGE:
        mesh = {axis: n for axis, n in load_strategy(name).mesh.degrees.items() if axis != "pp"}
        one = in_process("partitioned", name, json.dumps(mesh))
        asked = {"13b": "2 s", "200b": "4 s"}.get(size, "-")
        lines.append(
            f"| PanGu {size} | {mesh} | {one['nodes']} | {one['front']:.1f} | {one['seconds']:.2f} | {asked} |"
        )
    return lines


def main(large: bool) -> None:
    names = [p.stem for p in sorted(CONFIGS.glob("pangu*tiny*.yaml")) if load_strategy(p).mesh.size == 4]
    lines = [
        f"MindSpore {version('mindspore')}. A training step of rank 0 (AdamW, clipping), a batch of 4 sequences a replica.",
        "",
    ]
    lines += ["| strategy | collectives | MB sent | front end once, s | a rank, s |", "|---|---|---|---|---|"]
    for name in [n for n in names if load_strategy(n).mesh.pp == 1]:
        one = in_process("partitioned", name)
        lines.append(
            f"| {name} | {one['collectives']} | {one['sent'] / 1e6:.2f} | {one['front']:.1f} | {one['seconds']:.2f} |"
        )
        assert not one["unsharded"], one["unsharded"]
    lines += larger() if large else []
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = ready(Path(folder))
    lines += [
        "",
        "## Four processes of PanGu tiny, dp2 tp2, compiled",
        "",
        "| cold, s | warm, s | allowed |",
        "|---|---|---|",
    ]
    lines.append(f"| {cold} | {warm} | 4, 1 |")
    write_report(RESULTS, "The partitioner", "partition.py", lines)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] != "--large":
        print(json.dumps({"partitioned": partitioned}[sys.argv[1]](*sys.argv[2:])))
    else:
        main("--large" in sys.argv)
