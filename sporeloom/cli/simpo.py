# SPDX-License-Identifier: Apache-2.0
"""Simple preference optimization: make preferred texts more likely than rejected ones, without a reference model.

sporeloom simpo --from-checkpoint sft/checkpoint --data preferences.jsonl --learning-rate 1e-6

Lines of --data: {"prompt": ..., "chosen": ..., "rejected": ...}
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.preferences import SimPOConfig


def main(argv: Sequence[str]) -> int:
    return run_training("simpo", SimPOConfig, __doc__, argv)
