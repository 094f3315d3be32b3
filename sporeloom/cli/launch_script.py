# SPDX-License-Identifier: Apache-2.0
"""Write how a command is started on several servers: one msrun line for each, or a script for ssh, Slurm or
ModelArts.

    sporeloom launch-script --strategy plan.yaml --hosts hosts.txt -- train --data corpus/ --steps 1000
    sporeloom launch-script --strategy plan.yaml --scheduler slurm --out job.sh -- train --data corpus/ --steps 1000

All servers need the same environment, and the same folder under the same path (a shared file system). The strategy is added
to the command. Ranks are assigned to servers in order, so inner mesh axes (tp) stay within a server.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sporeloom.core.command_line import Overwrite, argument, option, output, parse_args
from sporeloom.core.document import read_text
from sporeloom.core.errors import ConfigError, Problems, did_you_mean
from sporeloom.core.files import write_text_atomically
from sporeloom.core.numbers import Bounds, Count, number_problems
from sporeloom.strategy.config import Strategy
from sporeloom.strategy.launching import ADDRESS, DEVICES_PER_SERVER, LOGS, NUMBER, PORT, msrun_line
from sporeloom.strategy.loader import load_strategy

Port = Annotated[int, Bounds(1024, 65535)]
COMMANDS = (
    "train",
    "sft",
    "distill",
    "reward",
    "dpo",
    "simpo",
    "orpo",
    "kto",
    "grpo",
    "ppo",
    "generate",
    "evaluate",
    "score",
    "serve",
)
"""Commands that take a strategy."""
SSH = """#!/usr/bin/env bash
# Starts {servers} servers over ssh; their output goes to server_N.log in the log folder. When one fails, all are ended.
set -u
hosts=({hosts})
logs={logs}
command={command}
mkdir -p "$logs"
trap 'kill $(jobs -p) 2>/dev/null' EXIT INT TERM
for i in "${{!hosts[@]}}"; do
  ssh -tt "${{hosts[$i]}}" "cd $(printf %q "$PWD") && export MASTER_ADDR=${{hosts[0]}} NODE_RANK=$i && $command" \\
    </dev/null >"$logs/server_$i.log" 2>&1 &
done
for _ in "${{hosts[@]}}"; do
  wait -n || exit
done
"""
SLURM = """#!/usr/bin/env bash
#SBATCH --job-name=sporeloom
#SBATCH --nodes={servers}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Add what your cluster needs: a partition, devices of a server (--gres), a time limit. Submit it with sbatch.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
srun --kill-on-bad-exit=1 bash -c {command_of_task}
"""
SLURM_ELASTIC = """#!/usr/bin/env bash
#SBATCH --job-name=sporeloom
#SBATCH --nodes={servers}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
# Add what your cluster needs: a partition, devices of a server (--gres), a time limit. Submit it with sbatch.
# --no-kill keeps the job when a server fails; --requeue starts it again when the first one does.
set -u
servers_up() {{  # waits while Slurm's controller does not answer: nothing is known about servers then
  local found
  until found=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format="%N %t"); do
    sleep "${{LOOK_EVERY_S:-10}}"
  done
  awk '$2 ~ /^(alloc|mix|idle|comp)$/ {{ print $1 }}' <<<"$found" | sort -u
}}
if [ "${{1-}}" = --start ]; then  # by the launcher, for each start
  devices=$2 port=$3 logs=$4 servers=$((($2 + {local} - 1) / {local}))
  shift 4
  while ((devices % servers)); do servers=$((servers + 1)); done
  hosts=$(servers_up | head -n "$servers" | paste -s -d , -)
  # A SIGTERM lets the processes save and stop: srun passes it on, and msrun must not see it.
  srun --kill-on-bad-exit=1 --nodes="$servers" --ntasks="$servers" --ntasks-per-node=1 --nodelist="$hosts" \\
    bash -c 'msrun --worker_num="$0" --local_worker_num="$1" --master_addr="$2" --node_rank="$SLURM_NODEID" \\
      --master_port="$3" --join=True --log_dir="$4" "${{@:5}}" &
      trap "pkill -TERM -P $!" TERM
      while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done
      exit $code' \\
    "$devices" $((devices / servers)) "${{hosts%%,*}}" "$port" "$logs" "$@"
  exit
fi
file=devices.$SLURM_JOB_ID
count() {{ echo $(($(servers_up | wc -l) * {local})); }}
count >"$file"
while sleep "${{LOOK_EVERY_S:-10}}"; do
  count >"$file.new"
  cmp -s "$file.new" "$file" || mv "$file.new" "$file"
