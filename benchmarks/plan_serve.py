# SPDX-License-Identifier: Apache-2.0
"""Plans of servers beside published figures. Writes benchmarks/results/plan_serve.md and sporeloom/serve/plan_errors.yaml.

    python benchmarks/plan_serve.py

Every figure of serving_runs.csv is planned as `sporeloom plan serve` does: steps of an idle server for the first token, of
all rows for the time of a token and tokens/s. Nothing is fitted: the rates are those of published training runs. The engines
read only the keys that are there: so all is planned with --mean-context, for the middle of an answer.
"""

import csv
import dataclasses
import math
import statistics
import sys
from pathlib import Path

from report import write_report

from sporeloom.core.lines import file_lines, first_line
from sporeloom.models.family import size_config
from sporeloom.planner.cluster import read_cluster
from sporeloom.serve.plan import ServingLoad, plan_serving
from sporeloom.serve.plan_errors import ERRORS, FIGURES

HERE = Path(__file__).parent
RUNS, RESULTS = HERE / "serving_runs.csv", HERE / "results" / "plan_serve.md"
CLUSTER, COVERAGE = "a100_80gb", 0.8
LLAMA = {
    "eod_id": 2,
    "loss_ignore_id": 2,
    "qkv_bias": False,
    "output_bias": False,
    "seq_len": 4096,
    "rope_theta": 10000.0,
    "compute_dtype": "float16",
}
MODELS = {
    # name: layers, width, heads, heads of keys, width of the MLP, vocabulary
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000),
    "mistral-7b": (32, 4096, 32, 8, 14336, 32000),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
}
SHAPE = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size")


def planned(run, cluster):
    """Predicted figures."""
    model = dataclasses.replace(
        size_config("pangu", "embedded_7b"), **LLAMA, **dict(zip(SHAPE, MODELS[run["model"]], strict=True))
    )
    rows, prompt, answer = (int(run[name]) for name in ("rows", "input_len", "output_len"))
    middle = prompt + max(1, answer // 2)
    load = ServingLoad(num_rows=rows, input_len=prompt, output_len=answer, chunk=prompt, mean_context=middle)
    plan = plan_serving("pangu", model, cluster, load, int(run["tp"]))
    return {name: getattr(plan, name) for name in FIGURES}


def interval(ratios):
    """Bounds of measured / predicted that hold at least `COVERAGE` of the figures: as many of each end are left out."""
    ordered = sorted(ratios)
    out = math.floor(len(ordered) * (1 - COVERAGE) / 2)
    return ordered[out], ordered[-1 - out]


def row(run, name, measured, predicted):
    scale, unit = (1, "tokens/s") if name == "tokens_per_s" else (1e3, "ms")
    shown = f"{FIGURES[name]}, {unit} | {predicted * scale:,.1f} | {measured * scale:,.1f} | {predicted / measured - 1:+.0%}"
    about = [run[key] for key in ("source", "model", "tp", "rows", "input_len", "output_len")]
    return f"| {' | '.join(about)} | {shown} |"


def main():
    # These engines give a sequence pages of memory as it grows: all of them need less than the caches of a plan.
    cluster = dataclasses.replace(read_cluster(Path(CLUSTER)), memory_gb=1000)
    lines, found = [], {name: [] for name in FIGURES}
    for run in csv.DictReader(line for line in file_lines(RUNS) if not line.startswith("#")):
        plan = planned(run, cluster)
        for name in FIGURES:
            if run[name]:
                found[name].append(float(run[name]) / plan[name])
                lines.append(row(run, name, float(run[name]), plan[name]))
                print(lines[-1], flush=True)
    if not all(found.values()):
        sys.exit("error: nothing was compared")
    yaml, head = (
        ["# Measured / predicted; written by benchmarks/plan_serve.py", f"coverage: {COVERAGE}", "figures:"],
        [],
    )
    for name, ratios in found.items():
        low, high = interval(ratios)
        error, bias = (
            statistics.median(errors) for errors in ([abs(1 / r - 1) for r in ratios], [1 / r - 1 for r in ratios])
        )
        about = {"low": low, "high": high, "count": len(ratios), "median_error": error, "bias": bias}
        yaml.append(f"  {name}: {{{', '.join(f'{key}: {round(value, 3)}' for key, value in about.items())}}}")
        head.append(
            f"- {FIGURES[name]}: {len(ratios)} figures, median error {error:.0%}, bias {bias:+.0%}; at least {COVERAGE:.0%} "
            f"are {low:.2f} to {high:.2f} times what is predicted."
        )
    ERRORS.write_text("\n".join(yaml) + "\n", encoding="utf-8")
    note = (
        f"Published figures of two engines on {CLUSTER}, in half precision; sources: benchmarks/serving_runs.csv. Nothing is "
        "fitted on them. None is of MindSpore, whose kernels on GPUs are slower (`gpu.md`). "
        "Attention is planned at the mean context (--mean-context), which these engines read, and prompts at once."
    )
    titles = "| source | model | tp | rows | in | out | figure | predicted | measured | error |"
    table = [titles, "|---" * 10 + "|", *lines]
    write_report(RESULTS, "Plans of servers beside published figures", "plan_serve.py", [note, "", *head, "", *table])
    print("\n".join(head), first_line(__doc__))


if __name__ == "__main__":
    main()
