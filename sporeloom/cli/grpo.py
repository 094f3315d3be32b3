# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization: sample texts, score them, and make those above their group's mean more
likely.

sporeloom grpo --from-checkpoint sft/checkpoint --data prompts.jsonl --reward rewards.py:is_polite

Lines of --data: {"prompt": ...} and what else the reward's function takes
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.policy import GRPOConfig


def main(argv: Sequence[str]) -> int:
    return run_training("grpo", GRPOConfig, __doc__, argv)
