# SPDX-License-Identifier: Apache-2.0
"""Launch a run that continues on fewer devices when ranks are lost, and on more when devices are back.

The launcher starts the processes again, with another strategy and from the newest state; nothing else of a run changes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sporeloom.checkpoint.manifest import LATEST, MANIFEST, checkpoints
from sporeloom.core.document import read_text
from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import remove, replaced_folder, write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import split_lines
from sporeloom.core.log import counted, milestone
from sporeloom.core.scratch import scratch_folder
from sporeloom.runtime.environment import devices as attached
from sporeloom.runtime.launch import SPORELOOM, STOPPED, Ended, Jobs, run_job, too_many
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.smaller import nearest_strategy, settings_text
from sporeloom.train.checks import problems_of_strategy
from sporeloom.train.config import Run
from sporeloom.train.elastic_start import ElasticStart
from sporeloom.train.history import METRICS

EVENTS = "elastic.jsonl"
STRATEGIES = "elastic"
"""Folder of the strategies for fewer devices."""
MEMORY = Path("/dev/shm")
COPIES = 2
"""Copies of the state in memory while the newest one is written."""
LOOK_EVERY_S = 0.3
MAX_DEVICES = 1 << 24


@dataclass
class Devices:
    """The number of devices that a run can use.

    Raises:
        ConfigError: the file with it cannot be read.
    """

    number: int
    file: Path | None = None
    _text: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        if self.file:
            self.number = _number(read_text(self.file), self.file)
            self._text = self._read()

    def look(self) -> bool:
        """Read the file again. Returns whether it was written since. Devices that were lost before that count again."""
        found = self._read()
        if self.file is None or found is None or found == self._text:
            return False
        self._text = found
        try:
            self.number = _number(found[1], self.file)
        except ConfigError as error:
            milestone(f"{error}; still {self.number}")
            return False
        return True

    def _read(self) -> tuple[int, str] | None:
        try:
            return (self.file.stat().st_mtime_ns, self.file.read_text(errors="replace")) if self.file else None
        except OSError:
            return None  # being replaced


def _number(text: str, file: Path) -> int:
    word = text.strip()
    if not (word.isascii() and word.isdecimal() and len(word) < 9 and int(word) <= MAX_DEVICES):
        raise ConfigError(f"--devices-file {file}: the number of devices is expected, got {word[:40]!r}")
    return int(word)


@dataclass
class Elastic:
    """An elastic run, over all its starts.

    Args:
        words: the command of its processes, without a strategy.
        memory: folder for states in memory; None: none are kept there.
    """

    run: Run
    words: list[str]
    jobs: Jobs
    memory: Path | None
    devices: Devices
    starts: int = 0
    restarts: int = 0
    earlier: list[dict[str, Any]] = field(default_factory=list)
    is_stopped: bool = False
    """Whether somebody asked the launcher to end."""
    wanted: Mesh | None = None
    """Mesh that the processes are ending for, because the number of devices has changed."""
    mesh: Mesh = field(default_factory=Mesh)
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self.config: Any = self.run.config
        self.folder: Path = self.config.output_dir
        self.old = set(self._states()) if self.config.overwrite else set()

    def finish(self) -> int:
        """Run until the end. Returns the exit code."""
        while True:
            found = self.strategy(self.devices.number)
            if found is None:
                if not self.wait_for_devices():
                    return STOPPED if self.is_stopped else 1
                continue
            if self.is_stopped:  # between two starts
                return STOPPED
            ended = self.start(*found)
            code = self.code_after(ended)
            if code is not None:
                self.event("end", code=code)
                return code

    # Strategies

    def strategy(self, devices: int) -> tuple[Path, Strategy] | None:
        """The strategy for so many devices, and its file; None: there is none."""
        given = [self.config.strategy, *self.config.elastic_strategies]
        strategies = [(path, load_strategy(path)) for path in given]
        fitting = [each for each in strategies if self.config.min_devices <= each[1].mesh.size <= devices]
        path, full = strategies[0]
        if strategies[0] in fitting:
            return path, full
        if len(given) > 1:
            return max(fitting, key=lambda each: each[1].mesh.size, default=None)
        sizes = range(self.config.min_devices, devices + 1)
        found = nearest_strategy(path, full.mesh, sizes, lambda strategy: problems_of_strategy(self.run, strategy))
        if found is None:
            return None
        settings, strategy = found
        name = "_".join(f"{axis}{degree}" for axis, degree in strategy.mesh.degrees.items())
        file = self.folder / STRATEGIES / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, settings_text(settings, f"{path} on {strategy.mesh} of {full.mesh.size} devices"))
        return file, strategy

    def wait_for_devices(self) -> bool:
        """Wait until the file of devices has enough of them. Returns False where that cannot happen."""
        least = self.config.min_devices
        told = f"no mesh for {counted(self.devices.number, 'device', 'devices')}, with --min-devices {least}"
        if self.devices.file is None:
            milestone(f"{told}; continue with --resume when more are there, or give --devices-file to wait for them")
            self.event("end", code=1)
            return False
        milestone(f"{told}; waiting for a larger number in {self.devices.file}")
        self.event("wait", devices=self.devices.number)
        while not self.is_stopped:
            if self.devices.look():
                return True
            time.sleep(LOOK_EVERY_S)
        return False

    # Starts

    def start(self, path: Path, strategy: Strategy) -> Ended:
        """Start the processes and wait until they have ended."""
        self.starts += 1
        self.mesh, self.wanted, began = strategy.mesh, None, time.time()
        states = [state for state in self._states() if state not in self.old]
        words = [*self.words, "--strategy", str(path)]
        if self.starts > 1:
            words = [word for word in words if word != "--overwrite"]
            words += ["--resume"] if states or self.config.resume else ["--overwrite"]
        memory = str(self.memory) if self.memory else None
        environment = ElasticStart(memory, [] if states or self.config.resume else self.earlier).environment()
        self.event("start", mesh=strategy.mesh.degrees, devices=self.devices.number, step=_step_of(states))
        logs = self.folder / "logs" / f"start_{self.starts}"
        mesh = strategy.mesh
        ended = run_job(
            *(self.jobs, SPORELOOM, words, mesh.size, logs, mesh.first_rank_of_last_stage),
            is_read=False,
            environment=environment,
            look=self.look,
        )
        if not states:
            self.earlier.append({"time": round(began, 3), "steps_done": 0})
        return ended

    def look(self) -> None:
        """Let the processes save and end when another mesh is possible with the devices that are there now."""
        if (now := time.monotonic()) - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        if self.wanted or not self.devices.look():
            return
        found = self.strategy(self.devices.number)
        wanted = found[1].mesh if found else Mesh()
        if found and wanted == self.mesh:
            return
        self.wanted = wanted
        change = f"continuing on {wanted}" if found else "too few to continue"
        milestone(f"{self.devices.file}: {counted(self.devices.number, 'device', 'devices')}; {change} after this step")
        self.event("resize", devices=self.devices.number)
        self.jobs.terminate_workers()

    def stop(self, *_: object) -> None:
        self.is_stopped = True

    # Ends

    def code_after(self, ended: Ended) -> int | None:
        """The exit code of the run after a start has ended; None: it continues."""
        if not ended.code or self.is_stopped:
            return ended.report()
        lost = [each for each in ended.lost_ranks() if not (self.wanted and each[1] == -signal.SIGTERM)]
        is_asked = ended.is_stopped or any(status == -signal.SIGTERM for _, status in ended.ends)
        if self.wanted and not lost and is_asked:
            self.devices.look()
            return None
        if not lost and ended.code >= 0 and (not self.config.launch_command or ended.has_own_error()):
            return ended.report()  # an error of the run, which it would meet again
        if not (self.wanted and self.devices.number < self.mesh.size):  # else the file has counted them already
            self.devices.number -= len(lost) or bool(self.config.launch_command)
        self.devices.look()
        step, state = _last_step(self.folder / METRICS), _step_of([s for s in self._states() if s not in self.old])
        what = " and ".join(f"rank {rank} ({_name_of(status)})" for rank, status in lost) or "the processes"
        self.event("lost", ranks=[rank for rank, _ in lost], devices=self.devices.number, step=step, state=state)
        limit = self.config.max_restarts
        if self.restarts >= limit:
            milestone(f"lost {what} after step {step}; no restart is left of --max-restarts {limit}")
            ended.report()
            return 1
        self.restarts += 1
        left = counted(self.devices.number, "device is", "devices are")
        milestone(
            f"lost {what} after step {step}; {left} left: restart {self.restarts} of at most {limit} from step {state}"
        )
        return None

    def keep_state(self) -> None:
        """Copy the newest state to the checkpoints where it is only in memory, for --resume."""
        states = [state for state in self._states() if state not in self.old]
        if not states or self.memory is None:
            return
        step, folder, _ = max(states)
        target = self.config.states_dir / Path(folder).name
        if any(state[0] == step and Path(state[1]) == target for state in states):
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replaced_folder(target) as partial:
                shutil.copytree(folder, partial, dirs_exist_ok=True)
            write_text_atomically(target.parent / LATEST, target.name + "\n")
        except OSError as error:
            milestone(f"the state after step {step} could not be copied from memory to {target}: {error}")
            return
        milestone(f"copied the state after step {step} from memory to {target}; continue with --resume")

    def event(self, event: str, **values: Any) -> None:
        """Record an event of the run in its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json_text({"time": round(time.time(), 3), "event": event, "start": self.starts, **values})
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _states(self) -> list[tuple[int, str, int]]:
        """Step, folder and time of writing of all complete states."""
        found = []
        for folder in [*checkpoints(self.config.states_dir), *(checkpoints(self.memory) if self.memory else ())]:
            with contextlib.suppress(OSError):
                found.append((int(folder.name[5:]), str(folder), (folder / MANIFEST).stat().st_mtime_ns))
        return found


