# SPDX-License-Identifier: Apache-2.0
"""Plans of servers on this machine beside what it takes. Writes benchmarks/results/plan_serve_measured.md.

    python benchmarks/plan_serve_measured.py [--cluster FILE]

Calibrates the machine, plans servers with the rates found, and runs the graphs that the plans cost, on one CPU process with
MindSpore's operators: those of devices, all sequences in one batch. Beside them stands the server itself, which on a CPU
computes by compiled kernels that a plan does not know. Weights are random. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, sporeloom, write_report
from serve import random_checkpoint, running, throughput

from sporeloom.core.lines import first_line, split_lines

RESULTS = ROOT / "benchmarks" / "results" / "plan_serve_measured.md"
CASES = [
    # size, weights, rows, tokens in, tokens out
    ("350m", "float32", 1, 32, 64),
    ("350m", "float32", 8, 32, 64),
    ("350m", "float32", 16, 32, 64),
    ("350m", "float32", 1, 448, 64),
    ("350m", "float32", 8, 448, 64),
    ("350m", "int8", 1, 32, 64),
    ("350m", "int8", 8, 32, 64),
    ("embedded_tiny", "float32", 8, 64, 64),
    ("embedded_tiny", "float32", 64, 64, 64),
]
TURNS, TARGET = 7, 0.25
FIGURES = {"first_token_s": "prompt, ms", "decode_s": "step, ms", "tokens_per_s": "tokens/s"}


def planned(cluster, size, weights, rows, prompt, answer):
    flags = ["--size", size, "--weights", weights, "--max-num-seqs", rows, "--input-len", prompt]
    flags += ["--output-len", answer, "--cluster", cluster, "--tp", 1, "--compute-dtype", "float32", "--json"]
    told = sporeloom("plan", "serve", *flags)
    return {name: json.loads(told)[name] for name in FIGURES}


def seconds(function):
    """Median of some turns, after two that compile and warm up."""
    taken = []
    for _ in range(TURNS + 2):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def run_here(checkpoint, weights, rows, prompt, answer):
    """Measured seconds of a prompt and of a step, by the graphs of devices, and tokens/s as a plan defines them."""
    import mindspore as ms  # noqa: PLC0415 (after what runs in processes of its own)

    from sporeloom.checkpoint.model_folder import load_config  # noqa: PLC0415
    from sporeloom.inference.decoding import CachedDecoder  # noqa: PLC0415
    from sporeloom.inference.model import load_model  # noqa: PLC0415
    from sporeloom.models.slots import num_slots_for  # noqa: PLC0415
    from sporeloom.runtime.engine import Engine  # noqa: PLC0415
    from sporeloom.strategy.config import SINGLE_DEVICE  # noqa: PLC0415

    ms.set_device("CPU")
    family, config = load_config(checkpoint)
    engine, shape = Engine.start(SINGLE_DEVICE), (rows, num_slots_for(prompt + answer))
    net = load_model(checkpoint, family, config, SINGLE_DEVICE, shape, weights)
    assert not net.num_kernels
    net.places_are_alike = True  # all rows in one batch, as on devices
    decoding = CachedDecoder(engine, net, config, *shape, chunk=64)

    def read_prompt():
        decoding.trim(0, 0)
        rest = [11] * prompt
        while rest:
            (chunk,) = decoding.next_chunks({0: rest}, 0).values()
            decoding.step({0: chunk}, {})
            rest = rest[len(chunk) :]

    def step():
        decoding.slot_table.lengths[:] = prompt
        decoding.step({}, dict.fromkeys(range(rows), 11))

    first_token_s, decode_s = seconds(read_prompt), seconds(step)
    request_s = first_token_s + (answer - 1) * decode_s / rows
    return {"first_token_s": first_token_s, "decode_s": decode_s, "tokens_per_s": answer / request_s}


def served(checkpoint, weights, rows, prompt, answer):
    """What `sporeloom serve` answers in: one request alone for the first token, all rows busy for the rest."""
    words = [sys.executable, "-m", "sporeloom", "serve", checkpoint, "--port", 0, "--weights", weights]
    words += ["--max-num-seqs", rows, "--max-model-len", prompt + answer]
    with running(list(map(str, words)), r"is served at (\S+)") as server:
        ask = {"url": server.url, "input_len": prompt, "output_len": answer}
        throughput(concurrency=rows, seed=1, **{**ask, "output_len": 2})
        alone = throughput(concurrency=1, num_warmups=0, seed=2, **{**ask, "output_len": 2})
        busy = throughput(concurrency=rows, num_warmups=0, seed=3, **ask)
    assert not alone["failed"] and not busy["failed"], (alone, busy)
    shown = alone["p50_ttft_ms"] / 1e3, busy["p50_itl_ms"] / 1e3, busy["output_throughput"]
    return dict(zip(FIGURES, shown, strict=True))


def measured(checkpoint, number):
    """`run_here` in a process that has MindSpore's operators alone."""
    words = [sys.executable, __file__, "--run", str(number), "--checkpoint", str(checkpoint)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, env={**os.environ, "SPORELOOM_KERNELS": "0"})
    return json.loads(split_lines(done.stdout.decode())[-1])


