# SPDX-License-Identifier: Apache-2.0
"""Our partitioner beside MindSpore's: layouts, bytes sent, seconds; writes results/partition.md.

`--large`: models of 2.6B to 200B, too, which take minutes.

The same training step (AdamW, clipping) of rank 0 by both, for every shipped strategy of four processes without a pipeline;
seconds of larger models by ours, whose front end compiles one device's graph once for all ranks; and whole commands.
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

from sporeloom.dry_run.by_mindspore import compile_rank
from sporeloom.models.family import family_and_size, family_module, size_config
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.cpu.spmd import compile_for_one_device, decide, partition_for_rank
from sporeloom.strategy.config import Pipeline
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.train.optim import AdamW

RESULTS = ROOT / "benchmarks" / "results" / "partition.md"
CONFIGS = ROOT / "parallel_configs"
LARGE = [("2.6b", "pangu_2.6b_dp64_tp8"), ("13b", "pangu_13b_dp4_tp8_pp2"), ("200b", "pangu_200b_dp16_tp8_pp16")]
SENT = {"AllReduce": lambda n: 2 * (n - 1) / n, "Send": lambda n: 1.0, "Receive": lambda n: 0.0}
"""Of the bytes of the whole tensor, what a rank of n sends; any other collective (n - 1) / n."""


def mindspores(name: str) -> dict:
    """What MindSpore's partition of rank 0 is."""

    family, size = family_and_size(name)
    strategy, model = load_strategy(name), size_config(family, size)
    report = compile_rank(family, model, strategy, 0, (4 * strategy.mesh.dp, model.seq_len))
    sent = sum(
        c.bytes_per_step * SENT.get(c.kind, lambda n: (n - 1) / n)(len(report.groups[c.group]))
        for c in report.collectives
        if len(report.groups.get(c.group, ())) > 1
    )
    return {
        "seconds": report.compile_s,
        "sent": sent,
        "collectives": sum(c.count for c in report.collectives if len(report.groups.get(c.group, ())) > 1),
        "parameters": {p.name: p.local_shape for p in report.parameters},
    }


def ours(name: str, mesh: str = "") -> dict:
    """The same of ours. `mesh`: of a pipeline one stage's, with all layers."""

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
        partitioned, sharded = partition_for_rank(graph, decisions, rank)
        seconds.append(time.perf_counter() - start)
    own = {p.name for p in net.trainable_params()}
    return {
        "front": front,
        "seconds": max(seconds),
        "nodes": len(graph.graph.node),
        "sent": sum(c.elements * np.dtype(c.dtype).itemsize for c in sharded.communications),
        "collectives": len(sharded.communications),
        "unsharded": dict(sharded.unsharded),
        "parameters": {name: shape for name, shape in partitioned.parameters.items() if name in own},
    }


def in_process(function: str, *arguments: str) -> dict:
    command = [sys.executable, __file__, function, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def ready(engine: str, folder: Path) -> list[float]:
    """Seconds until four processes of PanGu tiny, dp2 tp2, are compiled: cold and warm."""
    (folder / f"{engine}.yaml").write_text(f"mesh: {{dp: 2, tp: 2}}\nrules: decoder\nengine: {engine}\n")
    found = []
    for i in range(2):
        command = ["-m", "sporeloom", "train", "--data", "examples/small_town.txt", "--steps", "2", "--launch"]
        command += ["--strategy", str(folder / f"{engine}.yaml"), "--output-dir", str(folder / f"{engine}{i}")]
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
        one = in_process("ours", name, json.dumps(mesh))
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
    lines += [
        "| strategy | parameters lie alike | collectives, ours | MindSpore's | MB sent, ours | MindSpore's "
        "| s, ours (front end once) | MindSpore's, each rank |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name in [n for n in names if load_strategy(n).mesh.pp == 1]:
        one, other = in_process("ours", name), in_process("mindspores", name)
        alike = {k: tuple(v) for k, v in one["parameters"].items()} == {
            k: tuple(v) for k, v in other["parameters"].items()
        }
        lines.append(
            f"| {name} | {'yes' if alike else 'no'} | {one['collectives']} | {other['collectives']} "
            f"| {one['sent'] / 1e6:.2f} | {other['sent'] / 1e6:.2f} "
            f"| {one['front']:.1f} + {one['seconds']:.2f} | {other['seconds']:.1f} |"
        )
        assert not one["unsharded"], one["unsharded"]
    lines += larger() if large else []
    with tempfile.TemporaryDirectory() as folder:
        times = {engine: ready(engine, Path(folder)) for engine in ("spmd", "mindspore")}
    lines += [
        "",
        "## Four processes of PanGu tiny, dp2 tp2, compiled",
        "",
        "| engine | cold, s | warm, s |",
        "|---|---|---|",
    ]
    lines += [f"| {engine} | {cold} | {warm} |" for engine, (cold, warm) in times.items()]
    lines += [
        "",
        f"Asked: 4 s cold, 1 s warm. Ratio of the engines, cold: {times['mindspore'][0] / times['spmd'][0]:.1f}.",
    ]
    write_report(RESULTS, "Our partitioner beside MindSpore's", "partition.py", lines)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] != "--large":
        print(json.dumps({"ours": ours, "mindspores": mindspores}[sys.argv[1]](*sys.argv[2:])))
    else:
        main("--large" in sys.argv)
