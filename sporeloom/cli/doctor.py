# SPDX-License-Identifier: Apache-2.0
"""Check what this machine has, and name the first thing that is missing.

    sporeloom doctor

Looks at Python, the packages, MindSpore, whether a graph can be sharded with it, the device it finds, msrun, cores, memory,
ports and folders. Exit code 1 if something is missing that training needs.
"""

import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.core.scratch import scratch_folder
from sporeloom.runtime.environment import devices, prepare_environment
from sporeloom.runtime.launch import free_port

PYTHONS = ((3, 10), (3, 13))
GB_OF_A_PROCESS = 1.0
"""Memory that a process of a tiny model takes on CPU; tests and certificates start four."""
WAYS = {
    "Ascend": "install CANN and run `source .../ascend-toolkit/set_env.sh`",
    "GPU": 'run `eval "$(tools/install_gpu_libraries.sh)"`, which docs/how-to/gpu.md is about',
}
"""Instructions to let MindSpore use a device."""


class MissingError(Exception):
    """Something that training needs is missing; the message says how to get it."""


class UnusualError(Exception):
    """Something unusual; training works without it."""


@dataclass(frozen=True)
class DoctorConfig:
    """No flags."""


def main(argv: Sequence[str]) -> int:
    parse_args(DoctorConfig, __doc__, argv)
    prepare_environment()
    missing = []
    for name, look in CHECKS.items():
        try:
            mark, text = "ok", look()
        except UnusualError as told:
            mark, text = "note", str(told)
        except MissingError as told:
            mark, text = "MISSING", str(told)
            missing.append(f"{name}: {text}")
        print(f"{mark:8} {name:12} {text}")
    print(f"\nmissing, first of all: {missing[0]}" if missing else "\nnothing is missing")
    return 1 if missing else 0


def python() -> str:
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        raise MissingError(f"{sys.version.split()[0]}; MindSpore's wheels are for 3.10 to 3.12")
    return f"{sys.version.split()[0]} in {sys.prefix}"


def packages() -> str:
    """Check that the packages which this package needs are installed."""
    try:
        asked = importlib.metadata.requires("sporeloom") or []
    except importlib.metadata.PackageNotFoundError:
        raise UnusualError("sporeloom is used from its folder; `pip install -e .` there brings what it needs") from None
    absent = [name for name in _names(asked) if not _version(name)]
    if absent:
        raise MissingError(f"{', '.join(absent)}; pip install {' '.join(absent)}")
    return f"sporeloom {_version('sporeloom')} and the {len(list(_names(asked)))} packages it needs"


def _names(requirements: Sequence[str]) -> Iterator[str]:
    """Names of the packages that are needed without an extra."""
    for requirement in requirements:
        if "extra ==" not in requirement:
            yield re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def mindspore() -> str:
    try:
        version = import_module("mindspore").__version__
    except Exception as error:  # whatever its libraries die of
        first = first_line(error)
        raise MissingError(f"cannot be imported: {first}; pip install 'mindspore>=2.9,<2.11'") from None
    return str(version)


def partitioner() -> str:
    """Check that a graph can be compiled, exported and sharded with this MindSpore."""
    try:
        import_module("sporeloom.runtime.spmd.trial").shard_a_product()
    except Exception as error:
        raise MissingError(f"{first_line(error)}; pip install 'mindspore>=2.9,<2.11'") from None
    return "shards graphs for any rank of any mesh"


def device() -> str:
    """Report the device that MindSpore would use, and those that it does not find."""
    try:
        found = str(import_module("mindspore").get_context("device_target"))
    except ImportError as error:
        raise MissingError(f"not known, as MindSpore cannot be imported: {error}") from None
    for name, file in devices().items():
        if found != name:
            why = f"there is a device for {name} ({file}) that this MindSpore does not use"
            raise UnusualError(f"{found}; {why}: {WAYS[name]}")
    return found + (": strategies are proved here, by CPU processes" if found == "CPU" else "")


def msrun() -> str:
    path = Path(sys.executable).with_name("msrun")
    if not os.access(path, os.X_OK):
        raise MissingError(f"{path} is not there or cannot be executed; it comes with MindSpore: reinstall that")
    return str(path)


def cores() -> str:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        raise UnusualError(f"{count}: jobs of 4 processes take turns on it")
    return str(count)


def memory() -> str:
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")))
    available = int(fields["MemAvailable"]) / 2**20
    text = f"{available:.1f} GB free; a process of a tiny model takes about {GB_OF_A_PROCESS:.0f}"
    if available < 4 * GB_OF_A_PROCESS:
        raise UnusualError(f"{text}: jobs of 4 may not fit")
    return text


def ports() -> str:
    try:
        return f"msrun finds free ones, as {free_port()}"
    except OSError as error:
        raise MissingError(f"none can be opened on this machine ({error.strerror}); msrun needs one") from None


def folders() -> str:
    """Check that the folders for sockets, compiled graphs and output can be written."""
    with scratch_folder() as meeting:
        scratch = meeting.parent
    kept = import_module("sporeloom.runtime.spmd.compilation_cache").folder()
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=kept):
            pass
    except OSError as error:
        raise UnusualError(f"{kept}: {error.strerror}: compiled graphs are not cached; set SPORELOOM_CACHE") from None
    if not os.access(".", os.W_OK):
        raise UnusualError(f"{Path.cwd()} cannot be written: give --output-dir")
    return f"{scratch} and {kept} can be written"


def isolation() -> str:
    """Check that programs which a model wrote can run isolated."""
    try:
        import_module("sporeloom.evaluation.sandbox").check_isolation()
    except ConfigError as error:
        raise UnusualError(f"`sporeloom evaluate --allow-execution` cannot run programs here: {error}") from None
    return "programs that a model wrote can be run"


CHECKS: dict[str, Callable[[], str]] = {
    "Python": python,
    "packages": packages,
    "MindSpore": mindspore,
    "device": device,  # before a virtual one is made, after which MindSpore knows CPUs alone
    "partitioner": partitioner,
    "msrun": msrun,
    "cores": cores,
    "memory": memory,
    "ports": ports,
    "folders": folders,
    "isolation": isolation,
}