def run_elastic(words: Sequence[str], run: Run, loads: str) -> int:
    """Train on the devices that there are, until the end. Returns the exit code.

    Args:
        words: the command of the processes, from its verb on.
        loads: module that they load.

    Raises:
        ConfigError: the devices, or the strategies for fewer of them, do not go together with the run.
    """
    config: Any = run.config
    problems = Problems()
    if not (config.oversubscribe or config.launch_command) and (problem := too_many(run.strategy.mesh.size)):
        problems.append(problem)
    if (kinds := " and ".join(attached())) and not config.launch_command:
        problems.append(
            f"--elastic on {kinds}: the launcher does not learn there which ranks are lost; give --launch-command"
        )
    devices = problems.of(Devices, run.strategy.mesh.size, config.devices_file)
    for path in config.elastic_strategies:
        if strategy := problems.of(load_strategy, path):
            problems += problems_of_strategy(run, strategy)
            if strategy.mesh.size >= run.strategy.mesh.size:
                problems.append(
                    f"--elastic-strategies {path}: {strategy.mesh} are not fewer devices than {run.strategy.mesh}"
                )
    if config.min_devices > run.strategy.mesh.size:
        problems.append(f"--min-devices {config.min_devices} is more than {run.strategy.mesh}")
    keeps = config.memory_save_every and not config.launch_command
    problems += _memory_problems(run) if keeps else []
    problems.raise_if_any()
    assert devices
    with (
        scratch_folder(MEMORY) if keeps else contextlib.nullcontext() as memory,
        Jobs(loads, are_several=True, command=config.launch_command) as jobs,
    ):
        if not config.resume:  # the processes, which come later, remove the other files of an earlier run
            for name in (EVENTS, STRATEGIES):
                remove(config.output_dir / name)
        elastic = Elastic(run, [*words], jobs, memory, devices)
        before = signal.signal(signal.SIGTERM, elastic.stop)
        code = 1
        try:
            code = elastic.finish()
            return code
        finally:
            if code:
                elastic.keep_state()
            signal.signal(signal.SIGTERM, before)


def _memory_problems(run: Run) -> Iterator[str]:
    instead = "give --memory-save-every 0 and --save-every for checkpoints on disk"
    if not MEMORY.is_dir():
        yield f"--elastic: there is no {MEMORY} for states in memory; {instead}"
        return
    place = shutil.disk_usage(MEMORY).free
    if place < (needed := COPIES * run.state_bytes()):
        yield f"--elastic: {MEMORY} has {place / 1e9:.1f} GB free, two states take {needed / 1e9:.1f} GB; {instead}"


def _step_of(states: Sequence[tuple[int, str, int]]) -> int:
    return max((step for step, *_ in states), default=0)


def _last_step(metrics: Path) -> int:
    """The last step whose metrics are there."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = split_lines(metrics.read_bytes())
        for line in reversed(lines[-2:]):
            with contextlib.suppress(ValueError):
                return int(json.loads(line)["step"])
    return 0


def _name_of(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else "gone"
