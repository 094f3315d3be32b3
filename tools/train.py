# SPDX-License-Identifier: Apache-2.0
"""Train a model, on one device or as a strategy file says.

python tools/train.py --data corpus.jsonl --steps 50
python tools/train.py --data corpus.jsonl --strategy parallel_configs/pangu_tiny_dp2_tp2.yaml --launch
msrun --worker_num=4 --local_worker_num=4 --join=True tools/train.py --data corpus.jsonl --strategy ...
"""

from collections.abc import Sequence
from importlib import import_module

from mindloom.cli import parse_args
from mindloom.errors import run_tool
from mindloom.locks import one_writer
from mindloom.runtime.environment import launched_processes, prepare_environment
from mindloom.runtime.launch import STOPPED, launch
from mindloom.train.config import TrainConfig, check


def main(argv: Sequence[str]) -> int:
    config = parse_args(TrainConfig, __doc__, argv)
    run = check(config, None if config.launch else launched_processes())
    if config.launch:
        arguments = [argument for argument in argv if argument != "--launch"]
        mesh = run.strategy.mesh
        with one_writer(config.output_dir):  # for all its processes
            return launch(__file__, arguments, mesh.size, config.output_dir / "logs", mesh.first_rank_of_last_stage)
    prepare_environment()
    train = import_module("mindloom.train.trainer").train  # loads MindSpore, which the checks above do without
    return 0 if train(run) else STOPPED


if __name__ == "__main__":
    run_tool(main)
