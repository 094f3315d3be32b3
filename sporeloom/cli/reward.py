# SPDX-License-Identifier: Apache-2.0
"""Train a reward model: the preferred one of two texts gets the higher reward.

sporeloom reward --from-checkpoint out/latest/checkpoint --data preferences.jsonl

Lines of --data: {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 1.0}, the margin left out where there is none
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.tuning import RewardConfig


def main(argv: Sequence[str]) -> int:
    return run_training("reward", RewardConfig, __doc__, argv)
