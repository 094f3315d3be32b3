# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the one that started them, however it dies. On Linux; elsewhere nothing is promised."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
LAUNCHER = "MINDLOOM_LAUNCHER"
"""Environment: the process that started this job, for those that it did not start itself."""

_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # before a fork: nothing may be loaded between fork and exec


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the one that started it ends.

    `parent`: its id, where it is known; that one may have ended before this call.
    """
    if _prctl is None:
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = os.environ.get(LAUNCHER, "")
    if (parent is not None and os.getppid() != parent) or (launcher.isdecimal() and not is_alive(int(launcher))):
        os._exit(1)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, of whatever user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
