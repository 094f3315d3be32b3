# SPDX-License-Identifier: Apache-2.0
"""Every task of fine-tuning is the same on a mesh as on one device: losses, metrics and what it leaves."""

import json
import shutil

import numpy as np
import pytest
from conftest import CONFIGS, call, fewer_microbatches, tool
from safetensors.numpy import load_file

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.task import TrainedTask, auxiliary_bytes
from sporeloom.strategy.loader import load_strategy

MESHES = {
    "pangu_tiny_dp2_tp2": ("kto", "distill"),
    "pangu_tiny_tp2_pp2": ("reward_lora", "dpo", "grpo", "distill_lora"),
    "pangu_tiny_dp4_zero": ("lora", "ppo"),
}
"""Tasks under each: compiling takes time, so not all under all."""
MODEL = {"num_layers": 2, "hidden_size": 64, "vocab_size": 512, "seq_len": 64, "dropout_rate": 0.1}
WORKER = "tests/parity/tuning_worker.py"
WORDS = ("mill", "river", "market", "school", "bakery", "church", "bridge", "library", "inn", "tower")
COMMON = {"steps": 6, "batch_size": 8, "seq_len": 32, "learning_rate": 1e-3, "adam_epsilon": 1e-5, "seed": 3}
TASKS = {
    "lora": ("SFTConfig", {"lora_r": 2, "lora_targets": ["attention.*", "mlp.up", "mlp.down"], "lora_dropout": 0.1}),
    "reward_lora": (
        "RewardConfig",
        {
            **{"batch_size": 4, "center_rewards_coefficient": 0.1},
            **{"lora_r": 2, "lora_targets": ["attention.*"], "lora_dropout": 0.1},
        },
    ),
    "ppo": ("PPOConfig", {"num_ppo_epochs": 2, "max_completion_length": 6, "kl_target": 0.5, "kl_horizon": 100}),
    "grpo": ("GRPOConfig", {"beta": 0.04, "num_iterations": 2, "max_completion_length": 6, "num_generations": 4}),
    "dpo": ("DPOConfig", {"batch_size": 4, "label_smoothing": 0.1, "learning_rate": 1e-4}),
    "distill": ("DistillConfig", {"temperature": 2.0, "packing": True}),
    "distill_lora": (  # some steps on texts of the student
        "DistillConfig",
        {
            **{"beta": 0.0, "top_k": 8, "lora_r": 2, "learning_rate": 1e-2},
            **{"lmbda": 0.3, "max_completion_length": 6},
        },
    ),
    "kto": ("KTOConfig", {"undesirable_weight": 1.5, "learning_rate": 1e-4}),
}
SPEED = {
    *("step_time_s", "compute_s", "communication_s", "data_s"),
    *("tokens_per_s", "tokens_per_s_per_device", "flops_per_s_per_device"),
}
PAIRS = ("reward_lora", "dpo")
RESUMED = ("ppo", "distill_lora")
SAVE_EVERY = 3
ADAPTERS = ("lora", "reward_lora", "distill_lora")
REWARD = """
def likes_long_words(completions, completion):
    return [len(text) / 40 + (wanted[0] in text) for text, wanted in zip(completions, completion)]
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def lines_of(kind):
    drawn = np.random.default_rng(5)
    for _ in range(48):
        here, there = drawn.choice(WORDS, 2, replace=False)
        prompt, long = f"{here}? ", " and ".join([there] * int(drawn.integers(1, 4)))
        if kind == "examples":
            yield {"prompt": prompt, "completion": long, "label": len(long) > 8}
        else:
            yield {"prompt": prompt, "chosen": long, "rejected": here, "margin": float(drawn.integers(0, 3))}


def tasks_in(folder):
    """{name: (configuration's class, all flags)}"""
    tasks = {}
    for name, (kind, flags) in TASKS.items():
        data = f"{folder}/{'pairs' if name in PAIRS else 'examples'}.jsonl"
        tasks[name] = (kind, {**COMMON, "data": data, "from_checkpoint": f"{folder}/base/checkpoint", **flags})
        if name in ("grpo", "ppo"):
            tasks[name][1]["reward"] = [f"{folder}/reward.py:likes_long_words"]
        if "distill" in name:
            tasks[name][1]["teacher"] = f"{folder}/teacher/checkpoint"
        if name == "ppo":
            tasks[name][1]["reward_model"] = f"{folder}/one_device/reward_lora/checkpoint"
    return tasks


def weights_of(task):
    return "adapter_model.safetensors" if task in ADAPTERS else "model.safetensors"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Every task was done on one device and under every mesh."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "deeper.json").write_text(json.dumps(MODEL | {"num_layers": 3}))  # of stages with other numbers of layers
    (folder / "text.txt").write_text(
        "\n\n".join(f"the {word} is near the {other}" * 8 for word in WORDS for other in WORDS)
    )
    for name, size, model in (("base", "tiny", "model"), ("teacher", "embedded_tiny", "deeper")):
        done = tool(
            *("tools/train.py", "--data", folder / "text.txt", "--config", folder / f"{model}.json", "--steps", 20),
            *("--size", size, "--learning-rate", 1e-3, "--output-dir", folder / name),
        )
        assert done.code == 0, done.output
    for kind in ("examples", "pairs"):
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(kind)))
    (folder / "reward.py").write_text(REWARD)
    tasks = tasks_in(folder)
    saved = {
        name: (kind, flags | ({"save_every": SAVE_EVERY} if name in RESUMED else {}))
        for name, (kind, flags) in tasks.items()
    }
    call(WORKER, "run", folder, [None], saved)
    for mesh, names in MESHES.items():
        strategy = str(fewer_microbatches(CONFIGS / f"{mesh}.yaml", folder))
        call(WORKER, "run", folder, [strategy], {name: tasks[name] for name in names}, processes=4, timeout=600)
    return folder


