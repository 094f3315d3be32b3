# SPDX-License-Identifier: Apache-2.0
"""A step of 200B on 10,240 ranks, simulated operator by operator, then its weeks with failures.

Writes results/simulate_10k.md.

python benchmarks/simulate_10k.py
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil
from report import ROOT, write_report

RESULT = ROOT / "benchmarks" / "results" / "simulate_10k.md"
CONFIGS, CLUSTER = ROOT / "parallel_configs", "cloudmatrix384"
DEVICES, STEPS = 10_240, 100_000
ALLOWED_S, ALLOWED_GB = 60, 4


def measured(*words, **environment):
    """What a command prints, its seconds, processor seconds of all its processes, and GB that they hold at once."""
    start, used, most = time.perf_counter(), {}, 0
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", "sporeloom", *map(str, words)]
        job = psutil.Popen(command, stdout=out, cwd=ROOT, env={**os.environ, **environment})
        while job.poll() is None:
            held = 0
            for process in (job, *job.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    used[process.pid] = times.user + times.system
                    held += process.memory_info().rss
            most = max(most, held)
            time.sleep(0.2)
        out.seek(0)
        printed = out.read()
    if job.returncode:
        raise SystemExit(printed)
    return printed, time.perf_counter() - start, sum(used.values()), most / 2**30


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
    policies = json.loads(printed[printed.index("{") :])["policies"]
    lines = [
        f"MindSpore {version('mindspore')}. PanGu 200B, pp 16, dp {DEVICES // 128}, tp 8, on {DEVICES:,} devices of "
        f"{CLUSTER}; without a cache. Equal ranks are simulated once, and two networks with fewer layers are compiled, from "
        "which the graph of all 64 follows (`sporeloom/dry_run/fewer_layers.py`). Allowed are processor seconds, of all "
        "processes of a command from their start to their end, and GB that they hold at once; the seconds that pass also "
        "depend on other programs of the machine.",
        "",
        "| command | seconds | processor seconds | allowed | GB | allowed |",
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
