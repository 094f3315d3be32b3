# SPDX-License-Identifier: Apache-2.0
"""Samples while training: the texts are those of `sporeloom generate`, and training is what it is without."""

import json
import shutil

import pytest
from conftest import CONFIGS, TWO_LAYERS, fewer_microbatches, in_process, tool
from safetensors.numpy import load_file

TEXT = "The mill is near the river and a bridge, the bridge is near the market and a school. " * 40
"""One document: a model learns words from it before it learns that texts end."""
FLAGS = ("--config", TWO_LAYERS, "--seq-len", 32, "--learning-rate", 3e-3, "--warmup-steps", 0, "--decay-steps", 4)
PROMPTS = ["The mill", "The river and", "a school"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"{prompt}\n\n" for prompt in PROMPTS))
    (path.parent / "text.txt").write_text(TEXT)
    return path


def trained(prompts, *arguments, processes=1):
    data = ("--data", prompts.parent / "text.txt")
    outcome = tool("tools/train.py", *data, *FLAGS, *arguments, processes=processes)
    assert outcome.code == 0, outcome.output


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def generated(checkpoint, prompts):
    """Texts of `sporeloom generate`, most likely tokens."""
    outcome = tool(
        "tools/generate.py", "--checkpoint", checkpoint, "--prompt-file", prompts, "--max-new-tokens", 8, "--json"
    )
    assert outcome.code == 0, outcome.output
    return [json.loads(line)["text"] for line in outcome.output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def sampled(prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("sampled") / "out"
    trained(prompts, *flags(prompts), "--steps", 4, "--evaluate-every", 2, "--save-every", 2, "--output-dir", out)
    return out


def flags(prompts):
    return "--sample-prompts", prompts, "--sample-tokens", 8


@pytest.mark.slow
def test_texts_are_those_of_generate_and_training_is_what_it_is_without(sampled, prompts, tmp_path):
    found = samples(sampled)
    assert [(line["step"], line["prompt"]) for line in found] == [(step, text) for step in (2, 4) for text in PROMPTS]
    texts = [line["text"] for line in found[3:]]
    assert any(texts) and texts == generated(sampled / "checkpoint", prompts)
    trained(prompts, "--steps", 4, "--output-dir", tmp_path / "plain")
    for one, other in zip(*(metrics(out) for out in (sampled, tmp_path / "plain")), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    with_samples, without = (load_file(out / "checkpoint/model.safetensors") for out in (sampled, tmp_path / "plain"))
    assert all(value.tobytes() == without[name].tobytes() for name, value in with_samples.items())


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_resumed_run_replaces_the_samples_of_later_steps(sampled, prompts, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(sampled, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    more = ("--evaluate-every", 2, "--save-every", 2, "--output-dir", out, "--resume")
    trained(prompts, *flags(prompts), "--steps", 4, *more)
    assert samples(out) == samples(sampled)


@pytest.mark.slow
def test_a_mesh_samples_with_the_weights_that_it_trains(prompts, tmp_path):
    strategy, out = fewer_microbatches(CONFIGS / "pangu_tiny_dp2_pp2_zero.yaml", tmp_path), tmp_path / "out"
    trained(
        *(prompts, *flags(prompts), "--steps", 2, "--evaluate-every", 1, "--output-dir", out, "--strategy", strategy),
        processes=4,
    )
    found = samples(out)
    assert [line["step"] for line in found] == [1, 1, 1, 2, 2, 2]
    assert [line["text"] for line in found[3:]] == generated(out / "checkpoint", prompts)
    assert len(metrics(out)) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--evaluate-every", 2], "--evaluate-every is for samples: give --sample-prompts FILE, too"),
        (["--sample-chat"], "--sample-chat is for samples"),
        (["--sample-prompts", "missing.txt"], "missing.txt"),
        (["--strategy", CONFIGS / "pangu_tiny_cp2_tp2.yaml"], "texts are sampled a token at a time"),
        (["--strategy", CONFIGS / "pangu_tiny_tp2_pp2_interleaved.yaml"], "leave virtual stages out"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(arguments, told, prompts, tmp_path):
    given = ("--sample-prompts", prompts) if "--strategy" in arguments else ()
    data = ("--data", prompts.parent / "text.txt")
    outcome = in_process("tools/train.py", *data, *FLAGS, "--output-dir", tmp_path / "out", *given, *arguments)
    assert outcome.code == 2 and told in outcome.output, outcome.output
