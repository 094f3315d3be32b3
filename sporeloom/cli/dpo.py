# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization: make preferred texts more likely than rejected ones, compared with the initial
model.

sporeloom dpo --from-checkpoint sft/checkpoint --data preferences.jsonl --beta 0.1

Lines of --data: {"prompt": ..., "chosen": ..., "rejected": ...}
"""

from collections.abc import Sequence

from sporeloom.train.launch import run_training
from sporeloom.train.tuning import DPOConfig


def main(argv: Sequence[str]) -> int:
    return run_training("dpo", DPOConfig, __doc__, argv)
