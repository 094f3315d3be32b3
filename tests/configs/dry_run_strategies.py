# SPDX-License-Identifier: Apache-2.0
"""Strategies that dry runs of memory and of time have in common: name -> settings, further flags."""

from conftest import CONFIGS

RULES = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
COMMON = {
    "one": ("mesh: {dp: 1}\n", ()),
    "dp2_zero": ("mesh: {dp: 2}\noptimizer_parallel: {axis: dp}\n", ()),
    "dp2_accumulate": ("mesh: {dp: 2}\n", ("--accumulate", "3")),
    "tp2_sp_recompute": ("mesh: {tp: 2}\nsequence_parallel: true\nrecompute: {layers: all}\n", ()),
    "pp2_interleaved": ("mesh: {pp: 2}\npipeline: {num_microbatches: 3, virtual_stages: 2}\n", ()),
}
