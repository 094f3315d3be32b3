# SPDX-License-Identifier: Apache-2.0
"""Work whose process is killed as often as a file says, for test_cluster."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Counted:
    first: int
    documents: int


def make(folder, doomed):
    """Counts the documents of a batch. Where one of them is named `doomed`, the process dies while lives are left to lose."""

    def work(batch):
        texts = [raw.content.decode() for raw in batch[1]]
        with (Path(folder) / "done").open("a") as file:
            file.write("".join(f"{text}\n" for text in texts))
        deaths = Path(folder) / "deaths"
        if any(doomed in text for text in texts) and (left := int(deaths.read_text())):
            deaths.write_text(str(left - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return Counted(batch[0], len(texts))

    return work
