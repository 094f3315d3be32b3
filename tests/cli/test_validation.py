# SPDX-License-Identifier: Apache-2.0
"""Validation while training: the loss is that of `sporeloom score`, and training is what it is without."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, in_process, tool
from safetensors.numpy import load_file

from sporeloom.data.token_file import TokenFile
from sporeloom.strategy.loader import load_strategy

TEXT = ROOT / "examples" / "small_town.txt"
SEQ_LEN = 32
TRAIN = ("tools/train.py", "--data", TEXT, "--config", TWO_LAYERS, "--seq-len", SEQ_LEN)

pytestmark = pytest.mark.slow


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def trained(*arguments, processes=1):
    outcome = tool(*TRAIN, *arguments, processes=processes)
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    text = TEXT.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "town.txt").write_text("".join(text[:5]), encoding="utf-8")
    (folder / "other.txt").write_text("".join(text[-9:]), encoding="utf-8")
    return "--validation-data", f"town={folder / 'town.txt'}", f"other={folder / 'other.txt'}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without validation."""
    out = tmp_path_factory.mktemp("plain") / "out"
    trained("--steps", 6, "--output-dir", out)
    return out


@pytest.fixture(scope="module")
def validated(sets, tmp_path_factory):
    """The same with validation."""
    out = tmp_path_factory.mktemp("validated") / "out"
    trained("--steps", 6, "--output-dir", out, *sets, "--validate-every", 2, "--keep-best", "--save-every", 2)
    return out


def scored(checkpoint: Path, tokens: TokenFile, tmp_path: Path) -> float:
    """Mean loss of all tokens of a file by `sporeloom score`: full windows, then the rest."""
    eod = json.loads((checkpoint / "config.json").read_text())["eod_id"]
    ids = np.asarray(tokens.tokens, np.int32)
    full = (len(ids) - 1) // SEQ_LEN
    parts = [np.stack([ids[n * SEQ_LEN : (n + 1) * SEQ_LEN + 1] for n in range(full)])]
    if len(rest := ids[full * SEQ_LEN :]) > 1:
        parts.append(rest[None])
    total, count = 0.0, 0
    for part in parts:
        np.save(tmp_path / "ids.npy", part)
        outcome = tool("tools/score.py", "--checkpoint", checkpoint, "--ids", tmp_path / "ids.npy", "--eod-id", eod)
        found = json.loads(outcome.output.splitlines()[-1])
        total, count = total + found["loss"] * found["num_tokens"], count + found["num_tokens"]
    return total / count


def token_files(out):
    """Token files that a run has made, the smallest first: town, other, and what is trained on."""
    return sorted(map(TokenFile, out.glob("data/tokens-*")), key=lambda tokens: tokens.info.num_tokens)


def test_the_loss_is_that_of_score_and_the_mean_over_sets_is_told_too(validated, tmp_path):
    last = lines(validated)[-1]
    files = dict(zip(("town", "other"), token_files(validated), strict=False))
    expected = {name: scored(validated / "checkpoint", tokens, tmp_path) for name, tokens in files.items()}
    for name, loss in expected.items():
        assert last[f"validation/{name}/loss"] == pytest.approx(loss, abs=1e-5)
    assert expected["town"] != pytest.approx(expected["other"], abs=1e-3)
    assert last["validation/loss"] == pytest.approx(sum(expected.values()) / 2, abs=1e-5)


def test_validation_happens_every_so_many_steps_and_at_the_end(sets, tmp_path, validated):
    assert [line["step"] for line in lines(validated) if "validation/loss" in line] == [2, 4, 6]
    trained("--steps", 2, "--output-dir", tmp_path / "out", *sets)
    assert ["validation/loss" in line for line in lines(tmp_path / "out")] == [False, True]
    events = b"".join(path.read_bytes() for path in (validated / "tensorboard").rglob("events*"))
    assert events.count(b"validation/town/loss") == 3


def assert_same_training(one, other):
    for first, second in zip(lines(one), lines(other), strict=True):
        assert (first["loss"], first["grad_norm"]) == (second["loss"], second["grad_norm"])
    weights = [load_file(out / "checkpoint" / "model.safetensors") for out in (one, other)]
    assert all(value.tobytes() == weights[1][name].tobytes() for name, value in weights[0].items())


def test_training_is_bit_for_bit_what_it_is_without(plain, validated):
    assert_same_training(plain, validated)


