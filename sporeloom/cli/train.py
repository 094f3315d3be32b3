# SPDX-License-Identifier: Apache-2.0
"""Train a model, on one device or under a strategy.

sporeloom train --data corpus.jsonl --steps 50
sporeloom train --data corpus.jsonl --strategy pangu_tiny_dp2_tp2 --launch
msrun --worker_num=4 --local_worker_num=4 --join=True tools/train.py --data corpus.jsonl --strategy ...
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.plain_text import TrainConfig


def main(argv: Sequence[str]) -> int:
    return run_training("train", TrainConfig, __doc__, argv)