done &
trap 'kill $!; wait $! 2>/dev/null; rm -f "$file" "$file.new"' EXIT
more=()
[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && compgen -G {states} >/dev/null && more=(--resume)
sporeloom {words} --launch --devices-file "$file" --launch-command "bash '$0' --start {{devices}} {{port}} {{log_dir}}" \\
  "${{more[@]}}"
"""
MODELARTS = """#!/usr/bin/env bash
# The start command of a ModelArts training job on {servers} servers with an image of your own; it runs once on each.
export MASTER_ADDR="${{VC_WORKER_HOSTS%%,*}}" NODE_RANK="$VC_TASK_INDEX"
{command}
"""


@dataclass(frozen=True, kw_only=True)
class LaunchScriptConfig(Overwrite):
    strategy: Path = option(..., "strategy file, or name of a built-in strategy")
    scheduler: Literal["none", "ssh", "slurm", "modelarts"] = option(
        "none", "program that starts the servers; none: print the command of each"
    )
    devices_per_server: Count = option(DEVICES_PER_SERVER, "number of devices of each server, and so of its processes")
    hosts: Path | None = option(
        None, "file with the host name or address of each server, one a line; the first is the master (default: none)"
    )
    master_port: Port = option(PORT, "port of the master that all servers can reach")
    log_dir: Path = option(LOGS, "folder for the logs of all processes")
    out: Path | None = output(None, "file for the script (default: standard output)")
    command: tuple[str, ...] = argument("after `--`: the command that all servers run, train --data ... for example")


def main(argv: Sequence[str]) -> int:
    config = parse_args(LaunchScriptConfig, __doc__, argv)
    problems = Problems(number_problems(config))
    strategy = problems.of(load_strategy, config.strategy)
    hosts = problems.of(read_hosts, config.hosts) if config.hosts else None
    problems += command_problems(config.command)
    if strategy:
        problems += server_problems(config, strategy, hosts)
    if problems or strategy is None:
        raise ConfigError(problems)
    text = script(config, strategy.mesh.size, hosts)
    if config.out is None:
        print(text, end="")
        return 0
    write_text_atomically(config.out, text)
    if config.scheduler != "none":
        config.out.chmod(0o755)
    return 0


def read_hosts(path: Path) -> list[str]:
    """Read the servers of a file, one a line; `#` begins a comment.

    Raises:
        ConfigError: a line is not a name or an address.
    """
    lines = [line.partition("#")[0].strip() for line in read_text(path).split("\n")]
    hosts = [line for line in lines if line]
    wrong = [f"{path}: {host!r} is not a host name or an address" for host in hosts if not _is_host(host)]
    twice = [f"{path}: {host} is there twice" for host in dict.fromkeys(hosts) if hosts.count(host) > 1]
    if wrong or twice:
        raise ConfigError([*wrong, *twice])
    return hosts


def _is_host(text: str) -> bool:
    return text[0] != "-" and all(c.isascii() and (c.isalnum() or c in ".-_:@[]") for c in text)


def command_problems(command: Sequence[str]) -> list[str]:
    """List the problems of the command that the servers would run."""
    name, *arguments = command
    given = [word.partition("=")[0] for word in arguments]
    problems = []
    if name not in COMMANDS:
        problems.append(
            f"{name} is not a command that takes a strategy{did_you_mean(name, COMMANDS)}; use {', '.join(COMMANDS)}"
        )
    if "--launch" in given:
        problems.append("--launch starts processes on one machine; leave it out of the command")
    if "--elastic" in given and "--output-dir" not in given:
        problems.append("--elastic: give --output-dir, a folder that all servers share")
    if "--strategy" in given:
        problems.append("--strategy is added to the command; give it before `--` alone")
    return problems


def server_problems(config: LaunchScriptConfig, strategy: Strategy, hosts: Sequence[str] | None) -> list[str]:
    """List where the mesh, the servers and the scheduler do not fit together."""
    size, each = strategy.mesh.size, config.devices_per_server
    if size > each and size % each:
        return [
            f"{strategy.at('mesh')} has {size} ranks, which do not divide into servers of --devices-per-server {each}"
        ]
    servers = max(1, size // each)
    if hosts is not None and len(hosts) != servers:
        return [f"{config.hosts} names {len(hosts)} servers, and {size} ranks on {each} devices each take {servers}"]
    if "--elastic" in config.command and config.scheduler != "slurm":
        return [
            "--elastic starts its processes itself: --scheduler slurm writes a script for that; with another one see "
            "--launch-command"
        ]
    if config.scheduler == "ssh" and hosts is None:
        return ["--scheduler ssh needs --hosts"]
    return []


def script(config: LaunchScriptConfig, size: int, hosts: Sequence[str] | None) -> str:
    """Build the lines, or the script, that start all servers."""
    local = min(size, config.devices_per_server)
    servers, logs = size // local, shlex.quote(str(config.log_dir))
    line = _line(config, size, local)
    if config.scheduler == "none":
        if servers == 1:
            return _line(config, size, local) + "\n"
        master = shlex.quote(hosts[0]) if hosts else "MASTER_ADDR"
        lines = [] if hosts else ["# Replace MASTER_ADDR by the address of server 0."]
        for number in range(servers):
            lines += [f"# server {number}{f': {hosts[number]}' if hosts else ''}"]
            lines += [_line(config, size, local, master, str(number))]
        return "\n".join(lines) + "\n"
    if "--elastic" in config.command:
        words = [*config.command, "--strategy", str(config.strategy)]
        states = shlex.quote(f"{output_dir(words)}/checkpoints/step-*")
        return SLURM_ELASTIC.format(servers=servers, local=local, words=shlex.join(words), states=states)
    template = {"ssh": SSH, "slurm": SLURM, "modelarts": MODELARTS}[config.scheduler]
    return template.format(
        servers=servers,
        logs=logs,
        hosts=" ".join(map(shlex.quote, hosts or ())),
        command=shlex.quote(line) if config.scheduler == "ssh" else line,
        command_of_task=shlex.quote(f"export NODE_RANK=$SLURM_NODEID; {line}"),
    )


def output_dir(words: Sequence[str]) -> str:
    """The value of the last --output-dir of a command."""
    values = [value for word, value in zip(words, [*words[1:], ""], strict=True) if word == "--output-dir"]
    return (values + [word.partition("=")[2] for word in words if word.startswith("--output-dir=")])[-1]


def _line(config: LaunchScriptConfig, size: int, local: int, master: str = ADDRESS, number: str = NUMBER) -> str:
    words = [*config.command, "--strategy", str(config.strategy)]
    return msrun_line(words, size, local, master, number, config.master_port, config.log_dir)
