# SPDX-License-Identifier: Apache-2.0
"""Environment of the process: variables that msrun sets, and settings needed before MindSpore is loaded. Does not
import it."""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from pathlib import Path

from sporeloom.core.processes import LAUNCHER, end_with_parent
from sporeloom.runtime.quiet import quiet_threads

DEVICE_FILES = {"/dev/davinci_manager": "Ascend", "/dev/nvidiactl": "GPU"}
"""File that shows the presence of a device -> MindSpore's name of the device."""


def devices() -> dict[str, str]:
    """Kinds of devices of this machine, whether or not MindSpore supports them: name -> the file that shows its
    presence."""
    return {name: file for file, name in DEVICE_FILES.items() if Path(file).exists()}


def launched_processes() -> int:
    """Number of processes of this job; 1 without msrun."""
    return int(os.environ.get("MS_WORKER_NUM") or 1)


def launched_rank() -> int:
    """Rank of this process; 0 without msrun."""
    return int(os.environ.get("RANK_ID") or 0)


def is_first_process() -> bool:
    """Whether this is the first process of the job, which writes files that exist once; false for msrun's scheduler."""
    return launched_rank() == 0 and os.environ.get("MS_ROLE") != "MS_SCHED"


def job_name() -> str:
    """A name for this job that all of its processes derive from msrun's variables: the address of its scheduler."""
    host, port = (os.environ.get(name, "0") for name in ("MS_SCHED_HOST", "MS_SCHED_PORT"))
    return (
        f"{int(port) if port.isdecimal() else 0}-{zlib.crc32(host.encode()):08x}"  # short: names of sockets are limited
    )


def end_with_msrun() -> None:
    """Exit together with the msrun that started this process and waits for it; without --join=True msrun leaves its
    workers."""
    if LAUNCHER in os.environ:
        end_with_parent()
        return
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return  # no Linux
    waits = [value for word, value in zip(words, [*words[1:], ""], strict=True) if word == "--join"]
    waits += [word.partition("=")[2] for word in words if word.startswith("--join=")]
    if any(Path(word).name == "msrun" for word in words) and waits and waits[-1].lower() in ("true", "1"):
        end_with_parent()


def prepare_environment() -> None:
    """Suppress warnings, limit threads to this process's share of the cores, and let idle ones of CPU processes sleep. A
    user's own settings have precedence.

    One process of several exits with msrun. msrun's scheduler, which CPU processes do not use, exits here.
    """
    if os.environ.get("MS_ROLE") == "MS_SCHED" and not devices():
        sys.exit(0)  # sooner than MindSpore would be loaded
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    if (processes := launched_processes()) > 1:
        end_with_msrun()
        threads = max(1, (os.cpu_count() or 1) // processes)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, str(threads))
        if not devices():
            quiet_threads(threads)