def compare(folder, cluster):
    """Rows of the table, and the errors by figure."""
    rows, errors, checkpoints = [], {name: [] for name in FIGURES}, {}
    for number, case in enumerate(CASES):
        if case[0] not in checkpoints:
            (folder / case[0]).mkdir()
            checkpoints[case[0]] = random_checkpoint(folder / case[0], case[0])
        checkpoint = checkpoints[case[0]]
        found = [planned(cluster, *case), measured(checkpoint, number), served(checkpoint, *case[1:])]
        for name, title in FIGURES.items():
            scale = 1 if name == "tokens_per_s" else 1e3
            errors[name].append(found[0][name] / found[1][name] - 1)
            shown = " | ".join(f"{of[name] * scale:,.{int(of[name] * scale < 20)}f}" for of in found)
            missed = " **missed**" * (abs(errors[name][-1]) > TARGET)
            rows.append(f"| {' | '.join(map(str, case))} | {title} | {shown} | {errors[name][-1]:+.0%}{missed} |")
            print(rows[-1], flush=True)
    return rows, errors


def main():
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--cluster", type=Path, help="cluster file of `sporeloom calibrate` (default: calibrate first)")
    parser.add_argument("--run", type=int, help="measure this case and print it")
    parser.add_argument("--checkpoint", type=Path, help="for --run")
    arguments = parser.parse_args()
    if arguments.run is not None:
        print(json.dumps(run_here(arguments.checkpoint, *CASES[arguments.run][1:])))
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        cluster = arguments.cluster or Path(name) / "here.yaml"
        if not arguments.cluster:
            sporeloom("calibrate", "--launch", 1, "--out", cluster)
        rows, errors = compare(Path(name), cluster)
    heads = [
        f"- {title.split(',')[0]}: median error {statistics.median(map(abs, errors[name])):.0%}, bias "
        f"{statistics.median(errors[name]):+.0%}, worst {max(map(abs, errors[name])):.0%}"
        for name, title in FIGURES.items()
    ]
    lines = [
        f"PanGu with random weights; load of the machine before {load:.1f}. `planned` is what `sporeloom plan serve` says "
        "with the cluster file of `sporeloom calibrate`, `measured` the same graphs on one process with MindSpore's "
        "operators, `served` what `sporeloom serve` answers in by its compiled kernels, which a plan does not know. "
        "Tokens/s: with all sequences busy. The error is of the plan against the graphs; missed: more than "
        f"{TARGET:.0%}.",
        "",
        "Plans of this machine are too fast. Known are two causes: MindSpore's products of few rows take longer than their "
        "numbers and bytes at the rates of a calibration, which measures products of training steps (`products.md`); and a "
        "calibration has no operator that widens int8.",
        "",
        *heads,
        "",
        "| size | weights | sequences | in | out | figure | planned | measured | served | error |",
        "|---" * 10 + "|",
        *rows,
    ]
    print("\n".join(heads))
    write_report(RESULTS, "Plans of servers beside servers on this machine", "plan_serve_measured.py", lines)


if __name__ == "__main__":
    main()
