# SPDX-License-Identifier: Apache-2.0
"""Exported weights against the last state of a run on two ranks."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from sporeloom.checkpoint.sharded import LocalTensor, finish, write_parts
from sporeloom.train.audit_chain import Chain, ChainFile, digest, part_digests, state_of_parts
from sporeloom.train.audit_weights import verify_weights

VALUES = {"w": np.arange(8, dtype=np.float32).reshape(4, 2), "ema.w": np.ones((4, 2), np.float32)}
ABOUT = {"state": {}, "model": {}, "strategy": {}, "versions": {}}


@pytest.fixture
def run(tmp_path):
    """A run of 2 steps on two ranks, which share a tensor, and its averages."""
    ranks = [
        {name: LocalTensor(value[i : i + 2], (i, 0), value.shape) for name, value in VALUES.items()} for i in (0, 2)
    ]
    for rank, slices in enumerate(ranks):
        write_parts(tmp_path / "checkpoints" / ".partial", rank, slices)
    finish(tmp_path / "checkpoints" / ".partial", tmp_path / "checkpoints", 2, 2, ABOUT)
    settings, file = {"train": {"steps": 2}}, ChainFile(tmp_path, 0)
    first = state_of_parts([part_digests({"w": LocalTensor(-VALUES["w"], (0, 0), (4, 2))})])
    file.append({"step": 0, "start": settings, "state": first})
    file.append({"step": 1, "configuration": digest(settings)})
    state = state_of_parts([part_digests(slices) for slices in ranks])
    file.append({"step": 2, "configuration": digest(settings), "state": state, "saved": True})
    export(tmp_path, "checkpoint", VALUES["w"])
    export(tmp_path, "ema_checkpoint", VALUES["ema.w"])
    return tmp_path


def export(run, name, value):
    (run / name).mkdir(exist_ok=True)
    save_file({"w": value}, run / name / "model.safetensors")


def verify(run):
    chain = Chain.read(run)
    assert chain.problems == []
    return verify_weights(chain, run, "checkpoints")


def test_weights_are_compared_in_the_layout_of_the_ranks(run):
    found = verify(run)
    assert (found.differences, found.unknown) == ([], [])
    assert found.verified == [
        f"{run / name}: the weights after step 2, as recorded" for name in ("checkpoint", "ema_checkpoint")
    ]


@pytest.mark.parametrize("name", ["checkpoint", "ema_checkpoint"])
@pytest.mark.parametrize("value", [np.zeros((4, 2), np.float32), -VALUES["w"], VALUES["w"][:2]])
def test_other_weights_are_named_also_earlier_ones(run, name, value):
    export(run, name, value)
    assert verify(run).differences == [f"{run / name}: tensor w: not the content recorded after step 2"]


def test_without_the_checkpoint_checksums_are_compared(run):
    shutil.rmtree(run / "checkpoints")
    assert all("by checksums alone" in line for line in verify(run).verified)
    for other in (VALUES["w"] + 1, np.concatenate([VALUES["w"], np.zeros((1, 2), np.float32)])):
        export(run, "checkpoint", other)
        assert verify(run).differences == [f"{run / 'checkpoint'}: tensor w: not the content recorded after step 2"]


def test_weights_that_are_not_recorded_are_named(run):
    shutil.rmtree(run / "checkpoint")
    shutil.copytree(run / "ema_checkpoint", run / "best_checkpoint")
    found = verify(run)
    assert found.differences == [] and len(found.verified) == 1
    assert [line.partition(": ")[0] for line in found.unknown] == [
        str(run / "checkpoint"),
        str(run / "best_checkpoint"),
    ]
