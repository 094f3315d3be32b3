# SPDX-License-Identifier: Apache-2.0
"""preprocess --engine ray beside one process: equal bytes with workers killed, and time. Dedup's time and memory.

    python benchmarks/cluster.py [DOCUMENTS ...]     # of dedup; 100000 1000000 without

Writes benchmarks/results/cluster.md.
"""

import filecmp
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from data import preprocess
from report import write_report

RESULT = Path(__file__).resolve().parent / "results" / "cluster.md"
DOCUMENTS, FILES, KILLS = 300_000, 16, 2  # a minute or more of work: Ray takes 4 s to start and end
WORDS = ["".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=3 + i % 6)) for i in range(5000)]
HAN = [chr(0x4E00 + i) for i in range(3000)]


def make_documents(folder, count, files, seed=1):
    """Mixed: English and Chinese, some copies, some nearly so, some short."""
    folder.mkdir()
    rng, earlier = random.Random(seed), []
    for number in range(files):
        with (folder / f"{number:03}.jsonl").open("w") as file:
            for _ in range(count // files):
                kind = rng.random()
                if earlier and kind < 0.15:
                    text = rng.choice(earlier) + (" again" if kind < 0.07 else "")
                elif kind < 0.3:
                    text = "".join(rng.choices(HAN, k=rng.randint(5, 300)))
                else:
                    text = " ".join(rng.choices(WORDS, k=rng.randint(2, 150)))
                if len(earlier) < 5000:
                    earlier.append(text)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def kill_workers(stop, killed):
    """kill -9 a worker of Ray now and then."""
    while len(killed) < KILLS and not stop.wait(0.5):
        found = subprocess.run(["pgrep", "-f", "ray::_one_shard"], capture_output=True, text=True).stdout.split()
        if found:
            os.kill(int(found[0]), signal.SIGKILL)
            killed.append(found[0])
            stop.wait(3)


def filtering(folder):
    """Rows: what, seconds; and whether all outputs were equal."""
    make_documents(folder / "mixed", DOCUMENTS, FILES)
    rules = ("--min-chars", 30, "--rules", "gopher-repetition", "--shard-mb", 1)
    rows, outputs = [], []
    kinds = {
        "one process": ("--workers", 1),
        "Ray, 1 worker": ("--engine", "ray", "--workers", 1),
        "Ray, 2 workers": ("--engine", "ray", "--workers", 2),
        f"Ray, 2 workers, {KILLS} killed -9": ("--engine", "ray", "--workers", 2),
    }
    for number, (name, flags) in enumerate(kinds.items()):
        out, stop, killed = folder / f"{number}.jsonl", threading.Event(), []
        killer = threading.Thread(target=kill_workers, args=(stop, killed))
        if "killed" in name:
            killer.start()
        seconds, _, _ = preprocess("filter", folder / "mixed", "--out", out, *rules, *flags)
        stop.set()
        assert len(killed) == (KILLS if "killed" in name else 0)
        rows.append((name, seconds))
        outputs.append(out)
        print(rows[-1], flush=True)
    return rows, all(filecmp.cmp(outputs[0], other, shallow=False) for other in outputs[1:])


def deduplicating(folder, count):
    """Documents, seconds, and memory of all processes in GB."""
    make_documents(folder / f"short-{count}", count, 8, seed=2)
    words = ("dedup", folder / f"short-{count}", "--out", folder / f"unique-{count}", "--workers", 2)
    seconds, gigabytes, _ = preprocess(*words)
    print(count, seconds, gigabytes, flush=True)
    return count, seconds, gigabytes


def main():
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))
    rows, equal = filtering(folder)
    sizes = [deduplicating(folder, count) for count in map(int, sys.argv[1:] or ("100000", "1000000"))]
    one = rows[0][1]
    lines = [
        f"Filter (`--rules gopher-repetition`) of {DOCUMENTS:,} mixed documents in {FILES} files, with starting Ray, "
        "which takes 4 s with its end.",
        f"Outputs equal to the byte: {'yes' if equal else 'NO'}.",
        "",
        "| engine | seconds | times one process |",
        "|---|---|---|",
        *(f"| {name} | {seconds:.1f} | {one / seconds:.2f} |" for name, seconds in rows),
        "",
        "Dedup of short documents, 2 processes of this machine:",
        "",
        "| documents | seconds | memory of all processes |",
        "|---|---|---|",
        *(f"| {count:,} | {seconds:.0f} | {gigabytes:.2f} GB |" for count, seconds, gigabytes in sizes),
    ]
    write_report(RESULT, "Preprocessing on a cluster", "cluster.py " + " ".join(sys.argv[1:]), lines)


if __name__ == "__main__":
    main()
