# SPDX-License-Identifier: Apache-2.0
"""Moving averages of the weights: NumPy's formula on what each step saved, on one device and on meshes."""

import json
import shutil

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, fewer_microbatches, in_process, tool
from safetensors.numpy import load_file

from sporeloom.checkpoint.manifest import read_manifest
from sporeloom.checkpoint.sharded import CheckpointReader
from sporeloom.strategy.tensor_slice import TensorSlice

DECAY, STEPS = 0.75, 3
TRAIN = ("tools/train.py", "--data", ROOT / "examples" / "small_town.txt", "--config", TWO_LAYERS, "--seq-len", 32)
AVERAGED = ("--ema-decay", DECAY, "--save-every", 1)
VALIDATED = ("--validate-every", 1, "--validate-ema")

pytestmark = pytest.mark.slow


def trained(*arguments, processes=1):
    outcome = tool(*TRAIN, *arguments, processes=processes)
    assert outcome.code == 0, outcome.output


def state(out, step):
    folder = out / "checkpoints" / f"step-{step:08d}"
    manifest = read_manifest(folder)
    reader = CheckpointReader(folder, manifest)
    return {name: reader.read(name, TensorSlice.full(entry.shape)) for name, entry in manifest.tensors.items()}


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """A model to start from, whose weights are known."""
    out = tmp_path_factory.mktemp("initial") / "out"
    trained("--steps", 1, "--output-dir", out)
    return out / "checkpoint"


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    text = tmp_path_factory.mktemp("sets") / "town.txt"
    text.write_text("".join((ROOT / "examples" / "small_town.txt").read_text().splitlines(keepends=True)[:5]))
    return "--validation-data", f"town={text}"


@pytest.fixture(scope="module")
def one_device(initial, sets, tmp_path_factory):
    """A run with averages, which are validated."""
    out = tmp_path_factory.mktemp("one") / "out"
    trained("--from-checkpoint", initial, "--steps", STEPS, *AVERAGED, *sets, *VALIDATED, "--output-dir", out)
    return out


def follows_the_formula(out, initial):
    """Compares the averages of every step with decay * average + (1 - decay) * weight, from the initial weights."""
    average = load_file(initial / "model.safetensors")
    for step in range(1, STEPS + 1):
        found = state(out, step)
        for name, before in average.items():
            average[name] = DECAY * before.astype(np.float64) + (1 - DECAY) * found[name]
            np.testing.assert_allclose(found[f"ema.{name}"], average[name], rtol=2e-6, atol=1e-8, err_msg=name)
    return average


def test_averages_are_those_of_the_formula_from_the_initial_weights(one_device, initial):
    average = follows_the_formula(one_device, initial)
    written = load_file(one_device / "ema_checkpoint" / "model.safetensors")
    final = load_file(one_device / "checkpoint" / "model.safetensors")
    assert written.keys() == final.keys() == average.keys()
    for name, value in average.items():
        np.testing.assert_allclose(written[name], value, rtol=2e-6, atol=1e-8)
    assert max(np.abs(written[name] - final[name]).max() for name in final) > 1e-5


def test_training_is_bit_for_bit_what_it_is_without_averages_and_their_validation(one_device, initial, tmp_path):
    trained("--from-checkpoint", initial, "--steps", STEPS, "--output-dir", tmp_path / "out")
    plain = load_file(tmp_path / "out" / "checkpoint" / "model.safetensors")
    for name, value in load_file(one_device / "checkpoint" / "model.safetensors").items():
        assert value.tobytes() == plain[name].tobytes(), name


