# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the one that started them, however it dies. On Linux; elsewhere nothing is guaranteed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

PR_SET_PDEATHSIG = 1
LAUNCHER = "SPORELOOM_LAUNCHER"
"""Environment variable: the process that started this job, for processes that it did not start itself."""
MALLOC, FAST_MALLOC = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=4000:glibc.malloc.mxfast=0"
"""Environment of processes that compile: they make and drop millions of small objects, so freed ones are kept at hand. A
twelfth less time; read when a process starts, and by glibc alone."""

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


def forking_context(module: str) -> BaseContext:
    """Context for processes that fork from one which has loaded `module`; loading MindSpore alone takes each a
    second otherwise.

    That one starts with the first of them, with the environment of that moment, and ends with this process. Each begins with
    `begin_forked`. Loading `module` must start no thread, which a fork would not have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def begin_forked(parent: int, environment: Mapping[str, str]) -> None:
    """End with `parent`, which requested this process, and use its present environment."""
    # The one it forked from continues while anybody holds this end of a pipe: from now on `parent` alone.
    os.close(vars(forkserver._forkserver)["_forkserver_alive_fd"])
    end_with_parent()
    if not is_alive(parent):
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a terminal's ends it at once; `parent` forwards it
    os.environ.clear()
    os.environ.update(environment)


def end_later(seconds: float) -> None:
    """Continue in a child of this process, which ends as the child does, but `seconds` later where the child
    failed or was killed.

    msrun looks every second and kills all others when one has ended badly: until then they can inform those who wait. Before
    threads are started.
    """
    # Both are waited for, not handled: what came just before a wait began would be noticed only after it.
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    before, parent, child = signal.pthread_sigmask(signal.SIG_BLOCK, awaited), os.getpid(), os.fork()
    if child == 0:
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well
    ended, status = 0, 0
    while not ended:
        if signal.sigwait(awaited) == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        ended, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status)
    if code:
        time.sleep(seconds)
    os._exit(code if code >= 0 else 128 - code)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