def steps_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("mesh", "task"), [(mesh, task) for mesh, tasks in MESHES.items() for task in tasks])
def test_a_mesh_is_one_device(out, mesh, task):
    whole, found = steps_of(out / "one_device" / task), steps_of(out / mesh / task)
    assert len(found) == len(whole) == COMMON["steps"]
    for one, other in zip(whole, found, strict=True):
        assert one.keys() - SPEED == other.keys() - SPEED
        # DPO begins at its reference: margins are 0 but for rounding, and how many of them are above 0 is chance.
        at_reference = {"rewards/accuracies"} if abs(one.get("rewards/margins", 1.0)) < 1e-6 else set()
        for name in one.keys() - SPEED - at_reference:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-5, atol=1e-5, err_msg=f"{name} of {one['step']}")
    if task not in ("reward_lora", "grpo", "ppo", "distill_lora"):  # whose margins, and texts, differ by batch
        assert whole[-1]["loss"] < whole[0]["loss"]
    one, other = (load_file(out / name / task / "checkpoint" / weights_of(task)) for name in ("one_device", mesh))
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-4 * np.abs(value).max() + 1e-6, err_msg=name)


@pytest.mark.parametrize(("mesh", "task"), [("pangu_tiny_dp4_zero", "ppo"), ("pangu_tiny_tp2_pp2", "grpo")])
def test_models_and_caches_beside_take_what_dry_runs_say(out, mesh, task):
    strategy, model = load_strategy(out / f"{mesh}.yaml"), load_config(out / "base/checkpoint")[1]
    reward_model = model.with_value_head() if task == "ppo" else None
    asked = TrainedTask(task, None, model, True, reward_model)
    dims = of_decoder(model, COMMON["seq_len"])
    *_, last = auxiliary_bytes(dims, job_of(strategy, model, COMMON["batch_size"]), asked)
    held = json.loads((out / mesh / task / "held.json").read_text())  # the last stage's: its first rank tells
    assert held.keys() == last.keys()
    for what, size in last.items():
        assert held[what] == pytest.approx(size, rel=0.01), what


def test_some_steps_learn_from_what_the_student_says(out):
    steps = steps_of(out / "one_device" / "distill_lora")
    sampled = [step for step in steps if "completion_length" in step]
    assert len(sampled) == 3 and all(1 <= step["completion_length"] <= 6 for step in sampled)


def test_the_reference_is_known_from_the_first_step_on(out):
    """A text has some 50 nats: without it rewards would be 0.1 of those."""
    first, *later = steps_of(out / "one_device" / "dpo")
    assert abs(first["rewards/chosen"]) < 1e-5 and abs(first["rewards/margins"]) < 1e-5
    assert all(abs(step["rewards/chosen"]) < 1 for step in later[:3])
    assert first["logps/chosen"] < -20


@pytest.mark.parametrize("task", RESUMED)
def test_a_run_resumes_bit_for_bit_also_between_updates_from_the_same_texts(out, tmp_path, task):
    whole, folder = out / "one_device" / task, tmp_path / "one_device" / task
    kind, flags = tasks_in(out)[task]
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    shutil.rmtree(folder / "checkpoint")
    call(WORKER, "run", tmp_path, [None], {task: (kind, {**flags, "save_every": SAVE_EVERY, "resume": True})})
    for one, other in zip(steps_of(whole), steps_of(folder), strict=True):
        assert {**one, **dict.fromkeys(SPEED)} == {**other, **dict.fromkeys(SPEED)}
    one, other = (load_file(each / "checkpoint" / weights_of(task)) for each in (whole, folder))
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)
