# SPDX-License-Identifier: Apache-2.0
"""Generate text with a trained model, on one device or under a strategy.

sporeloom generate --checkpoint out/latest/checkpoint --prompt "明月几时有" --temperature 0.8 --top-p 0.9
sporeloom generate --checkpoint out/latest/checkpoint --interactive
sporeloom generate --checkpoint out/latest/checkpoint --prompt-file prompts.txt --strategy FILE --launch
msrun --worker_num=2 --local_worker_num=2 --join=True tools/generate.py --checkpoint ... --strategy ...
"""

from collections.abc import Sequence
from importlib import import_module

from sporeloom.core.command_line import parse_args
from sporeloom.core.scratch import scratch_folder
from sporeloom.inference.config import GenerateConfig, check
from sporeloom.runtime.environment import launched_processes, prepare_environment
from sporeloom.runtime.launch import launch_verb

TERMINAL = "sporeloom.inference.terminal"


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    config = parse_args(GenerateConfig, __doc__, argv, lambda config: check(config, None))
    job = check(config, None if config.launch else launched_processes())
    if config.launch:
        with scratch_folder() as folder:
            return launch_verb("generate", argv, job.strategy.mesh, folder, TERMINAL)
    import_module(TERMINAL).run(job)  # loads MindSpore, which the checks above do without
    return 0
