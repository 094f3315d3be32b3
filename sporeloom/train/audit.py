# SPDX-License-Identifier: Apache-2.0
"""Verify a run by its hash chain: the records, the checkpoints, and some stretches between checkpoints, which run again bit
for bit. Without MindSpore; stretches run in processes of their own, as the run did."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sporeloom.checkpoint.manifest import FOLDER, checkpoints, read_manifest
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import write_text_atomically
from sporeloom.core.hashes import check_hashes
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import split_lines
from sporeloom.data.blend import BLENDS, read_blend
from sporeloom.data.megatron import is_megatron
from sporeloom.data.token_file import is_token_file
from sporeloom.runtime.launch import SPORELOOM, STOPPED
from sporeloom.train.audit_chain import START, Chain, Record, digest, first_difference, state_of_checkpoint
from sporeloom.train.audit_flags import AuditFlags
from sporeloom.train.evaluation_flags import EvaluationFlags
from sporeloom.train.flags import CheckpointFlags, ElasticFlags, ValidationFlags
from sporeloom.train.sample_flags import SampleFlags
from sporeloom.train.tracking_flags import TrackingFlags

CHECKPOINTS, DATA = "checkpoints", "data"
WITHOUT_EFFECT = (
    TrackingFlags,
    EvaluationFlags,
    SampleFlags,
    ValidationFlags,
    CheckpointFlags,
    ElasticFlags,
    AuditFlags,
)
"""Flags that training is bit for bit the same without."""
LEFT_OUT = {field.name for kind in WITHOUT_EFFECT for field in dataclasses.fields(kind)} | {
    *("output_dir", "launch", "overwrite", "record", "rewind_at_spike", "rerun_every", "find_nan", "skip_steps"),
}
"""Flags that a repetition leaves out: these, what depends on the folder, and steps to skip, which the chain names."""
COMPARED = ("data", "model", "strategy", "resolved")
"""Settings that a step depends on."""
REFERENCE = "reference.npy"
"""Log-probabilities by the initial model, which a DPO run has computed."""
CHANGED = re.compile(r": (data|model|optimizer|lora) \w+ was .*, is |FloatingPointError: ", re.DOTALL)
"""Errors of a repetition that show that it is not the run of the chain."""
SHOWN_LINES, SHOWN = 8, 16
"""Number of lines of an error, and of digits of a hash, in messages."""


@dataclass(frozen=True)
class Segment:
    """Steps between two states: after step `first` and after step `last`."""

    first: int
    last: int
    start: Record = dataclasses.field(repr=False)
    """The start of the run that the steps belong to."""

    def __str__(self) -> str:
        return f"steps {self.first + 1} to {self.last}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run."""
        return dict(self.start[START])


def verify_checkpoints(chain: Chain, folder: Path) -> tuple[list[int], list[str], list[str]]:
    """Compare the content of all checkpoints with the chain. Returns the steps of those that agree, what differs, and what
    cannot be compared."""
    states, sound, differences, unknown = chain.states(), list[int](), list[str](), list[str]()
    steps = {record["step"] for record in chain.steps()}
    for path in reversed(checkpoints(folder / CHECKPOINTS)):
        try:
            manifest = read_manifest(path)
            found = state_of_checkpoint(path, manifest)
        except ConfigError as error:
            differences.append(error.problems[0])
            continue
        recorded = states.get(manifest.step)
        if path.name != FOLDER.format(manifest.step):
            differences.append(f"{path}: holds step {manifest.step}, not that of its name")
        elif recorded is None and manifest.step in steps:
            unknown.append(f"{path}: its state was not recorded: it was saved after an error")
        elif recorded is None:
            if manifest.step >= chain.records[0]["step"]:
                differences.append(f"{path}: the chain has no record of step {manifest.step}")
        elif (name := first_difference(recorded, found)) is not None:
            differences.append(f"{path}: step {manifest.step}, tensor {name}: not the content that the chain recorded")
        else:
            sound.append(manifest.step)
    return sound, differences, unknown


def segments(chain: Chain, saved: Sequence[int]) -> list[Segment]:
    """The stretches that can run again: from each sound checkpoint, or the beginning, to the next or to the last recorded
    state. Those in which the run was restarted with other settings cannot."""
    states = chain.states()
    begin = {0} if chain.records[0]["step"] == 0 else set()
    points = sorted({*begin, *saved})
    last = max(states)
    found = []
    for first, end in zip(points, [*points[1:], last], strict=True):
        inside = [record for record in chain.records if first <= record["step"] <= end]
        governing = _governing(inside, first, chain)
        starts = [record for record in inside if START in record and first < record["step"] < end]
        if end > first and all(digest(each[START]) == digest(governing[START]) for each in starts):
            found.append(Segment(first, end, governing))
    return found


def _governing(inside: Sequence[Record], first: int, chain: Chain) -> Record:
    """The start that the step after `first` belongs to."""
    starts = [record for record in chain.starts() if record["step"] <= first]
    return starts[-1] if starts else inside[0]


def choose(found: Sequence[Segment], count: int, seed: int) -> list[Segment]:
    """Choose some segments at random, in the order of their steps."""
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[number] for number in sorted(chosen)]


