# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization: sample texts, score them, and train with a critic that estimates the value of each
token.

sporeloom ppo --from-checkpoint sft/checkpoint --data prompts.jsonl --reward-model reward/checkpoint

Lines of --data: {"prompt": ...} and what else the reward's function takes
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.policy import PPOConfig


def main(argv: Sequence[str]) -> int:
    return run_training("ppo", PPOConfig, __doc__, argv)
