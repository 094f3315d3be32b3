# SPDX-License-Identifier: Apache-2.0
"""Simulated steps beside the planner's closed form, for random strategies. Writes benchmarks/results/step_time.md.

python benchmarks/step_time.py [--jobs N] [--seed N] [--reports FOLDER]

--reports: a folder with simulated steps, one file a strategy. What is there is not simulated again, as after a stop; closed
forms are made anew.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from report import ROOT, sporeloom, write_report

from sporeloom.core.lines import split_lines
from sporeloom.models.config_file import named_model
from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.step_time import step_time
from sporeloom.strategy.loader import load_strategy

RESULT = ROOT / "benchmarks" / "results" / "step_time.md"
RULES = ROOT / "parallel_configs" / "rules" / "decoder.yaml"
MODELS = {
    # family and size: attention
    ("pangu", "13b"): "plain",
    ("pangu", "embedded_7b"): "flash",
    ("codegeex", "4_9b"): "flash",
    ("palm", "8b"): "plain",
}
NUM_LAYERS = 8
CLUSTER = "ascend910b"
TARGET = 0.05
GROUPS = {
    "products, attention": (("matmul", "attention"), ("matmul", "attention")),
    "passes, launches": (("memory", "launch"), ("memory", "overhead", "optimizer", "accumulation")),
}
"""Column -> kinds of the simulation, terms of the closed form."""
COMMUNICATION = ("tensor_parallel", "pipeline", "gradients", "weights")
BUILT_IN = {
    # strategy: (size, sequences of a step)
    "pangu_13b_dp4_tp8_pp2": ("13b", None),
    "pangu_200b_dp16_tp8_pp16": ("200b", None),
    "pangu_2.6b_dp64_tp8": ("2.6b", 512),
}
"""Built-in strategies at full size."""
NOTES = split_lines("""Where they still differ:

- **Collectives over tp**: the formulas let all of a layer's wait, and leave out those of the embedding, the head and the
  loss. In the graph a backward one is hidden behind the product of the weight's gradient.
- **Pipelines**: the formulas let a stage wait for every message that it receives, but in one direction only. A stage in the
  middle receives in both.
