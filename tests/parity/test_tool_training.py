# SPDX-License-Identifier: Apache-2.0
"""GRPO with tools, end to end: masks, log-probabilities, a mesh, and resumed runs."""

import json
import shutil
import sys

import numpy as np
import pytest
from conftest import CONFIGS, call, fewer_microbatches, tool
from safetensors.numpy import load_file

WORKER = "tests/parity/tool_worker.py"
MODEL = {"num_layers": 2, "hidden_size": 32, "vocab_size": 512, "seq_len": 224, "dropout_rate": 0.0}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
REWARD = """
def uses_the_tool(completions, conversations):
    return [len(text) / 40 + len(talk) for text, talk in zip(completions, conversations)]
"""
SPEED = {
    *("step_time_s", "compute_s", "communication_s", "data_s"),
    *("tokens_per_s", "tokens_per_s_per_device", "flops_per_s_per_device"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def tools_file(folder, name, said):
    path = folder / f"{name}.yaml"
    entry = {"name": "hour", "description": "Tells the hour.", "command": [sys.executable, "-c", f"print('{said}')"]}
    path.write_text(json.dumps({"tools": [entry]}))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    (folder / "model.json").write_text(json.dumps(MODEL))
    text = "\n\n".join(
        'user: hour\nassistant: <tool_call>\n{"name": "hour", "arguments": {}}\n</tool_call> at 7' for _ in range(99)
    )
    (folder / "text.txt").write_text(text)
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "reward.py").write_text(REWARD)
    lines = [{"prompt": [{"role": "user", "content": word}]} for word in ("hour", "the hour", "at", "name")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = tool(
        *("tools/train.py", "--data", folder / "text.txt", "--config", folder / "model.json", "--steps", 1),
        *("--output-dir", folder / "base"),
    )
    assert done.code == 0, done.output
    return folder


def flags(base, out, tools, **more):
    return {
        **{"from_checkpoint": f"{base}/base/checkpoint", "data": f"{base}/prompts.jsonl", "output_dir": str(out)},
        **{"chat_template": f"{base}/template.jinja", "reward": [f"{base}/reward.py:uses_the_tool"]},
        **{
            "tools": [tools],
            "tool_call_parser": "hermes",
            "max_turns": 2,
            "steps": 3,
            "batch_size": 4,
            "num_generations": 2,
            "num_iterations": 2,
        },
        **{"max_completion_length": 170, "learning_rate": 1e-3, "adam_epsilon": 1e-5, "seed": 3, "strategy": None},
        **more,
    }


@pytest.fixture(scope="module")
def one(base):
    out = base / "one"
    call(WORKER, "run", flags(base, out, tools_file(base, "seven", "7 7"), save_every=1))
    return out


def steps_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_mask_excludes_what_the_tool_says_and_sampled_log_probabilities_are_those_of_training(one, base):
    found, first = np.load(one / "batches.npz"), steps_of(one)[0]
    _, labels, _, weights, advantages, old, *_ = (found[f"0.{place}"] for place in range(8))
    assert (first["turns"], first["tool_calls"], first["tool_failures"]) == (1.5, 0.5, 0.0)
    assert first["sampling_difference"] < 1e-5
    sampled = found["0.sampled"]
    np.testing.assert_allclose(sampled, old, atol=1e-5)  # old ones are of the training forward pass
    assert (weights > 0).sum() == (sampled != 0).sum() == found["0.learned"].sum()
    other = base / "other"
    call(WORKER, "run", flags(base, other, tools_file(base, "eight", "8 8"), steps=1))
    again = np.load(other / "batches.npz")
    changed = (again["0.1"] != labels) & (weights == 0)
    assert changed[::2].any() and not changed[1::2].any()  # the tool said something else in every other conversation
    assert not advantages[changed].any()


def test_a_mesh_is_one_device(one, base):
    strategy = str(fewer_microbatches(CONFIGS / "pangu_tiny_pp2.yaml", base))
    out = base / "mesh"
    call(WORKER, "run", flags(base, out, f"{base}/seven.yaml", strategy=strategy), processes=2)
    for alone, found in zip(steps_of(one), steps_of(out), strict=True):
        assert alone.keys() - SPEED == found.keys() - SPEED
        for name in alone.keys() - SPEED:
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_run_resumes_between_updates_from_the_same_conversations(one, base):
    whole, out = steps_of(one), base / "cut"
    shutil.copytree(one, out)
    for step in (2, 3):
        shutil.rmtree(out / "checkpoints" / f"step-0000000{step}")
    shutil.rmtree(out / "checkpoint")
    call(WORKER, "run", flags(base, out, f"{base}/seven.yaml", save_every=1, resume=True))
    for alone, found in zip(whole, steps_of(out), strict=True):
        assert {**alone, **dict.fromkeys(SPEED)} == {**found, **dict.fromkeys(SPEED)}
    alone, found = (load_file(each / "checkpoint/model.safetensors") for each in (one, out))
    for name, value in alone.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
