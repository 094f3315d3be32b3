# SPDX-License-Identifier: Apache-2.0
"""A resumed distillation samples as often as it did before."""

from types import SimpleNamespace

import pytest

from sporeloom.tasks.distill import Distill
from sporeloom.tasks.sft import SFT
from sporeloom.train.state import differences


def saved(monkeypatch, lmbda, length=64):
    """The settings of such a run that a checkpoint has."""
    monkeypatch.setattr(SFT, "data_state", lambda self: {"seed": 1})
    monkeypatch.setattr(Distill, "_settings", lambda self: {"beta": 0.5})
    made = object.__new__(Distill)
    made.run = SimpleNamespace(config=SimpleNamespace(lmbda=lmbda, max_completion_length=length))
    return made.data_state()


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ((0.5, 64), (0.5, 64), []),
        ((0.5, 64), (0.0, 64), ["lmbda was 0.5, is 0.0", "max_completion_length was 64, is None"]),
        ((0.0, 64), (0.5, 64), ["lmbda was 0.0, is 0.5", "max_completion_length was None, is 64"]),
        ((0.5, 64), (0.5, 32), ["max_completion_length was 64, is 32"]),
        ((0.0, 64), (0.0, 32), []),
    ],
)
def test_sampling_is_compared_where_there_is_any(monkeypatch, before, now, told):
    found = differences(saved(monkeypatch, *before), saved(monkeypatch, *now), both_ways=True)
    assert list(found) == told


def test_a_run_of_an_earlier_release_without_sampling_is_resumed(monkeypatch):
    assert not list(differences({"seed": 1, "beta": 0.5}, saved(monkeypatch, 0.0), both_ways=True))
