# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization: make good texts more likely and bad ones less, compared with the initial model.

sporeloom kto --from-checkpoint sft/checkpoint --data preferences.jsonl --learning-rate 1e-6

Lines of --data: {"prompt": ..., "completion": ..., "label": true}
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.preferences import KTOConfig


def main(argv: Sequence[str]) -> int:
    return run_training("kto", KTOConfig, __doc__, argv)
