# SPDX-License-Identifier: Apache-2.0
"""Answer a file of requests in the format of OpenAI's Batch API, without a server. Started again, it continues.

sporeloom batch out/latest/checkpoint requests.jsonl answers.jsonl
"""

from collections.abc import Sequence
from importlib import import_module

from sporeloom.core.command_line import parse_args
from sporeloom.core.log import milestone
from sporeloom.core.scratch import scratch_folder
from sporeloom.runtime.environment import launched_processes, launched_rank, prepare_environment
from sporeloom.runtime.launch import launch_verb
from sporeloom.serve.batch import BatchConfig, check_batch

RUNNER = "sporeloom.serve.batch_run"


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    config = parse_args(BatchConfig, __doc__, argv)
    job = check_batch(config, None if config.launch else launched_processes(), launched_rank())
    if not job.waiting:
        milestone(f"{job.output}: complete, {job.num_done} answers")
        return 0
    if config.launch:
        with scratch_folder() as folder:
            return launch_verb("batch", argv, job.serving.strategy.mesh, folder, RUNNER)
    return int(import_module(RUNNER).run(job))  # loads MindSpore, which the checks above do without