def test_a_mesh_validates_as_one_device_does_and_trains_as_without(plain, validated, sets, tmp_path):
    strategy = CONFIGS / "pangu_tiny_dp2_tp2_zero.yaml"
    tokenizer = plain / "checkpoint" / "tokenizer.model"
    shared = ("--steps", 2, "--decay-steps", 6, "--warmup-steps", 0, "--tokenizer", tokenizer, "--strategy", strategy)
    count = load_strategy(strategy).mesh.size
    trained(*shared, "--output-dir", tmp_path / "without", processes=count)
    trained(*shared, "--output-dir", tmp_path / "with", *sets, "--validate-every", 2, processes=count)
    assert_same_training(tmp_path / "without", tmp_path / "with")
    for mine, theirs in zip(lines(tmp_path / "with"), lines(validated), strict=False):
        assert set(mine) - {"communication_s"} == set(theirs)  # one device has none
        for key in ("validation/town/loss", "validation/other/loss"):
            assert mine.get(key, 0) == pytest.approx(theirs.get(key, 0), abs=1e-5)


def test_virtual_stages_validate_weights_and_averages_as_one_device_does(plain, sets, tmp_path):
    four, strategy = tmp_path / "four.json", tmp_path / "virtual.yaml"
    four.write_text(json.dumps({"num_layers": 4, "hidden_size": 32, "num_heads": 2}))
    strategy.write_text(
        f"mesh: {{pp: 2}}\nrules: {CONFIGS}/rules/decoder.yaml\npipeline: {{num_microbatches: 2, virtual_stages: 2}}\n"
    )
    averages = ("--ema-decay", 0.5, "--validate-ema", "--validate-every", 1, *sets)
    shared = ("--steps", 2, "--config", four, "--tokenizer", plain / "checkpoint" / "tokenizer.model", *averages)
    trained(*shared, "--output-dir", tmp_path / "one")
    trained(*shared, "--output-dir", tmp_path / "virtual", "--strategy", strategy, processes=2)
    for one, other in zip(lines(tmp_path / "one"), lines(tmp_path / "virtual"), strict=True):
        assert one["validation/ema_loss"] != one["validation/loss"]
        for name in ("loss", "validation/town/loss", "validation/other/loss", "validation/town/ema_loss"):
            assert other[name] == pytest.approx(one[name], abs=1e-5), name


def test_the_best_model_is_kept_and_training_stops_when_nothing_gets_better(sets, tmp_path):
    out = tmp_path / "out"
    stop = ("--validate-every", 2, "--early-stopping-patience", 2, "--keep-best", "--save-every", 2)
    rates = ("--learning-rate", 0.3, "--warmup-steps", 4)  # too high: the loss falls during the warm-up, then rises
    outcome = trained("--steps", 40, *rates, "--output-dir", out, *sets, *stop)
    found = {line["step"]: line["validation/loss"] for line in lines(out) if "validation/loss" in line}
    best = min(found, key=found.get)
    assert max(found) == best + 4 < 40
    assert f"stopped early after step {max(found)}: the lowest validation loss is {found[best]:.4f}" in outcome.output
    for name, tokens in zip(("town", "other"), token_files(out), strict=False):
        told = next(line for line in lines(out) if line["step"] == best)[f"validation/{name}/loss"]
        assert scored(out / "best_checkpoint", tokens, tmp_path) == pytest.approx(told, abs=1e-5)
    again = trained("--steps", 40, *rates, "--output-dir", out, *sets, *stop, "--resume")
    assert f"stopped early after step {max(found)}" in again.output
    assert len(lines(out)) == max(found)


def test_a_resumed_run_remembers_the_best_loss_of_the_same_sets(validated, sets, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(validated, out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    manifest = out / "checkpoints" / "step-00000004" / "manifest.json"
    state = json.loads(manifest.read_text())["state"]["validation"]
    assert state["value"] == next(line for line in lines(validated) if line["step"] == 4)["validation/loss"]
    assert (state["step"], state["num_worse"]) == (4, 0)
    trained(
        "--steps", 6, "--output-dir", out, *sets, "--validate-every", 2, "--keep-best", "--save-every", 2, "--resume"
    )
    assert [line.get("validation/loss") for line in lines(out)] == [
        line.get("validation/loss") for line in lines(validated)
    ]
    assert json.loads((out / "checkpoints" / "step-00000006" / "manifest.json").read_text())["state"]["validation"] == {
        **state,
        "value": lines(validated)[-1]["validation/loss"],
        "step": 6,
    }
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    resumed = trained("--steps", 6, "--output-dir", out, *sets[:2], "--resume")
    assert "other validation sets than before" in resumed.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--validation-data", TEXT], "give NAME=PATH, as in town=town.txt"),
        (["--validation-data", f"a={TEXT}", f"a={TEXT}"], "the name a is given twice"),
        (["--validation-data", "a=blend.yaml"], "one dataset a set, not a blend"),
        (["--validation-data", "a=missing.txt"], "missing.txt"),
        (["--validate-every", 2], "--validate-every needs validation sets: give --validation-data"),
        (["--keep-best"], "--keep-best needs validation sets"),
        (["--validation-data", f"a={TEXT}", "--early-stopping-patience", 2], "give --validate-every"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(arguments, told, tmp_path):
    outcome = in_process(*TRAIN, "--output-dir", tmp_path / "out", *arguments)
    assert outcome.code == 2
    assert told in outcome.output