@pytest.mark.parametrize("name", ["pangu_tiny_dp2_tp2_zero", "pangu_tiny_pp2"])
def test_a_mesh_has_the_averages_of_one_device(one_device, initial, sets, tmp_path, name):
    """And validates them, as one with averages that are sharded must gather them for."""
    strategy = fewer_microbatches(CONFIGS / f"{name}.yaml", tmp_path)
    out, processes = tmp_path / "out", 2 if name.endswith("pp2") else 4
    more = (*sets, *VALIDATED) if name.endswith("zero") else ()
    arguments = ("--from-checkpoint", initial, "--steps", STEPS, *AVERAGED, *more, "--output-dir", out)
    trained(*arguments, "--strategy", strategy, processes=processes)
    follows_the_formula(out, initial)
    for kind in ("ema_checkpoint", "checkpoint"):
        expected = load_file(one_device / kind / "model.safetensors")
        for tensor, value in load_file(out / kind / "model.safetensors").items():
            np.testing.assert_allclose(value, expected[tensor], rtol=0, atol=2e-5, err_msg=tensor)
    if more:
        are_validated(out, sets, tmp_path / "again")


def test_a_run_resumes_with_its_averages_on_another_mesh(one_device, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(one_device, out)
    for step in (2, 3):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    (out / "checkpoints" / "LATEST").write_text("step-00000001\n")
    strategy = ("--strategy", CONFIGS / "pangu_tiny_tp2.yaml")
    trained("--resume", "--steps", STEPS, *AVERAGED, "--output-dir", out, *strategy, processes=2)
    before, after = (json.loads((folder / "summary.json").read_text()) for folder in (one_device, out))
    assert (before["starts"], after["starts"]) == (1, 2) and after["steps"] == 2
    times = [json.loads(line)["step_time_s"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, _ = json.loads((out / "history.json").read_text())["starts"]
    latest = (out / "summary.json").stat().st_mtime - first["time"]
    assert after["goodput"] == pytest.approx(sum(times) / latest, rel=0.05)
    expected = load_file(one_device / "ema_checkpoint" / "model.safetensors")
    for tensor, value in load_file(out / "ema_checkpoint" / "model.safetensors").items():
        np.testing.assert_allclose(value, expected[tensor], rtol=0, atol=2e-5, err_msg=tensor)


def test_a_checkpoint_is_exported_with_its_averages(one_device, tmp_path):
    arguments = ("tools/export_checkpoint.py", one_device / "checkpoints", tmp_path / "model", "--ema")
    outcome = in_process(*arguments)
    assert outcome.code == 0 and "averaged weights" in outcome.output, outcome.output
    exported = load_file(tmp_path / "model" / "model.safetensors")
    written = load_file(one_device / "ema_checkpoint" / "model.safetensors")
    assert {name: value.tobytes() for name, value in exported.items()} == {
        name: value.tobytes() for name, value in written.items()
    }


def test_resuming_without_the_averages_is_refused(one_device):
    outcome = tool(*TRAIN, "--resume", "--steps", STEPS + 1, "--save-every", 1, "--output-dir", one_device)
    assert outcome.code == 2
    assert "optimizer ema_decay was 0.75, is 0.0" in outcome.output


def are_validated(out, sets, again):
    """The loss of the averages is that of a model that has them as its weights."""
    still = ("--steps", 1, "--learning-rate", 0, "--min-learning-rate", 0)
    trained("--from-checkpoint", out / "ema_checkpoint", *still, "--output-dir", again, *sets)
    expected, found = (json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (again, out))
    assert found["validation/town/ema_loss"] == pytest.approx(expected["validation/town/loss"], rel=1e-6)
    assert found["validation/ema_loss"] == found["validation/town/ema_loss"] != found["validation/loss"]


def test_averages_are_validated(one_device, sets, tmp_path):
    are_validated(one_device, sets, tmp_path / "again")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--validate-ema", "--validation-data", "a=b"), "there are no averages without --ema-decay"),
        (("--validate-ema", "--ema-decay", "0.9"), "there is nothing to validate with"),
        (("--ema-decay", "1"), "--ema-decay must be"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, flags, problem):
    outcome = in_process(*TRAIN, "--output-dir", tmp_path / "out", *flags)
    assert outcome.code == 2 and problem in outcome.output, outcome.output
