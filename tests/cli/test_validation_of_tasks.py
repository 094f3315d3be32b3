# SPDX-License-Identifier: Apache-2.0
"""Validation of fine-tuning: where a batch is all of the data, the validation loss is the loss of the next step."""

import itertools
import json
import shutil

import pytest
from conftest import CONFIGS, TWO_LAYERS, fewer_microbatches, in_process, tool

COMPLETIONS = [("mill? ", "near the river"), ("inn? ", "in town"), ("well? ", "by the lake"), ("tower? ", "on a hill")]
RATE = ("--learning-rate", 1e-3, "--warmup-steps", 0)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A base model, examples and pairs."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "town.txt").write_text("\n\n".join(f"{a}{b}. " * 6 for a, b in COMPLETIONS))
    done = tool(
        *("tools/train.py", "--data", folder / "town.txt", "--config", TWO_LAYERS, "--seq-len", 32, "--steps", 3),
        *("--output-dir", folder / "base"),
    )
    assert done.code == 0, done.output
    following = [*COMPLETIONS[1:], *COMPLETIONS[:1]]
    examples = [{"prompt": a, "completion": b} for a, b in COMPLETIONS]
    pairs = [
        {"prompt": a, "chosen": b, "rejected": other, "margin": number}
        for number, ((a, b), (_, other)) in enumerate(zip(COMPLETIONS, following, strict=True))
    ]
    for name, lines in (("examples", examples), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def tuned(task, files, out, *more, processes=1):
    """A run whose batch and whose validation set are all lines."""
    data = files / ("examples.jsonl" if task in ("sft", "distill") else "pairs.jsonl")
    arguments = (
        *(f"tools/{task}.py", "--from-checkpoint", files / "base" / "checkpoint", "--data", data, "--seq-len", 32),
        *("--batch-size", 4, "--steps", 2, *RATE, "--output-dir", out, *more),
    )
    outcome = tool(*arguments, processes=processes)
    assert outcome.code == 0, outcome.output
    return lines(out)


@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("sft", ("--lora-r", 2, "--train-on", "everything")),
        ("dpo", ("--label-smoothing", 0.1)),
        ("simpo", ("--label-smoothing", 0.1)),
        ("orpo", ()),
        ("reward", ("--center-rewards-coefficient", 0.1)),
    ],
    ids=["sft_lora", "dpo", "simpo", "orpo", "reward"],
)
def test_the_loss_is_that_of_the_next_step(task, flags, files, tmp_path):
    data = files / ("examples.jsonl" if task == "sft" else "pairs.jsonl")
    found = tuned(task, files, tmp_path / "out", "--validation-data", f"held={data}", "--validate-every", 1, *flags)
    for before, after in itertools.pairwise(found):
        assert before["validation/held/loss"] == before["validation/loss"]
        assert before["validation/loss"] == pytest.approx(after["loss"], rel=2e-6)
        for name in {"rewards/margins", "rewards/accuracies"} & after.keys():
            assert before[f"validation/held/{name}"] == pytest.approx(after[name], rel=1e-4, abs=1e-6), name
    assert found[-1]["validation/loss"] < found[0]["validation/loss"]


def test_a_pipeline_validates_as_one_device_does(files, tmp_path):
    more = ("--validation-data", f"held={files / 'pairs.jsonl'}", "--validate-every", 1, "--lora-r", 2)
    mesh = ("--strategy", fewer_microbatches(CONFIGS / "pangu_tiny_pp2.yaml", tmp_path))
    one = tuned("dpo", files, tmp_path / "one", *more)
    other = tuned("dpo", files, tmp_path / "pp2", *more, *mesh, processes=2)
    for expected, found in zip(one, other, strict=True):
        assert found.keys() - {"communication_s"} == expected.keys()  # one device has none
        assert found["validation/loss"] == pytest.approx(expected["validation/loss"], abs=1e-5)


def test_what_is_shorter_than_a_batch_does_not_count_twice(files, tmp_path):
    some = tmp_path / "some.jsonl"
    some.write_text("".join((files / "examples.jsonl").read_text().splitlines(keepends=True)[:3]))
    rest = tmp_path / "rest.jsonl"
    rest.write_text((files / "examples.jsonl").read_text().splitlines(keepends=True)[3])
    sets = ("--validation-data", f"some={some}", f"rest={rest}", f"all={files / 'examples.jsonl'}")
    last = tuned("sft", files, tmp_path / "out", *sets)[-1]
    # Bytes of a completion, and its end, are not known here: both parts together have the tokens of all.
    parts = {name: last[f"validation/{name}/loss"] for name in ("some", "rest", "all")}
    share = (parts["all"] - parts["rest"]) / (parts["some"] - parts["rest"])
    assert 0.5 < share < 0.95


def test_a_resumed_run_compares_with_the_reference_that_it_began_with(files, tmp_path):
    out, held = tmp_path / "out", ("--validation-data", f"held={files / 'pairs.jsonl'}", "--validate-every", 1)
    found = tuned("dpo", files, out, *held, "--save-every", 1)
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    assert tuned("dpo", files, out, *held, "--resume")[-1]["validation/loss"] == found[-1]["validation/loss"]
    (kept,) = out.glob("reference-*.npy")
    kept.unlink()
    arguments = ("--from-checkpoint", files / "base" / "checkpoint", "--data", files / "pairs.jsonl", "--seq-len", 32)
    more = ("--batch-size", 4, "--steps", 4, *RATE, "--output-dir", out, *held, "--resume")
    shutil.rmtree(out / "checkpoint")
    outcome = tool("tools/dpo.py", *arguments, *more)
    assert outcome.code == 2
    assert "is missing: reference log-probabilities of the run" in outcome.output


def test_lines_that_are_not_those_of_the_task_are_refused(files, tmp_path):
    outcome = in_process(
        *("tools/dpo.py", "--from-checkpoint", files / "base" / "checkpoint", "--data", files / "pairs.jsonl"),
        *("--output-dir", tmp_path / "out", "--validation-data", f"held={files / 'examples.jsonl'}"),
    )
    assert outcome.code == 2
    assert "examples.jsonl:1" in outcome.output
