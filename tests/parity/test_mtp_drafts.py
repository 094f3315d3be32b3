# SPDX-License-Identifier: Apache-2.0
"""Drafts by layers of multi-token prediction are those of training, and change no bit of an answer."""

import dataclasses

import numpy as np
import pytest
from conftest import CONFIGS, call, shared

from sporeloom.checkpoint.model_folder import save_checkpoint
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes

WORKER = "tests/parity/mtp_drafts_worker.py"
ULTRA = size_config("pangu", "ultra_moe_tiny")
ONE_LAYER = {"num_layers": 1, "experts": dataclasses.replace(ULTRA.experts, first_dense_layers=0)}
DEEPSEEK = dataclasses.replace(ULTRA, block="sequential", mtp_input="after_norm", num_mtp_layers=2, num_layers=2)
SMALL = size_config("pangu", "2_tiny").without_mtp().with_layers(2)
TWO = dataclasses.replace(
    SMALL, num_mtp_layers=1, windows=(*SMALL.windows, 32), streams=dataclasses.replace(SMALL.streams, rounds=2)
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def drawn(config):
    draw = np.random.default_rng(3)
    for name, shape in parameter_shapes(config).items():
        weight = draw.normal(size=shape).astype(np.float32)
        yield name, np.float32(1) + weight / 10 if name.endswith("norm.weight") else weight / 4


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    def write(config):
        folder = tmp_path_factory.mktemp("mtp") / "checkpoint"
        save_checkpoint(folder, dict(drawn(config)), "pangu", config)
        return folder

    return write


@pytest.fixture(scope="module")
def deepseek(checkpoint_of):
    return checkpoint_of(DEEPSEEK)


def check(found, tolerance=None):
    answers = found["answers"]
    for way in ("drafts", "warm", "oracle"):
        assert answers[way] == answers["plain"], way
    assert len({str(each) for each in answers["plain"]}) == len(answers["plain"])
    drafted, accepted = found["oracle"]
    assert drafted > 20 and 0.5 * drafted < accepted < drafted
    assert found["counts"][0] > 20 and found["has_mtp"] == [False, True]
    if tolerance:
        assert 0 < found["difference"] < tolerance and found["lengths"][-1] == 4


def test_two_layers_that_read_normed_states(deepseek):
    found = call(WORKER, "compared", str(deepseek), None, 4, 3, timeout=800)
    check(found, 2e-4)
    assert found["reused"] > 0
    assert found["cache_bytes"][0] == found["cache_bytes"][1]


def test_windows_sinks_convolutions_and_streams(checkpoint_of):
    found = call(WORKER, "compared", str(checkpoint_of(TWO)), None, 4, timeout=800)
    check(found)
    assert found["cache_bytes"][0] == found["cache_bytes"][1]


def test_a_published_model():
    check(call(WORKER, "compared", str(shared("golden_v3/pangu_ultra_moe/case_a")), None, 4, 3), 2e-4)


def test_narrow_weights(checkpoint_of):
    latent = dataclasses.replace(DEEPSEEK.latent, query_width=64)  # groups of 32 columns
    folder = checkpoint_of(
        dataclasses.replace(DEEPSEEK, **ONE_LAYER, num_mtp_layers=1, compute_dtype="bfloat16", latent=latent)
    )
    found = call(WORKER, "held_as", str(folder), "int4-g32", timeout=800)
    assert found["drafts"] == found["plain"] and found["drafted"] > 10


def test_a_mesh(deepseek, tmp_path):
    strategy, mesh = tmp_path / "mesh.yaml", "mesh: {pp: 2, tp: 2}\npipeline: {num_microbatches: 2}\n"
    strategy.write_text(f"{mesh}rules: {CONFIGS}/rules/experts.yaml\n")
    check(next(filter(None, call(WORKER, "compared", str(deepseek), str(strategy), processes=4))))


def test_layers_that_are_right_have_all_their_drafts_accepted(tmp_path):
    """The next token follows from the last one alone, in the model and in its layer of multi-token prediction."""
    config, weights = dataclasses.replace(ULTRA, **ONE_LAYER), {}
    for name, weight in drawn(config):
        is_output = name.endswith(("attention.output.weight", "down.weight"))
        weights[name] = np.zeros_like(weight) if is_output else np.ones_like(weight) if "norm" in name else weight
    order = np.random.default_rng(4).permutation(config.vocab_size)
    weights["head.weight"] = weights["embedding.word.weight"][order]
    weights["mtp.0.project.weight"] = np.eye(config.hidden_size, 2 * config.hidden_size, dtype=np.float32)
    save_checkpoint(tmp_path / "checkpoint", weights, "pangu", config)
    found = call(WORKER, "compared", str(tmp_path / "checkpoint"))
    check(found)
    drafted, accepted = found["counts"]
    assert accepted == drafted
