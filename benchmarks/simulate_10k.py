# SPDX-License-Identifier: Apache-2.0
"""A step of 200B on 10,240 ranks, simulated operator by operator, then its weeks with failures.

Writes results/simulate_10k.md.

python benchmarks/simulate_10k.py
"""

import json
import resource
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from report import ROOT, sporeloom, write_report

RESULT = ROOT / "benchmarks" / "results" / "simulate_10k.md"
CONFIGS, CLUSTER = ROOT / "parallel_configs", "cloudmatrix384"
DEVICES, STEPS = 10_240, 100_000
ALLOWED_S, ALLOWED_GB = 60, 4


def measured(*words, **environment):
    """What a command prints, its seconds, processor seconds, and GB of its largest process so far."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    printed = sporeloom(*words, **environment)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return printed, seconds, used, after.ru_maxrss / 2**20


def main():
    with tempfile.TemporaryDirectory() as folder:
        text = (CONFIGS / "pangu_200b_dp16_tp8_pp16.yaml").read_text().replace("dp: 16", f"dp: {DEVICES // 128}")
        strategy = Path(folder) / "strategy.yaml"
        strategy.write_text(text.replace("rules: rules/", f"rules: {CONFIGS}/rules/"))
        step = (
            "--model",
            "pangu",
            "--size",
            "200b",
            "--strategy",
            strategy,
            "--ranks",
            0,
            "--compute-dtype",
            "bfloat16",
        )
        more = ("--time", "--cluster", CLUSTER, "--json")
        printed, *of_step = measured("dry-run", *step, *more, SPORELOOM_CACHE=str(Path(folder) / "cache"))
    found = json.loads(printed[printed.index("{") :])["time"]
    weeks = ("--devices", DEVICES, "--devices-per-server", 16, "--faults", "llama3_h100", "--steps", STEPS)
    weeks += ("--step-time-s", found["seconds"], "--checkpoint-pause-s", 20, "--restart-s", 600, "--repair-hours", 24)
    printed, *of_weeks = measured("simulate", *weeks, "--spares", 4, "--replica-devices", 128, "--json")
    policies = json.loads(printed)["policies"]
    lines = [
        f"MindSpore {version('mindspore')}. PanGu 200B, pp 16, dp {DEVICES // 128}, tp 8, on {DEVICES:,} devices of "
        f"{CLUSTER}; without a cache. Equal ranks are simulated once.",
        "",
        "| command | seconds | processor seconds | allowed | GB, largest process | allowed |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {seconds:.0f} | {used:.0f} | {ALLOWED_S} | {memory:.2f} | {ALLOWED_GB} |"
            for name, (seconds, used, memory) in (("`dry-run --time`", of_step), ("`simulate`", of_weeks))
        ),
        "",
        f"A step takes {found['seconds']:.2f} s, closed form {sum(found['closed_form'].values()):.2f} s. Collectives: "
        + "; ".join(f"{of['kind']} of {of['ranks']} {of['algorithm']}" for of in found["collectives"])
        + ".",
        "",
        f"{STEPS:,} of them:",
        "",
        "| policy | goodput | P10, days | median | P90 |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {of['goodput']:.1%} | "
            + " | ".join(f"{of['finish_s'][p] / 86400:.1f}" for p in of["finish_s"])
            + " |"
            for name, of in policies.items()
            if of
        ),
    ]
    write_report(RESULT, "10,240 ranks of 200B", "simulate_10k.py", lines)


if __name__ == "__main__":
    main()
