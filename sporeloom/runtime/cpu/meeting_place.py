# SPDX-License-Identifier: Apache-2.0
"""Where the CPU processes of one job find each other's sockets."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sporeloom.errors import ConfigError
from sporeloom.scratch import LOCK, lock_in, private_root


class MeetingPlace:
    """The socket names of the ranks of `job`, and proof that this process alone is `rank` there.

    The names are needed until all ranks are connected; then each rank leaves and nothing is left, however a job ends
    later.

    Raises:
        ConfigError: the folder belongs to somebody else, or another process is this rank of such a job.
    """

    def __init__(self, job: str, rank: int):
        self.rank, self.folder = rank, private_root() / job
        self._lock = lock_in(self.folder, f"{rank}{LOCK}")
        if self._lock is None:
            raise ConfigError(
                f"rank {rank} of job {job} is starting on this machine already: two jobs at once need two ports; give msrun "
                "another --master_port"
            )
        self.socket(rank).unlink(missing_ok=True)  # of a job that was killed while it started

    def socket(self, rank: int) -> Path:
        return self.folder / str(rank)

    def leave(self) -> None:
        """Remove this rank's names, and the folder with the last of them. May be called again."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        self.socket(self.rank).unlink(missing_ok=True)
        (self.folder / f"{self.rank}{LOCK}").unlink(missing_ok=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # others are still there
            self.folder.rmdir()
