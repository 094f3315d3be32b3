# SPDX-License-Identifier: Apache-2.0
"""Train a model, on one device or as a strategy file says.

mindloom train --data corpus.jsonl --steps 50
mindloom train --data corpus.jsonl --strategy pangu_tiny_dp2_tp2 --launch
msrun --worker_num=4 --local_worker_num=4 --join=True tools/train.py --data corpus.jsonl --strategy ...
"""

from collections.abc import Sequence
from importlib import import_module

from mindloom.cli import parse_args
from mindloom.locks import one_writer
from mindloom.runtime.environment import launched_processes, prepare_environment
from mindloom.runtime.launch import STOPPED, launch_verb
from mindloom.train.config import TrainConfig, check


def main(argv: Sequence[str]) -> int:
    config = parse_args(TrainConfig, __doc__, argv)
    run = check(config, None if config.launch else launched_processes())
    if config.launch:
        with one_writer(config.output_dir):  # for all its processes
            return launch_verb("train", argv, run.strategy.mesh, config.output_dir / "logs")
    prepare_environment()
    train = import_module("mindloom.train.trainer").train  # loads MindSpore, which the checks above do without
    return 0 if train(run) else STOPPED