- **Kernels**: the formulas count a fitted overhead for each layer, the simulation each kernel that is left after fusion.
""")


def random_job(rng):
    """A name, the first rank of each stage, the model, the strategy, sequences of a step and accumulation steps."""
    model = rng.choice(list(MODELS))
    while True:
        pp, dp, tp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4, 8])
        if 4 <= pp * dp * tp <= 128:
            break
    microbatches, rows = rng.choice([8, 16, 32]), rng.choice([1, 2, 4])
    lines = [f"mesh: {{pp: {pp}, dp: {dp}, tp: {tp}}}", f"rules: {RULES}"]
    name = f"{' '.join(model)}: pp {pp}, dp {dp}, tp {tp}, {microbatches} microbatches of {rows}"
    if pp > 1:
        schedule = rng.choice(["1f1b", "gpipe"])
        lines.append(f"pipeline: {{num_microbatches: {microbatches}, schedule: {schedule}}}")
        name += f", {schedule}"
    if dp > 1 and rng.random() < 0.5:
        lines.append("optimizer_parallel: {axis: dp}")
        name += ", ZeRO"
    if rng.random() < 0.5:
        lines.append("recompute: {layers: all}")
        name += ", recomputed"
    ranks = [stage * dp * tp for stage in range(pp)]
    return name, ranks, (model, "\n".join(lines), dp * microbatches * rows, 1 if pp > 1 else microbatches)


def simulated(folder, name, ranks, model, strategy, batch_size, accumulate):
    """The simulated step of a dry run, and the closed form."""
    config, path, report = folder / "model.json", folder / "strategy.yaml", folder / f"{name}.json"
    changes = {"num_layers": NUM_LAYERS, "compute_dtype": "bfloat16", "attention": MODELS[model]}
    config.write_text(json.dumps(changes), encoding="utf-8")
    path.write_text(strategy, encoding="utf-8")
    flags = ["--batch-size", batch_size, "--accumulate", accumulate, "--time", "--cluster", CLUSTER, "--json"]
    named = ["--model", model[0], "--size", model[1], "--config", config]
    if not report.exists():
        ran = sporeloom("dry-run", *named, "--strategy", path, "--ranks", ",".join(map(str, ranks)), *flags)
        report.write_text(json.dumps(json.loads(ran)["time"]), encoding="utf-8")
    sizes, job = named_model(*model, config), load_strategy(path)
    time = step_time(of_decoder(sizes), job_of(job, sizes, batch_size, accumulate), Cluster.of_chip(CLUSTER))
    return {**json.loads(report.read_text(encoding="utf-8")), "closed_form": vars(time)}


def built_in(strategy, size, batch_size):
    """A line of the table of built-in strategies."""
    batch = ["--batch-size", batch_size] if batch_size else []
    flags = ["--size", size, "--ranks", 0, *batch, "--time", "--cluster", CLUSTER, "--json"]
    time = json.loads(sporeloom("dry-run", "--model", "pangu", "--strategy", strategy, *flags))["time"]
    seconds, closed = time["seconds"], sum(time["closed_form"].values())
    error = seconds / closed - 1
    mark = "" if abs(error) <= TARGET else " **missed**"
    return f"| {strategy} | {seconds * 1e3:,.0f} / {closed * 1e3:,.0f} | {error:+.1%}{mark} | {time['mfu']:.1%} |"


def row(name, time):
    """A line of the table: the busiest stage beside the formulas' terms."""
    closed, seconds = time["closed_form"], time["seconds"]
    stage = max(time["stages"], key=lambda stage: sum(stage["busy"].values()))
    whole = sum(closed.values())
    error = seconds / whole - 1
    cells = [
        f"{seconds * 1e3:.0f} / {whole * 1e3:.0f}",
        f"{error:+.1%}" + ("" if abs(error) <= TARGET else " **missed**"),
    ]
    pairs = [
        (sum(stage["busy"].get(kind, 0.0) for kind in kinds), sum(closed[term] for term in terms))
        for kinds, terms in GROUPS.values()
    ]
    pairs += [(None, closed["recompute"])]
    pairs += [
        (sum(stage["exposed"].values()), sum(closed[term] for term in COMMUNICATION)),
        (stage["idle_s"], closed["bubble"]),
    ]
    cells += [" / ".join("-" if part is None else f"{part * 1e3:.0f}" for part in pair) for pair in pairs]
    return f"| {name} | {' | '.join(cells)} |", error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reports", type=Path)
    asked = parser.parse_args()
    rng, folder, rows = random.Random(asked.seed), asked.reports or Path(tempfile.mkdtemp(prefix="step-time-")), []
    for _ in range(asked.jobs):
        name, ranks, job = random_job(rng)
        rows.append(row(name, simulated(folder, name, ranks, *job)))
        print(rows[-1][0], flush=True)
    errors = sorted(abs(error) for _, error in rows)
    good = sum(error <= TARGET for error in errors)
    about = (
        f"{NUM_LAYERS} layers in bfloat16 on {CLUSTER}, simulated / by closed form, ms of a step. {good} of {len(rows)} "
        f"random strategies are within {TARGET:.0%}; median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}."
    )
    titles = ["strategy", "step", "", *GROUPS, "recomputation", "communication not hidden", "idle"]
    head = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    full = [built_in(strategy, *job) for strategy, job in BUILT_IN.items()]
    of_built_in = ["Built-in strategies at full size:", "", "| strategy | step | | MFU |", "|---|---|---|---|", *full]
    lines = [about, "", *head, *(line for line, _ in rows), "", *of_built_in, "", *NOTES]
    write_report(RESULT, "Simulated steps beside the closed form", "step_time.py", lines)


if __name__ == "__main__":
    main()
