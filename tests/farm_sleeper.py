# SPDX-License-Identifier: Apache-2.0
"""A task that takes longer than anybody waits."""

import os
import time
from pathlib import Path


def sleep(folder):
    (Path(folder) / f"{os.getpid()}.pid").touch()
    time.sleep(300)
