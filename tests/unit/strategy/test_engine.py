# SPDX-License-Identifier: Apache-2.0
"""The setting that chooses who partitions, and where it is not there yet."""

import pytest
import yaml
from conftest import in_process

from sporeloom.errors import ConfigError
from sporeloom.strategy.checks import dry_run_problems
from sporeloom.strategy.loader import load_strategy, strategy_of
from sporeloom.strategy.text import strategy_text


def of(mesh, **settings):
    return strategy_of({"mesh": mesh, "engine": "spmd", **settings}, "s.yaml")


def test_without_the_key_it_is_spmd():
    without = strategy_of({"mesh": {"dp": 2}})
    assert without.engine is None and without.is_spmd and not without.by_mindspore().is_spmd
    assert strategy_of({"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}}).is_spmd
    assert not strategy_of({"mesh": {"dp": 1}}).is_spmd  # one device has nothing to shard
    assert not strategy_of({"mesh": {"dp": 2}, "engine": "mindspore"}).is_spmd


def test_a_written_strategy_keeps_it(write):
    path = write("s.yaml", strategy_text(of({"dp": 2, "tp": 2}), "decoder"))
    assert yaml.safe_load(path.read_text())["engine"] == "spmd"
    assert load_strategy(path).engine == load_strategy(path, for_inference=True).engine == "spmd"
    assert "engine" not in strategy_text(strategy_of({"mesh": {"dp": 2}}), "decoder")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": {"dp": 2}, "engine": "spdm"}, "spdm"),
    ],
)
def test_what_it_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        strategy_of(settings, "s.yaml")


def test_dry_runs_do_not_have_it():
    (problem,) = dry_run_problems(of({"dp": 2}))
    assert (
        problem.startswith("s.yaml:") and "engine: dry runs and certificates read MindSpore's own partition" in problem
    )
    for settings in ({}, {"engine": "mindspore"}):
        assert not dry_run_problems(strategy_of({"mesh": {"dp": 2}, **settings}))


@pytest.mark.parametrize("more", [(), ("explain", "query.weight")])
def test_a_dry_run_says_so(write, more):
    path = write("s.yaml", strategy_text(of({"dp": 2, "tp": 2}), "decoder"))
    outcome = in_process("tools/dry_run.py", *more, "--model", "pangu", "--size", "tiny", "--strategy", path)
    assert outcome.code == 2 and "engine: dry runs and certificates read" in outcome.output
