# SPDX-License-Identifier: Apache-2.0
"""The commands that start a job on one server or several."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

ADDRESS, NUMBER = '"$MASTER_ADDR"', '"$NODE_RANK"'
"""Variables of a line that is the same on all servers."""
DEVICES_PER_SERVER, PORT, LOGS = 8, 8118, Path("logs")


def msrun_line(
    words: Sequence[str],
    size: int,
    local: int,
    master: str = ADDRESS,
    number: str = NUMBER,
    port: int = PORT,
    log_dir: Path = LOGS,
) -> str:
    """Build the msrun command of a server.

    Args:
        words: the command and its flags, after `sporeloom`.
        size: number of processes of the job.
        local: number of processes of a server.
        master: address of server 0, as the shell reads it.
        number: of this server, as the shell reads it.
    """
    line = ["msrun", f"--worker_num={size}", f"--local_worker_num={local}"]
    if size > local:
        line += [f"--master_addr={master}", f"--node_rank={number}"]
    line += [f"--master_port={port}", "--join=True", f"--log_dir={shlex.quote(str(log_dir))}"]
    return " ".join([*line, '"$(which sporeloom)"', shlex.join(words)])


def start_lines(
    words: Sequence[str], strategy: str, size: int, devices_per_server: int = DEVICES_PER_SERVER
) -> list[str]:
    """Describe how a command is started under a strategy: the line of each server, and the command that writes a script.

    Args:
        words: the command and its flags, without the strategy.
        strategy: file or name.
        size: number of ranks.
    """
    local = size if size <= devices_per_server else math.gcd(size, devices_per_server)
    line = msrun_line([*words, "--strategy", strategy], size, local)
    if size == local:
        return ["to run it:", f"  {line}"]
    flags, servers = ["--strategy", strategy, "--devices-per-server", str(local)], size // local
    return [
        f"to run it, on each of {servers} servers (MASTER_ADDR: address of server 0; NODE_RANK: 0 .. {servers - 1}):",
        f"  {line}",
        "or, as a script for ssh, Slurm or ModelArts:",
        f"  sporeloom {shlex.join(['launch-script', *flags, '--', *words])}",
    ]