def changed_data(segment: Segment) -> list[str]:
    """Read all token files of a run, which training reads in parts. Returns what is not as it was written."""
    path, problems = Path(segment.settings["train"]["data"]), Problems()
    if path.suffix not in BLENDS and not is_token_file(path):
        return []  # a text, which is tokenized again
    for part in (problems.of(read_blend, path) if not is_megatron(path) else None) or ():
        problems.of(check_hashes, part.tokens.folder)
    return list(problems)


def other_versions(segment: Segment) -> list[str]:
    """Versions that the run was made with, where others are installed."""
    recorded = segment.settings["versions"]
    return [f"{name} {each}, installed is {version(name)}" for name, each in recorded.items() if each != version(name)]


def run_again(chain: Chain, folder: Path, segment: Segment, scratch: Path) -> list[str]:
    """Train the steps of a segment again from its checkpoint. Returns what differs from the chain; empty: nothing.

    Raises:
        ConfigError: they cannot run again.
    """
    out = scratch / f"steps-{segment.first}-{segment.last}"
    data = scratch / DATA
    data.mkdir(exist_ok=True)
    out.mkdir()
    (out / DATA).symlink_to(data.resolve(), target_is_directory=True)  # texts are tokenized once
    if segment.first:
        name = FOLDER.format(segment.first)
        (out / CHECKPOINTS).mkdir()
        (out / CHECKPOINTS / name).symlink_to((folder / CHECKPOINTS / name).resolve(), target_is_directory=True)
        if (reference := folder / REFERENCE).exists():  # its hash is in the checkpoint
            (out / REFERENCE).symlink_to(reference.resolve())
    words = _command(chain, segment, out)
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, errors="replace")
    if done.returncode not in (0, STOPPED):
        said = [line for line in split_lines(done.stderr.strip()) if line.strip()]
        at = next((i for i, line in enumerate(said) if line.startswith("error: ")), max(0, len(said) - SHOWN_LINES))
        why = " ".join(said[at : at + SHOWN_LINES]).removeprefix("error: ")
        if CHANGED.search(why):  # than the checkpoint says, which a resumed run refuses; or weights that are lost
            return [f"{segment}: {why}"]
        raise ConfigError(f"{segment} cannot run again: {why}")
    again = Chain.read(out)
    return again.problems or list(differences(chain, again, segment))


def _command(chain: Chain, segment: Segment, out: Path) -> list[str]:
    """Write the run file of a segment, and return the command that trains it."""
    settings = segment.settings
    given = {name: value for name, value in settings["train"].items() if name not in LEFT_OUT}
    skipped = [str(r["step"]) for r in chain.steps() if r.get("skipped") and segment.first < r["step"] <= segment.last]
    path = out / "run.json"
    write_text_atomically(path, json_text({**given, "skip_steps": skipped}, indent=1) + "\n")
    flags = ["--audit-every", str(settings["train"]["audit_every"]), "--stop-after", str(segment.last)]
    flags += ["--resume"] if segment.first else []
    degrees = (degree for name, degree in settings["strategy"]["mesh"].items() if name != "order")
    flags += ["--launch"] if any(degree > 1 for degree in degrees) else []
    return [sys.executable, SPORELOOM, settings["verb"], "--run", str(path), "--output-dir", str(out), *flags]


def differences(chain: Chain, again: Chain, segment: Segment) -> Iterator[str]:
    """List the differences between a segment and its repetition, up to the first step and the first tensor."""
    now = again.records[0]
    for part in COMPARED:
        was, found = segment.settings[part], now[START][part]
        for name in [*was, *(name for name in found if name not in was)]:
            if was.get(name) != found.get(name):
                yield f"{part} {name} was {was.get(name)!r:.60}, is {found.get(name)!r:.60}"
    states, start = chain.states(), segment.start
    begin = start["state"] if start["step"] == segment.first else states[segment.first]  # of one layout, if possible
    if tensor := first_difference(begin, now["state"]):
        yield f"step {segment.first}, tensor {tensor}: the state that the steps begin with is not the recorded one"
    repeated = {record["step"]: record for record in again.steps()}
    has_step = False
    for record in chain.steps():
        step = record["step"]
        if not segment.first < step <= segment.last:
            continue
        other = repeated.get(step)
        if other is None:
            yield f"step {step}: did not run again"
            return
        found = list(_step_differences({**record, "state": states.get(step)}, other))
        yield from found if not has_step else found[-1:]
        has_step = has_step or bool(found)
        if any(", tensor " in line for line in found):
            return


def _step_differences(record: Record, again: Record) -> Iterator[str]:
    """List the differences of a step: samples, loss and norm, and the first tensor; the latter last."""
    where = f"step {record['step']}"
    if record.get("samples") != again.get("samples"):
        yield f"{where}: other samples than recorded"
    for name in ("skipped", "loss", "grad_norm"):
        if record.get(name) != again.get(name):
            yield f"{where}: {name} {record.get(name)} was recorded, {again.get(name)} is computed"
    recorded, found = record.get("state"), again.get("state")
    if recorded and found and (tensor := first_difference(recorded, found)):
        was, now = (str(state.get(tensor)).rpartition("-")[2][:SHOWN] for state in (recorded, found))
        yield f"{where}, tensor {tensor}: hash {was} was recorded, {now} is computed"


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the states of repeated steps."""
    return tempfile.TemporaryDirectory(prefix="sporeloom-audit-")
