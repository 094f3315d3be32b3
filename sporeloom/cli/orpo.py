# SPDX-License-Identifier: Apache-2.0
"""Odds ratio preference optimization: learn preferred texts, and their odds over rejected ones, in one step.

sporeloom orpo --from-checkpoint sft/checkpoint --data preferences.jsonl --learning-rate 1e-6

Lines of --data: {"prompt": ..., "chosen": ..., "rejected": ...}
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.preferences import ORPOConfig


def main(argv: Sequence[str]) -> int:
    return run_training("orpo", ORPOConfig, __doc__, argv)
