# SPDX-License-Identifier: Apache-2.0
"""The simulator of elastic runs against runs of 4 CPU processes: python benchmarks/simulate_real.py [--rounds 2]

Writes results/simulate_real.md. One run with a kill and a return of devices gives the times of steps and restarts. Then
scenarios with kills, slow ranks and slow links at other times are simulated by `sporeloom simulate scenario`, and run: each
rank is really killed by SIGKILL, and really sleeps where it or its link is slow. Events must have the same order, and their
times may differ by 15 %. Each rank also sleeps in every step, as if a device computed: cores that others use as well would
otherwise say little.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from report import ROOT, sporeloom, write_report

from sporeloom.core.lines import split_lines

TEXT = ROOT / "examples" / "small_town.txt"
STRATEGY = "pangu_tiny_dp2_tp2"
MODEL = {"num_layers": 2, "hidden_size": 64, "vocab_size": 512, "seq_len": 32, "dropout_rate": 0.1}
BASE_S, LIMIT = 0.6, 0.15
CALIBRATION = {"steps": 34, "faults": [{"at_s": 6, "kill": 3}, {"at_s": 18, "devices": 4}]}
SCENARIOS = {
    "a rank is killed, and comes back": {
        "steps": 40,
        "faults": [{"at_s": 9, "kill": 0}, {"at_s": 26, "devices": 4}],
    },
    "a slow rank, then another is killed": {
        "steps": 36,
        "faults": [{"at_s": 4, "until_s": 14, "slow_rank": 2, "delay_s": 0.5}, {"at_s": 18, "kill": 1}],
    },
    "a slow link, two kills, and both come back": {
        "steps": 40,
        "faults": [
            {"at_s": 3, "until_s": 11, "slow_link": [0, 1], "delay_s": 0.02},
            {"at_s": 14, "kill": 2},
            {"at_s": 24, "kill": 1},
            {"at_s": 38, "devices": 4},
        ],
    },
}


def lines(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]  # the last one may be half written


def run_for_real(folder, scenario):
    """Run a scenario. Returns, with their times since the first step began: the events of the launcher, the steps whose
    metrics were seen, and the faults."""
    out, plan, devices = folder / "out", folder / "plan.json", folder / "devices"
    (folder / "model.json").write_text(json.dumps(MODEL))
    plan.write_text(json.dumps({"base_s": BASE_S, "faults": []}))
    devices.write_text("4\n")
    words = [
        "train",
        "--data",
        TEXT,
        "--config",
        folder / "model.json",
        "--steps",
        scenario["steps"],
        "--output-dir",
        out,
    ]
    words += ["--strategy", STRATEGY, "--launch", "--elastic", "--devices-file", devices, "--max-restarts", 9]
    path = f"{ROOT / 'benchmarks' / 'injected'}:{ROOT}"
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "sporeloom", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "INJECTED": str(plan)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        seen, began, faults, done = [], None, sorted(scenario["faults"], key=lambda fault: fault["at_s"]), []
        deadline = time.time() + 600
        while job.poll() is None and time.time() < deadline:
            time.sleep(0.01)
            if (out / "metrics.jsonl").exists():
                found = lines(out / "metrics.jsonl")
                if found and (not seen or seen[-1][1] != found[-1]["step"]):
                    seen.append((time.time(), found[-1]["step"]))
                    if began is None:
                        began = seen[0][0] - found[0]["step_time_s"]
                        plan_faults(plan, scenario, began)
            while began and faults and time.time() >= began + faults[0]["at_s"]:
                done.append((time.time() - began, faults[0]))
                happen(job, faults.pop(0), devices)
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
        if job.wait(60):
            raise SystemExit((folder / "log").read_text())
    return [(e["time"] - began, e) for e in lines(out / "elastic.jsonl")], [(t - began, step) for t, step in seen], done


def plan_faults(plan, scenario, began):
    """Give the ranks their delays."""
    faults = [
        {
            "from": began + fault["at_s"],
            "until": began + fault["until_s"],
            "delay_s": fault["delay_s"],
            "rank": fault.get("slow_rank"),
            "link": fault.get("slow_link") or [None, None],
        }
        for fault in scenario["faults"]
        if "delay_s" in fault
    ]
    new = plan.with_suffix(".new")
    new.write_text(json.dumps({"base_s": BASE_S, "faults": faults}))
    new.replace(plan)


def happen(job, fault, devices):
    if "devices" in fault:
        devices.write_text(f"{fault['devices']}\n")
    if "kill" in fault:
        for process in psutil.Process(job.pid).children(recursive=True):
            if process.name() == f"rank {fault['kill']}":
                process.kill()


def size_of(event):
    mesh = event["mesh"]
    return mesh["pp"] * mesh["dp"] * mesh["tp"]


def happened(events, seen):
    """Events of a run as those of the simulator: (time, kind, devices, ranks), with the first step of each start."""
    found, size = [], 0
    for time_s, event in events:
        size = size_of(event) if event["event"] == "start" else size
        found.append((time_s, event["event"], event.get("devices"), tuple(event.get("ranks", ()))))
    starts = [time_s for time_s, kind, *_ in found if kind == "start"]
    for begin, end in itertools.pairwise([*starts, float("inf")]):
        if first := next((time_s for time_s, _ in seen if begin < time_s < end), None):
            found.append((first, "step", None, ()))
    return sorted(found)


def calibrated(events, seen, done, sent):
    """The times of the simulator's run."""
    starts = [(time_s, size_of(event)) for time_s, event in events if event["event"] == "start"]
    ended = next(time_s for time_s, event in events if event["event"] == "end")
    meshes, stop_s = {}, 0.0
    for number, (begin, size) in enumerate(starts):
        end = starts[number + 1][0] if number + 1 < len(starts) else float("inf")
        times = [time_s for time_s, _ in seen if begin < time_s < end]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        step_s = statistics.median(gaps)
        mesh = meshes.setdefault(size, {"devices": size, "gaps": []})
        mesh["gaps"] += gaps
        if number:
            mesh["start_s"] = times[0] - begin - step_s
        if number == 1:
            stop_s = starts[2][0] - times[-1]
    for mesh in meshes.values():
        mesh["step_s"] = statistics.mean(mesh.pop("gaps"))
    lost = next(time_s for time_s, event in events if event["event"] == "lost")
    resize = next(time_s for time_s, event in events if event["event"] == "resize")
    return {
        "meshes": list(meshes.values()),
        "detect_s": lost - next(time_s for time_s, fault in done if "kill" in fault),
        "look_s": resize - next(time_s for time_s, fault in done if "devices" in fault),
        "stop_s": stop_s,
        "end_s": ended - seen[-1][0],
        "sent": sent,
    }


