# SPDX-License-Identifier: Apache-2.0
"""Kill runs at random moments, seeded, and count what survives: python benchmarks/reliability.py [--kills 50]

Writes results/reliability.md. Each line is a way of dying, how often it was tried, what survived and what was lost:

- tokenizing: SIGKILL; the same command again gives the bytes of an undisturbed run
- sharded saves of 4 processes: SIGKILL of the launcher while every step is saved; --resume goes on, at most the step that was
  being saved is lost, and the losses are bit for bit those of an undisturbed run
- a worker: SIGKILL of one of 4; the job ends within 20 s, names it, and leaves no process
- Ctrl-C and SIGTERM of a launched job: 130 and 143, no process left
- two jobs at once on this machine: both right; two in one folder: the second is refused; msrun's port is taken: no matter
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from report import write_report

from sporeloom.core.lines import file_lines

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "examples" / "small_town.txt"
STRATEGY = ROOT / "parallel_configs" / "pangu_tiny_dp2_tp2_zero.yaml"
STEPS = 200


def run(*arguments, **options):
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, **options)


def start(*arguments):
    nowhere = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, stdout=nowhere, stderr=nowhere)


def processes(folder):
    """Those whose command line names `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(folder) in " ".join(process.cmdline()):
                found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
        except psutil.Error:
            pass
    return found


def all_gone(folder, seconds=20.0):
    """Whether no process of a job is left in time; those that are, are ended."""
    deadline = time.monotonic() + seconds
    while left := processes(folder):
        if time.monotonic() > deadline:
            for process in left:
                process.kill()
            return False
        time.sleep(0.1)
    return True


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def train(out, *more):
    return (
        "tools/train.py",
        "--data",
        TEXT,
        "--steps",
        STEPS,
        "--seq-len",
        16,
        "--batch-size",
        4,
        "--output-dir",
        out,
        *more,
    )


def losses(out):
    """The last loss that was noted for each step."""
    lines = [json.loads(line) for line in file_lines(out / "metrics.jsonl") if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines}


def kills_while_tokenizing(folder, kills, rng):
    corpus, tokenizer = folder / "corpus", folder / "t.model"
    corpus.mkdir()
    paragraph = TEXT.read_text(encoding="utf-8")
    for number in range(40):
        lines = (json.dumps({"text": f"{number} {i} {paragraph}"}, ensure_ascii=False) + "\n" for i in range(60))
        (corpus / f"{number:02}.jsonl").write_text("".join(lines), encoding="utf-8")
    train_one = run(*train(folder / "for_tokenizer", "--steps", 1))
    assert train_one.returncode == 0, train_one.stderr
    shutil.copy(folder / "for_tokenizer" / "checkpoint" / "tokenizer.model", tokenizer)
    command = ("tools/preprocess.py", "tokenize", corpus, "--tokenizer", tokenizer, "--workers", 2, "--out")
    begin = time.monotonic()
    assert run(*command, folder / "whole").returncode == 0
    seconds, survived, tried = time.monotonic() - begin, 0, 0
    expected = digest(folder / "whole")
    while tried < kills:
        out, killed = folder / "tokens", 0
        for _ in range(rng.randint(1, 4)):
            job = start(*command, out)
            time.sleep(rng.uniform(0.2, seconds))
            job.kill()
            killed += job.wait() != 0
        tried += killed
        done = run(*command, out)
        if out.exists() and digest(out) == expected and all_gone(out):
            survived += killed
        else:
            print(done.stderr[-2000:])
        shutil.rmtree(out, ignore_errors=True)
    return tried, survived


def kills_while_saving(folder, kills, rng):
    undisturbed, out = folder / "undisturbed", folder / "killed"
    job = ("--strategy", STRATEGY, "--launch", "--save-every", 1, "--keep-last", 3)
    assert run(*train(undisturbed, *job)).returncode == 0
    expected, survived, tried, last = losses(undisturbed), 0, 0, 0
    tokenizer = ("--tokenizer", undisturbed / "checkpoint" / "tokenizer.model")
    while tried < kills:
        resume = ("--resume",) if list(out.glob("checkpoints/step-*")) else ()
        process = start(*train(out, *job, *tokenizer, *resume))
        steps_before = max(losses(out), default=0) if (out / "metrics.jsonl").exists() else 0
        deadline, moment = time.monotonic() + 120, rng.uniform(0.0, 3.0)
        while process.poll() is None and time.monotonic() < deadline:
            noted = max(losses(out), default=0) if (out / "metrics.jsonl").exists() else 0
            if noted > steps_before or rng.random() < 0.002:  # mostly while it saves, at times while it starts
                time.sleep(moment)
                break
            time.sleep(0.05)
        process.kill()
        process.wait()
        tried += 1
        gone = all_gone(out)
        found = losses(out) if (out / "metrics.jsonl").exists() else {}
        newest = max((int(p.name[5:]) for p in out.glob("checkpoints/step-*")), default=0)
        same = all(expected[step] == loss for step, loss in found.items())
        kept = newest >= min(last, STEPS)  # nothing that was complete is lost
        survived += gone and same and kept
        if not (gone and same and kept):
            print(f"kill {tried}: gone {gone}, losses equal {same}, newest {newest} after {last}")
        last = newest
        if newest >= STEPS - 40:
            shutil.rmtree(out)
            last = 0
    return tried, survived


def killed_workers(folder, kills, rng):
    survived = 0
    for number in range(kills):
        out = folder / f"worker{number}"
        job = subprocess.Popen(
            [sys.executable, *map(str, train(out, "--steps", 100_000, "--strategy", STRATEGY, "--launch"))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        while not (out / "metrics.jsonl").exists():
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 2.0))
        victim = str(rng.randrange(4))
        for process in processes(out):
            if process.environ().get("MS_ROLE") == "MS_WORKER" and process.environ().get("RANK_ID") == victim:
                process.kill()
        said, _ = job.communicate(timeout=60)
        survived += job.returncode not in (0, None) and all_gone(out) and f"rank {victim} is gone" in said
    return kills, survived


def signals(folder, kills, rng):
    survived = 0
    for number in range(kills):
        out, (kind, code) = folder / f"signal{number}", ((signal.SIGINT, 130), (signal.SIGTERM, 143))[number % 2]
        job = start(*train(out, "--steps", 100_000, "--strategy", STRATEGY, "--launch"))
        while not (out / "metrics.jsonl").exists():
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 2.0))
        job.send_signal(kind)
        survived += job.wait(60) == code and all_gone(out)
    return kills, survived


def two_jobs(folder, kills, rng):
    survived, outs = 0, [folder / "first", folder / "second"]
    jobs = [start(*train(out, "--steps", 20, "--strategy", STRATEGY, "--launch")) for out in outs]
    survived += [job.wait(300) for job in jobs] == [0, 0] and losses(outs[0]) == losses(outs[1])
    first = start(*train(folder / "shared", "--steps", 60))
    while not (folder / "shared" / ".writer").exists():
        time.sleep(0.05)
    second = run(*train(folder / "shared", "--steps", 60))
    told = second.returncode == 2 and f"process {first.pid} on" in second.stderr
    survived += told and first.wait(300) == 0 and len(losses(folder / "shared")) == 60
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        msrun = ("-m", "mindspore.parallel.cluster.run", "--worker_num=4", "--local_worker_num=4", "--join=True")
        port = (f"--master_port={taken.getsockname()[1]}", f"--log_dir={folder / 'logs'}")
        words = train(folder / "port", "--steps", 20, "--strategy", STRATEGY)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = run(*msrun, *port, *words, env={**os.environ, "PATH": path})
        survived += done.returncode == 0 and losses(folder / "port") == losses(outs[0])
    return 3, survived


CASES = {
    "SIGKILL while tokenizing, then the same command": (kills_while_tokenizing, 1.0),
    "SIGKILL of a job of 4 that saves every step, then --resume": (kills_while_saving, 1.0),
    "SIGKILL of one of 4 workers": (killed_workers, 0.2),
    "Ctrl-C, SIGTERM of a launched job of 4": (signals, 0.2),
    "two jobs at once in two folders, in one, and a port that is taken": (two_jobs, 0.04),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name holds this; the others' lines are not written")
    arguments = parser.parse_args()
    lines = ["| what was done | times | survived | lost |", "|---|---|---|---|"]
    lost = 0
    with tempfile.TemporaryDirectory(prefix="reliability-") as name:
        for number, (what, (work, share)) in enumerate(CASES.items()):
            if arguments.only not in what:
                continue
            folder = Path(name, str(number))
            folder.mkdir()
            begin = time.monotonic()
            tried, survived = work(
                folder, max(2, round(arguments.kills * share)), random.Random(arguments.seed + number)
            )
            lost += tried - survived
            lines.append(f"| {what} | {tried} | {survived} | {tried - survived} |")
            print(
                f"{what}: {tried} times, survived {survived}, lost {tried - survived} ({time.monotonic() - begin:.0f} s)"
            )
    if arguments.only:
        print("\n".join(lines))
        return 1 if lost else 0
    title = "What killed runs keep"
    write_report(
        ROOT / "benchmarks" / "results" / "reliability.md", title, f"reliability.py --kills {arguments.kills}", lines
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
