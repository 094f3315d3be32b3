# SPDX-License-Identifier: Apache-2.0
"""What ranks hold while they learn from examples, preferences and rewards is what the closed formulas say."""

import json

import pytest
from conftest import CONFIGS, call, tool

from sporeloom.core.command_line import parse_args
from sporeloom.dry_run.config import DryRunConfig, check
from sporeloom.planner.closed_forms import job_of, parameter_bytes
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.task import adapter_parameters

RULES = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
STRATEGIES = {
    "dp2_tp2_sp": "mesh: {dp: 2, tp: 2}\nsequence_parallel: true\n",
    "pp2_dp2_tp2_zero": (
        "mesh: {pp: 2, dp: 2, tp: 2}\npipeline: {num_microbatches: 2}\noptimizer_parallel: {axis: dp}\n"
        "recompute: {layers: all}\n"
    ),
    "dp4_zero": "mesh: {dp: 4}\noptimizer_parallel: {axis: dp}\n",
}
MODEL = {"num_layers": 2, "hidden_size": 256, "num_heads": 8, "vocab_size": 512, "seq_len": 64}
EVERY_MATRIX = ("--lora-r", 4, "--lora-targets", "attention.*", "mlp.up", "mlp.down")
COPY, CACHES = "reference", "KV cache"
ASKED = [  # strategy, flags, what there is beside the model
    ("dp2_tp2_sp", ("--task", "dpo", *EVERY_MATRIX), ()),
    (
        "dp2_tp2_sp",
        ("--task", "ppo", "--reward-size", "350m", "--compute-dtype", "bfloat16"),
        (COPY, "reward model", CACHES),
    ),
    ("pp2_dp2_tp2_zero", ("--task", "reward"), ()),
    ("pp2_dp2_tp2_zero", ("--task", "orpo"), ()),
    ("dp4_zero", ("--task", "kto"), ()),
    ("pp2_dp2_tp2_zero", ("--task", "reward", "--lora-r", 4), ()),
    ("pp2_dp2_tp2_zero", ("--task", "ppo", *EVERY_MATRIX), (CACHES,)),
    ("dp4_zero", ("--task", "sft", *EVERY_MATRIX), ()),
    ("dp4_zero", ("--task", "grpo", "--reference"), (COPY, CACHES)),
]

pytestmark = pytest.mark.slow


def flags(write, name, more):
    strategy, model = write(f"{name}.yaml", RULES + STRATEGIES[name]), write("model.json", json.dumps(MODEL))
    return [str(word) for word in ("--strategy", strategy, "--config", model, *more)]


@pytest.mark.parametrize(("name", "more", "beside"), ASKED)
def test_tasks_hold_what_is_implied(write, name, more, beside):
    asked = flags(write, name, ("--ranks", "0,last", *more))
    values, run = (
        call("tests/configs/graph_worker.py", "dry_run_values", asked),
        check(parse_args(DryRunConfig, "", asked)),
    )
    dims, job = (
        of_decoder(run.model, run.seq_len, run.task.has_drops),
        job_of(run.strategy, run.model, run.batch_size, 1),
    )
    tied = 4 * run.model.vocab_size // job.tp * run.model.hidden_size
    sizes, adapters = parameter_bytes(dims, job), adapter_parameters(run.task, dims, job)
    assert len(run.distinct_ranks) == run.strategy.mesh.pp
    for rank in values["ranks"]:
        stage = values["job"]["stages"][rank["stage"]]
        least, most = sizes[rank["stage"]], sizes[rank["stage"]] + 4 * adapters[rank["stage"]]
        # Pipelines: the table is on two stages, and its gradients are added up whole, not in tensor parallel shards.
        shared = tied * job.gradient_copies if job.pp > 1 else 0
        assert 0.99 * (least - shared) <= rank["parameter_bytes"] <= 1.01 * most  # a value head has a row
        # Of adapters stages count whole matrices.
        low, high = 0.99 * rank["total_bytes"], (1.06 if run.task.lora else 1.01) * rank["total_bytes"]
        assert low - shared <= stage["total_bytes"] <= high + shared
        assert rank["total_bytes"] - rank["auxiliary_bytes"] > rank["parameter_bytes"]
        assert tuple(rank["auxiliary"]) == beside


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--reference",), "--reference is for --task grpo, not for pretraining"),
        (("--task", "dpo", "--reward-size", "tiny"), "--reward-size is for --task grpo and ppo, not for dpo"),
        (("--task", "ppo", "--reward-size", "huge"), "--reward-size huge is unknown"),
        (("--task", "dpo", "--batch-size", "3"), "--batch-size 3: dpo trains on pairs, two sequences each"),
        (("--task", "kto", "--time", "--cluster", "ascend910b"), "--time simulates steps that only train"),
        (("--task", "sft", "--inference"), "--task sft is for training: leave out --inference"),
        (("--task", "sft", "--lora-r", "4", "--lora-targets", "mlp.side"), "mlp.side matches no matrix"),
    ],
)
def test_what_does_not_fit_together_is_told(write, more, told):
    outcome = tool("tools/dry_run.py", *flags(write, "dp2_tp2_sp", more))
    assert outcome.code == 2
    assert told in outcome.output
