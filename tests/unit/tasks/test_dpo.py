# SPDX-License-Identifier: Apache-2.0
"""A resumed run compares with the reference log-probabilities that it began with, and with no other run's."""

from types import SimpleNamespace

import numpy as np
import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.tasks.dpo import DPO


def task(folder, *contents):
    """A task of two pairs with validation sets of three, named as their contents."""
    made = object.__new__(DPO)
    made.run = SimpleNamespace(config=SimpleNamespace(output_dir=folder))
    made.engine = SimpleNamespace(rank=0)
    made.pairs, made.num_samples = [None] * 2, 2
    made.sets = {f"set-{content}": SimpleNamespace(content=content, pairs=[None] * 3) for content in contents}
    made._sums = lambda pairs: np.full((len(pairs), 2), -1.5, np.float32)
    return made


def resumed(folder, state, *contents):
    made = task(folder, *contents)
    made.restore(state)
    made.begin(None, 1)
    return made


@pytest.fixture
def begun(tmp_path):
    """State of a run that began with the set `a`."""
    first = task(tmp_path, "a")
    first.begin(None, 0)
    return first.state()


def test_a_resumed_run_reads_what_it_began_with(begun, tmp_path):
    found = resumed(tmp_path, begun, "a")
    assert found.held_out["a"].tolist() == [[-1.5, -1.5]] * 3 and found.state() == begun


def test_a_set_that_the_run_began_without_is_refused_though_another_run_left_its_file(begun, tmp_path):
    for content in "bc":
        np.save(tmp_path / f"reference-{content}.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(ConfigError, match="began without this set") as error:
        resumed(tmp_path, begun, "a", "b", "c")
    assert [problem.split("=")[0] for problem in error.value.problems] == [
        "--validation-data set-b",
        "--validation-data set-c",
    ]


def test_a_set_may_be_left_out_and_given_again(begun, tmp_path):
    without = resumed(tmp_path, begun)
    assert without.held_out == {} and without.state() == begun
    assert list(resumed(tmp_path, without.state(), "a").held_out) == ["a"]


def test_a_run_of_an_earlier_release_has_no_hash_of_its_own_pairs(begun, tmp_path):
    assert resumed(tmp_path, {}).reference.shape == (2, 2)


def test_a_changed_file_is_refused(begun, tmp_path):
    np.save(tmp_path / "reference-a.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(ConfigError, match="its hash differs"):
        resumed(tmp_path, begun, "a")
