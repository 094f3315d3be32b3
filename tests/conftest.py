# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the repository's root, outside data, and jobs in processes of their own."""

import contextlib
import ctypes
import gc
import importlib.util
import io
import itertools
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from farm import FARMS, ROOT, Outcome, call, tool

from sporeloom.core.errors import run_tool
from sporeloom.runtime.quiet import quiet_threads

__all__ = [
    "CONFIGS",
    "ROOT",
    "SHARED",
    "TWO_LAYERS",
    "Outcome",
    "call",
    "fewer_microbatches",
    "in_process",
    "msrun",
    "run",
    "shared",
    "tool",
]

SHARED = ROOT.parent / "shared"
CONFIGS = ROOT / "parallel_configs"
LONG = ROOT / "tests" / "long.txt"
TWO_LAYERS = ROOT / "tests" / "two_layers.json"
"""A model configuration for tests where depth proves nothing: half the layers, half the time to compile."""

SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
TURN_NS = 100_000_000


def take_long_turns():
    """This process and those that it starts keep a core for up to 0.1 s, where Linux is 6.12 or later: two farms of four
    processes share two cores, and to change between them every few milliseconds takes a seventh of all time."""
    if platform.system() == "Linux" and platform.machine() in SCHED_SETATTR:
        layout, nothing = "IIQiIQQQII", 0  # struct sched_attr: size, policy, flags, nice, priority, runtime, ...
        wanted = struct.pack(layout, struct.calcsize(layout), *[nothing] * 4, TURN_NS, *[nothing] * 4)
        ctypes.CDLL(None).syscall(SCHED_SETATTR[platform.machine()], 0, wanted, 0)


take_long_turns()
if os.environ.get("PYTEST_XDIST_WORKER"):
    quiet_threads(1)


def run(*arguments, cwd=ROOT, timeout=300, env=None) -> Outcome:
    """Run this Python with `arguments`, as a user does. Where the start is not what is tested, `tool` is faster."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
    )
    return Outcome(done.returncode, done.stdout + done.stderr, {})


def in_process(script: str, *arguments, cwd=ROOT) -> Outcome:
    """As `run` for a tool, in this process: a call that is refused needs no Python of its own."""
    name, said = Path(script).stem, io.StringIO()
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / script)
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO())
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            run_tool(tool.main, list(map(str, arguments)))
    except SystemExit as ended:
        return Outcome(ended.code, said.getvalue(), {})
    finally:
        sys.stdin = before
    raise AssertionError("a tool ends with an exit code")


def msrun_command(num_processes: int, log_dir: Path, *arguments) -> list[str]:
    from sporeloom.runtime.launch import free_port  # noqa: PLC0415 (tests of strategies run without it)

    return [
        str(Path(sys.executable).with_name("msrun")),
        f"--worker_num={num_processes}",
        f"--local_worker_num={num_processes}",
        "--join=True",
        f"--master_port={free_port()}",
        f"--log_dir={log_dir}",
        *map(str, arguments),
    ]


def msrun_env() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def msrun(num_processes: int, log_dir: Path, *arguments, timeout=300, cwd=ROOT) -> Outcome:
    """Run a script in several processes, as the README tells users to."""
    done = subprocess.run(
        msrun_command(num_processes, log_dir, *arguments),
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        env=msrun_env(),
        stdin=subprocess.DEVNULL,
    )
    logs = {rank: (log_dir / f"worker_{rank}.log").read_text(encoding="utf-8") for rank in range(num_processes)}
    return Outcome(done.returncode, done.stdout + done.stderr, logs)


def shared(path: str) -> Path:
    """A file of the data beside the project; the test is skipped where it is absent."""
    if not (SHARED / path).exists():
        pytest.skip(f"no {path} beside the project")
    return SHARED / path


def fewer_microbatches(path: Path, folder: Path) -> Path:
    """A shipped strategy with 2 microbatches: compiling takes time for each."""
    text = path.read_text().replace("rules: rules", f"rules: {CONFIGS}/rules")
    copy = folder / path.name
    copy.write_text(re.sub(r"num_microbatches: \d+", "num_microbatches: 2", text))
    return copy


def pytest_collection_modifyitems(session, config, items):
    """Mark what is in long.txt."""
    lines = [line for line in LONG.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = {line: [item for item in items if item.nodeid.startswith(line)] for line in lines}
    for item in itertools.chain.from_iterable(found.values()):
        item.add_marker(pytest.mark.long)
    files = {item.nodeid.partition("::")[0] for item in items}
    missing = [line for line, matching in found.items() if not matching and line.partition("::")[0] in files]
    missing += [line for line in lines if not (ROOT / line.partition("::")[0]).exists()]
    if missing and len(session.config.args) == 1 and "::" not in config.args[0]:
        raise pytest.UsageError(f"{LONG}: these are the beginning of no test: {', '.join(missing)}")


def pytest_collection_finish():
    """Before any kernel runs in this process: a test that partitions a graph may come after one that computes."""
    if "mindspore" in sys.modules:
        sys.modules["mindspore"].set_device("CPU")
    gc.collect()
    gc.freeze()  # MindSpore collects garbage before every compilation; thousands of tests are none


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Graphs and caches that runs of this session share, and no others."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    os.environ["SPORELOOM_CACHE"] = str(folder / "graphs")
    os.environ |= {"HF_HOME": str(folder / "huggingface"), "HF_DATASETS_OFFLINE": "1"}  # of the evaluation harness
    yield
    for farm in FARMS:
        farm.close()


@pytest.fixture
def pynative():
    """Cells run operator by operator, without a graph."""
    import mindspore as ms  # noqa: PLC0415

    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.GRAPH_MODE)


@pytest.fixture
def write(tmp_path):
    """Write a file of the test's own; returns its path."""

    def write_file(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Of PanGu tiny with two layers, trained for a few steps."""
    out = tmp_path_factory.mktemp("trained") / "out"
    text = ROOT / "examples" / "small_town.txt"
    outcome = tool(
        "tools/train.py", "--data", text, "--config", TWO_LAYERS, "--steps", 30, "--seq-len", 32, "--output-dir", out
    )
    assert outcome.code == 0, outcome.output
    return out / "checkpoint"
