# SPDX-License-Identifier: Apache-2.0
"""Serve a model over HTTP with OpenAI's API, and a chat page at /.

sporeloom serve out/latest/checkpoint --port 8000
sporeloom serve out/latest/checkpoint --strategy FILE --launch
msrun --worker_num=2 --local_worker_num=2 --join=True tools/serve.py CHECKPOINT --strategy ...
"""

from collections.abc import Sequence
from importlib import import_module

from sporeloom.core.command_line import parse_args
from sporeloom.core.processes import end_later
from sporeloom.core.scratch import scratch_folder
from sporeloom.runtime.environment import launched_processes, launched_rank, prepare_environment
from sporeloom.runtime.launch import launch_verb
from sporeloom.serve.config import ServeConfig, check

SERVER = "sporeloom.serve.main"
TELLING_S = 2.0
"""Seconds for the other ranks to inform the clients after one was lost."""


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    config = parse_args(ServeConfig, __doc__, argv)
    job = check(config, None if config.launch else launched_processes(), launched_rank())
    if config.launch:
        with scratch_folder() as folder:
            return launch_verb("serve", argv, job.strategy.mesh, folder, SERVER)
    if launched_processes() > 1:
        end_later(TELLING_S)
    return int(import_module(SERVER).run(job))  # loads MindSpore, which the checks above do without
