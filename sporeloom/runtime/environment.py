# SPDX-License-Identifier: Apache-2.0
"""The process's environment: what msrun says, and what MindSpore is to find before it is loaded. No MindSpore here."""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from pathlib import Path

from sporeloom.processes import LAUNCHER, end_with_parent

DEVICE_FILES = {"/dev/davinci_manager": "Ascend", "/dev/nvidiactl": "GPU"}
"""A file that tells of a device: MindSpore's name for it."""


def devices() -> dict[str, str]:
    """Kinds of devices that this machine has, whether or not MindSpore can use them: name -> the file that tells."""
    return {name: file for file, name in DEVICE_FILES.items() if Path(file).exists()}


def launched_processes() -> int:
    """Processes of this job, 1 without msrun."""
    return int(os.environ.get("MS_WORKER_NUM") or 1)


def launched_rank() -> int:
    """Rank of this process, 0 without msrun."""
    return int(os.environ.get("RANK_ID") or 0)


def is_first_process() -> bool:
    """Whether this is the one process of the job that writes what there is only one of; msrun's scheduler is none."""
    return launched_rank() == 0 and os.environ.get("MS_ROLE") != "MS_SCHED"


def job_name() -> str:
    """A name for this job that msrun tells all its processes, whatever is wrapped around each: where its scheduler is."""
    host, port = (os.environ.get(name, "0") for name in ("MS_SCHED_HOST", "MS_SCHED_PORT"))
    return (
        f"{int(port) if port.isdecimal() else 0}-{zlib.crc32(host.encode()):08x}"  # short, as names of sockets must be
    )


def end_with_msrun() -> None:
    """Let this process end with the msrun that started it and waits for it; without --join=True msrun leaves its workers."""
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
    """Quiet warnings, and no more threads than this process's share of the cores. A user's own settings stay.

    A process of several ends with msrun. msrun's scheduler, whom CPU processes ask nothing, ends here.
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