def messages(folder):
    """Arrays that rank 0 sends to rank 1 in a step of all ranks."""
    found = json.loads((folder / "plan.json.0").read_text())
    return found["sent"]["1"] if found["size"] == 4 else None


def simulated(folder, scenario, times):
    """Events by `sporeloom simulate scenario`."""
    faults = [
        {**fault, **({"messages": times["sent"]} if "slow_link" in fault else {})} for fault in scenario["faults"]
    ]
    text = {"steps": scenario["steps"], **{k: v for k, v in times.items() if k != "sent"}, "faults": faults}
    path = folder / "scenario.yaml"
    path.write_text(json.dumps(text))
    found = [json.loads(line) for line in split_lines(sporeloom("simulate", "scenario", path, "--json"))]
    return [
        (e["time"], e["event"], None if e["event"] in ("step", "end") else e["devices"], tuple(e["ranks"]))
        for e in found
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="number of times that each scenario runs")
    rounds = parser.parse_args().rounds
    rows, passed, all_errors, text = [], 0, [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "first").mkdir()
        found = run_for_real(folder / "first", CALIBRATION)
        times = calibrated(*found, messages(folder / "first"))
        print(times, flush=True)
        for number, (name, scenario) in enumerate(list(SCENARIOS.items()) * rounds):
            place = folder / str(number)
            place.mkdir()
            wanted = simulated(place, scenario, times)
            events, seen, _ = run_for_real(place, scenario)
            real = happened(events, seen)
            same = [each[1:] for each in real] == [each[1:] for each in wanted]
            pairs = list(zip(real, wanted, strict=False))[1:]  # time begins with the first start
            errors = [abs(mine[0] / theirs[0] - 1) for theirs, mine in pairs] if same else []
            passed += same and max(errors) <= LIMIT
            all_errors += errors
            print(name, "same order" if same else (real, wanted), [f"{error:.1%}" for error in errors], flush=True)
            text += [f"## {name}", "", "| event | simulated | real | difference |", "|---|---|---|---|"]
            for theirs, mine in pairs:
                what = " ".join(str(part) for part in (mine[1], *(f"rank {rank}" for rank in mine[3])))
                text.append(f"| {what} | {mine[0]:.2f} s | {theirs[0]:.2f} s | {mine[0] / theirs[0] - 1:+.1%} |")
            text.append("")
            rows.append((name, len(real) - 1, "yes" if same else "no", max(errors, default=float("nan"))))
    report(rows, passed, all_errors, times, text)
    return int(passed < len(rows))


def report(rows, passed, errors, times, text):
    meshes = "; ".join(
        f"{m['devices']} processes: step {m['step_s']:.2f} s, start {m['start_s']:.2f} s"
        for m in sorted(times["meshes"], key=lambda mesh: -mesh["devices"])
        if "start_s" in m
    )
    lines = [
        f"**{passed} of {len(rows)} runs** have the simulated events in the same order with all times within {LIMIT:.0%}. "
        f"Median difference of {len(errors)} times: {statistics.median(errors):.1%}."
        if errors
        else "No order agreed.",
        "",
        f"Measured once, in another run: {meshes}; {times['detect_s']:.2f} s from a kill until all processes have ended, "
        f"{times['stop_s']:.2f} s to save and stop, {times['sent']} messages of a step over the slow link. "
        f"{BASE_S} s of each step are a sleep.",
        "",
        "| scenario | events | same order | largest difference |",
        "|---|---|---|---|",
        *(f"| {name} | {count} | {same} | {worst:.1%} |" for name, count, same, worst in rows),
        "",
        *text,
    ]
    path = ROOT / "benchmarks" / "results" / "simulate_real.md"
    write_report(path, "Simulated elastic runs against real ones", "simulate_real.py", lines)


if __name__ == "__main__":
    sys.exit(main())
