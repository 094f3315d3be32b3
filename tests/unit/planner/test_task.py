# SPDX-License-Identifier: Apache-2.0
"""What tasks take beside the model that is trained."""

import dataclasses
from typing import get_args

import pytest

from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.report import table
from sporeloom.planner.search import PlanRequest, evaluate, search
from sporeloom.planner.task import PLAIN_TEXT, TaskName, TrainedTask, auxiliary_bytes, task_memory

MODEL = size_config("pangu", "13b")
DIMS = of_decoder(MODEL)
JOB = Parallelism(dp=4, tp=8, pp=2, microbatch=2, num_microbatches=4, precision="bf16")
LORA = LoRAConfig(r=8)
CLUSTER = Cluster.of_chip("ascend910b")


def beside(task, job=JOB):
    return auxiliary_bytes(DIMS, job, task)


def test_plain_text_has_nothing_beside():
    assert beside(PLAIN_TEXT) == [{}, {}]
    assert task_memory(DIMS, JOB, PLAIN_TEXT)[0].beside == 0


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("pretraining", 1.25),
        ("sft", 1.25),
        *((name, 1.0) for name in get_args(TaskName) if name not in ("pretraining", "sft")),
    ],
)
def test_experts_have_room_for_every_token_where_models_are_compared(name, rows):
    experts = {"num_experts": 8, "experts_per_token": 2, "capacity_factor": 1.25}
    model = dataclasses.replace(size_config("pangu", "tiny"), experts=ExpertConfig(**experts))
    assert of_decoder(model, has_drops=TrainedTask(name).has_drops).expert_rows == rows


def test_the_reference_is_counted_unless_adapters_make_it_the_policy_itself():
    whole, adapters = (TrainedTask("ppo", lora, MODEL, has_reference=True) for lora in (None, LORA))
    assert set(beside(whole)[0]) == {"reference", "KV cache"}
    assert set(beside(adapters)[0]) == {"KV cache"}
    assert set(beside(TrainedTask("dpo", None, MODEL))[0]) == set()
    # Float32 of all parameters over 8 parts, and of the words once more: the last stage's copy.
    parameters = DIMS.num_parameters + DIMS.vocab_size * DIMS.hidden_size
    assert sum(stage["reference"] for stage in beside(whole)) == pytest.approx(4 * parameters / 8, rel=0.01)


def test_keys_and_values_are_of_all_texts_of_a_step():
    task, slots = TrainedTask("grpo", None, MODEL), 1024 + 128
    (first, second) = beside(task)
    assert first == second
    rows, width, layers = 2 * 4, MODEL.hidden_size // 8, MODEL.num_layers // 2
    assert first["KV cache"] == 2 * 2 * rows * slots * width * layers


def test_a_reward_model_has_layers_of_its_own_on_each_stage():
    reward = size_config("pangu", "2.6b").with_value_head()
    found = beside(TrainedTask("ppo", None, MODEL, has_reference=True, reward_model=reward))
    parameters = of_decoder(reward).num_parameters
    assert sum(stage["reward model"] for stage in found) == pytest.approx(4 * parameters / 8, rel=0.02)
    # Its stages are even, whatever the policy's are.
    uneven = dataclasses.replace(JOB, layers_of_stages=(10, 30))
    again = auxiliary_bytes(DIMS, uneven, TrainedTask("ppo", None, MODEL, reward_model=reward))
    assert [s["reward model"] for s in again] == [s["reward model"] for s in found]


def test_adapters_have_the_moments_and_the_rest_its_weights():
    job = dataclasses.replace(JOB, weight_bytes=2)
    whole, frozen = (task_memory(DIMS, job, TrainedTask("sft", lora, MODEL))[0] for lora in (None, LORA))
    assert frozen.weights == whole.weights
    assert frozen.optimizer == pytest.approx(whole.optimizer / 3, rel=0.02)  # master weights of 4 bytes
    assert frozen.gradients < 0.01 * whole.gradients


def test_whole_batches_are_evaluated_at_once_before_an_update():
    long = dataclasses.replace(JOB, microbatch=1, num_microbatches=64, pp=1)
    plain, dpo = (task_memory(DIMS, long, TrainedTask(name, None, MODEL))[0] for name in ("sft", "dpo"))
    assert dpo.activations + dpo.working > plain.activations + plain.working
    wide = dataclasses.replace(DIMS, vocab_size=10**6)
    (found,) = task_memory(wide, long, TrainedTask("dpo", None, MODEL))
    assert found.activations + found.working == pytest.approx(64 * DIMS.seq_len * wide.vocab_size / 8 * 8)


@pytest.mark.parametrize("name", ["simpo", "orpo", "kto"])
def test_preferences_have_no_reference_model_and_kto_evaluates_batches_as_dpo_does(name):
    long = dataclasses.replace(JOB, microbatch=1, num_microbatches=64, pp=1)
    plain, dpo, found = (task_memory(DIMS, long, TrainedTask(task, None, MODEL))[0] for task in ("sft", "dpo", name))
    assert found.beside == 0
    assert dpo.working > plain.working
    assert found == (dpo if name == "kto" else plain)


def test_the_report_says_that_a_time_of_kto_leaves_out_mismatched_texts():
    request = PlanRequest(
        dims=DIMS, cluster=CLUSTER, devices=64, global_batch_size=128, task=TrainedTask("kto", None, MODEL)
    )
    assert "\nkto; times are of an update, without the forward pass of mismatched texts" in table(
        request, search(request)
    )
    orpo = dataclasses.replace(request, task=TrainedTask("orpo", None, MODEL))
    assert "\norpo\n" in table(orpo, search(orpo))


def test_adapters_are_faster_and_their_mfu_counts_no_gradients_of_weights():
    whole, frozen = (evaluate(DIMS, JOB, CLUSTER, TrainedTask("sft", lora, MODEL)) for lora in (None, LORA))
    assert 0.5 < frozen.seconds / whole.seconds < 0.8
    assert frozen.mfu / whole.mfu == pytest.approx(2 / 3 * whole.seconds / frozen.seconds, rel=0.05)


def test_plans_with_auxiliary_bytes_need_more_memory():
    def best(task):
        return search(PlanRequest(dims=DIMS, cluster=CLUSTER, devices=64, global_batch_size=128, task=task))

    plain, ppo = best(PLAIN_TEXT), best(TrainedTask("ppo", None, MODEL, has_reference=True, reward_model=MODEL))
    same = {option.job: option.peak_bytes for option in plain}
    shared = [(option.peak_bytes, same[option.job]) for option in ppo if option.job in same]
    assert shared and all(more > less for more, less in shared)
    fitting, of_ppo = ({option.job for option in found if option.fits} for found in (plain, ppo))
    assert fitting - of_ppo  # a job that has to recompute more, or to shard more
