# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: how the CPU processes of a job find each other's sockets."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.scratch import LOCK, lock_in, private_root


class MeetingPlace:
    """The names of the sockets of the ranks of `job`, and a lock that makes this process its only `rank`.

    The names exist until all ranks are connected; then each rank removes its own, so that no files remain, however a job ends
    later.

    Raises:
        ConfigError: the folder belongs to another user, or another process is this rank of a job of that name.
    """

    def __init__(self, job: str, rank: int):
        self.rank, self.folder = rank, private_root() / job
        self._lock = lock_in(self.folder, f"{rank}{LOCK}")
        if self._lock is None:
            raise ConfigError(
                f"rank {rank} of job {job} is starting on this machine already: two jobs at once need two ports; give msrun "
                "another --master_port"
            )
        self.socket(rank).unlink(missing_ok=True)  # left by a job that was killed while starting

    def socket(self, rank: int) -> Path:
        return self.folder / str(rank)

    def leave(self) -> None:
        """Remove this rank's files, and the folder with the last of them. May be called repeatedly."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        self.socket(self.rank).unlink(missing_ok=True)
        (self.folder / f"{self.rank}{LOCK}").unlink(missing_ok=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # others are still there
            self.folder.rmdir()
