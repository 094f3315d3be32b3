# SPDX-License-Identifier: Apache-2.0
"""Kill random ranks of elastic runs at random moments: python benchmarks/elastic.py [--kills 100] [--minutes 15]

Writes results/elastic.md. Each run trains on 4 CPU processes while a random rank is killed by SIGKILL again and again:
while the processes start, or after a random number of steps, by a seed. Most times the lost devices come back a random time
later. A run passes if it ends by itself, if its metrics have each step once, if no state stays in memory, and if the loss
of each step is that of one device within 1e-5.
"""

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from report import ROOT, metrics, write_report

from sporeloom.core.lines import split_lines

TEXT = ROOT / "examples" / "small_town.txt"
MODEL = ROOT / "tests" / "two_layers.json"
STRATEGIES = ("pangu_tiny_dp2_tp2", "pangu_tiny_dp4_zero", "pangu_tiny_dp2_pp2", "pangu_tiny_tp2_pp2")
KILLS_OF_RUN, STEPS_OF_KILL = 10, 6
TOLERANCE = 1e-5
PATIENCE_S = 900.0


class Run:
    """An elastic run, and what happens to it."""

    def __init__(self, out, strategy, steps, kills):
        self.out, self.devices = out, out.with_suffix(".devices")
        self.devices.write_text("4\n")
        words = ["--strategy", strategy, "--launch", "--elastic", "--devices-file", self.devices]
        words += ["--max-restarts", kills + 5, "--output-dir", out]
        self.log = out.with_suffix(".log").open("w")
        self.job = start(steps, *words, stdout=self.log, stderr=subprocess.STDOUT)

    def has_ended(self):
        return self.job.poll() is not None

    def events(self):
        path = self.out / "elastic.jsonl"
        return [json.loads(line) for line in split_lines(path.read_text())] if path.exists() else []

    def steps_done(self):
        path = self.out / "metrics.jsonl"
        lines = split_lines(path.read_text()) if path.exists() else []
        return len(lines)

    def ranks(self):
        """Processes of the ranks, by number."""
        found = {}
        try:
            for process in psutil.Process(self.job.pid).children(recursive=True):
                name = process.name()
                if name.startswith("rank ") and process.status() != psutil.STATUS_ZOMBIE:
                    found[int(name[5:])] = process
        except psutil.Error:
            pass
        return found

    def wait(self, condition):
        """Wait until a condition holds; False: the run ended first, or nothing happened for long."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.has_ended() or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def kill_one(self, chance):
        """Kill a random rank at a random moment. Returns the kind of moment; None: the run ended before."""
        starts = sum(event["event"] == "start" for event in self.events())
        if not self.wait(self.ranks):
            return None
        moment = "start" if chance.random() < 0.3 else "steps"
        if moment == "steps":
            before, more = self.steps_done(), chance.randint(1, STEPS_OF_KILL)
            if not self.wait(lambda: self.steps_done() >= before + more):
                return None
            time.sleep(chance.uniform(0, 0.5))
        else:
            time.sleep(chance.uniform(0, 3))
        if not self.wait(self.ranks):
            return None
        ranks = self.ranks()
        if not ranks:
            return "missed"
        rank = chance.choice(sorted(ranks))
        try:
            ranks[rank].kill()
        except psutil.Error:
            return "missed"
        lost = sum(event["event"] == "lost" for event in self.events())
        self.wait(lambda: sum(event["event"] == "lost" for event in self.events()) > lost or self.is_waiting())
        if self.is_waiting() or chance.random() < 0.6:
            time.sleep(chance.uniform(0, 4))
            self.devices.write_text("4\n")
        self.wait(lambda: sum(event["event"] == "start" for event in self.events()) > starts)
        return moment

    def is_waiting(self):
        events = self.events()
        return bool(events) and events[-1]["event"] == "wait"


def start(steps, *words, **options):
    words = ["train", "--data", TEXT, "--config", MODEL, "--seq-len", 32, "--steps", steps, *words]
    return subprocess.Popen([sys.executable, "-m", "sporeloom", *map(str, words)], cwd=ROOT, **options)


def one_run(folder, number, kills, wanted):
    """Run once. Returns what was killed and found."""
    chance, strategy = random.Random(number), STRATEGIES[number % len(STRATEGIES)]
    began, moments = time.monotonic(), Counter()
    run = Run(folder / f"run_{number}", strategy, len(wanted), kills)
    while sum(moments.values()) < kills and not run.has_ended():
        if (moment := run.kill_one(chance)) not in (None, "missed"):
            moments[moment] += 1
    run.devices.write_text("4\n")
    try:
        code = run.job.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        run.job.send_signal(signal.SIGTERM)
        code = run.job.wait(PATIENCE_S)
    events = run.events()
    lines = metrics(run.out) if code == 0 else []
    steps = [line["step"] for line in lines]
    worst = max((abs(line["loss"] / loss - 1) for line, loss in zip(lines, wanted, strict=False)), default=float("nan"))
    passed = code == 0 and steps == list(range(1, len(wanted) + 1)) and worst <= TOLERANCE
    passed &= not list(Path("/dev/shm").glob(f"sporeloom-*/{run.job.pid}-*"))
    summary = json.loads((run.out / "summary.json").read_text()) if code == 0 else {}
    lost = [event for event in events if event["event"] == "lost"]
    return {
        "strategy": strategy,
        "moments": moments,
        "passed": passed,
        "code": code,
        "worst": worst,
        "lost_steps": [event["step"] - event["state"] for event in lost],
        "meshes": Counter(
            " x ".join(f"{k} {v}" for k, v in e["mesh"].items()) for e in events if e["event"] == "start"
        ),
        "resizes": sum(event["event"] == "resize" for event in events),
        "starts": summary.get("starts"),
        "started": sum(event["event"] == "start" for event in events),
        "restart_s": [b["time"] - a["time"] for a, b in itertools.pairwise(events) if a["event"] == "lost"],
        "goodput": summary.get("goodput"),
        "seconds": time.monotonic() - began,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="number of kills")
    parser.add_argument("--minutes", type=float, default=15, help="no run begins after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="number of the first run, which is its seed")
    given = parser.parse_args()
    found, deadline = [], time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        steps = KILLS_OF_RUN * STEPS_OF_KILL
        alone = start(steps, "--output-dir", folder / "alone", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if alone.wait(PATIENCE_S):
            raise SystemExit("the run on one device failed")
        wanted = [line["loss"] for line in metrics(folder / "alone")]
        while sum(sum(each["moments"].values()) for each in found) < given.kills and time.monotonic() < deadline:
            left = given.kills - sum(sum(each["moments"].values()) for each in found)
            number = given.seed + len(found)
            found.append(one_run(folder, number, min(KILLS_OF_RUN, left), wanted))
            print(number, found[-1], flush=True)
            if not found[-1]["passed"]:
                print((folder / f"run_{number}.log").read_text()[-4000:])
    report(found, steps)
    return int(not all(each["passed"] for each in found))


def report(found, steps):
    kills, moments = sum(sum(each["moments"].values()) for each in found), sum((e["moments"] for e in found), Counter())
    lost = [number for each in found for number in each["lost_steps"]]
    restart = sorted(seconds for each in found for seconds in each["restart_s"])
    lines = [
        f"{kills} kills of a random rank by SIGKILL in {len(found)} runs of {steps} steps: {moments['start']} while the "
        f"processes started, {moments['steps']} after a random number of steps. "
        f"**{sum(each['passed'] for each in found)} of {len(found)} runs** ended with the loss of one device in every step "
        f"within {TOLERANCE:g} (largest relative difference {max(each['worst'] for each in found):.1e}), with each step "
        "once in metrics.jsonl and nothing left in memory.",
        "",
        f"A kill cost {max(lost, default=0)} steps at most, {sum(lost) / max(1, len(lost)):.2f} on average, with the state "
        f"kept in memory after every step. From the loss to the next start: {restart[len(restart) // 2]:.2f} s (median), "
        f"{restart[-1]:.2f} s at most.",
        "",
        "| strategy | kills | growing back | starts by mesh | largest difference | goodput | passed |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        meshes = ", ".join(f"{count}: {mesh}" for mesh, count in each["meshes"].items())
        goodput = "-" if each["goodput"] is None else f"{each['goodput']:.0%}"
        lines.append(
            f"| {each['strategy']} | {sum(each['moments'].values())} | {each['resizes']} | {meshes} | "
            f"{each['worst']:.1e} | {goodput} | {'yes' if each['passed'] else 'no'} |"
        )
    write_report(ROOT / "benchmarks" / "results" / "elastic.md", "Elastic training under kills", "elastic.py", lines)


if __name__ == "__main__":
    sys.exit(main())
