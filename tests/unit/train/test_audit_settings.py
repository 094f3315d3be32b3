# SPDX-License-Identifier: Apache-2.0
"""A chain of somebody else: settings that no run can have written are refused before anything runs with them."""

import pytest

from sporeloom.cli.audit import main
from sporeloom.core.errors import ConfigError
from sporeloom.train import audit
from sporeloom.train.audit_chain import Chain, ChainFile
from sporeloom.train.audit_settings import AUDITABLE, settings_problems

SETTINGS = {
    "verb": "train",
    "folder": "/runs",
    "train": {"data": "text.txt", "steps": 6, "audit_every": 2, "tokenizer": None},
    "model": {},
    "strategy": {"mesh": {"dp": 1, "tp": 1, "order": ["dp", "tp"]}},
    "resolved": {},
    "versions": {"mindspore": "2", "numpy": "2"},
    "data": {},
}


def chain_of(folder, **changes):
    ChainFile(folder, 0).append({"step": 0, "start": {**SETTINGS, **changes}, "state": {"w": "0"}})
    chain = Chain.read(folder)
    assert chain.problems == []
    return chain


def test_the_settings_of_a_run_are_accepted(tmp_path):
    assert settings_problems(chain_of(tmp_path)) == []
    assert not any(config.samples_texts for config in AUDITABLE.values())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"verb": "grpo"}, "start.verb is 'grpo', which does not run again"),
        ({"verb": ["train"]}, "start.verb is"),
        ({"verb": None}, "start.verb is None"),
        (
            {"train": {**SETTINGS["train"], "reward": ["evil.py:f"]}},
            "start.train.reward: `sporeloom train` has no such",
        ),
        ({"train": {**SETTINGS["train"], "run": "other.json"}}, "start.train.run: `sporeloom train` has no such flag"),
        ({"train": {**SETTINGS["train"], "audit_every": 0}}, "start.train.audit_every is 0"),
        ({"train": {**SETTINGS["train"], "audit_every": True}}, "start.train.audit_every is True"),
        ({"train": {**SETTINGS["train"], "tokenizer": 3}}, "start.train.tokenizer is 3, not a path"),
        ({"train": {"steps": 6, "audit_every": 2}}, "start.train.data is None, not a path"),
        ({"train": []}, "start.train is not a mapping"),
        ({"strategy": {"mesh": {"dp": "2"}}}, "start.strategy.mesh is not a mapping of axes"),
        ({"versions": {"evil": "1"}}, "start.versions.evil: unknown"),
    ],
)
def test_other_settings_are_refused(tmp_path, changes, problem):
    (found,) = settings_problems(chain_of(tmp_path, **changes))
    assert problem in found and found.startswith(f"{tmp_path / 'audit.jsonl'}: step 0: ")


def test_nothing_runs_with_refused_settings(tmp_path, monkeypatch):
    def run(*words, **options):
        raise AssertionError(words)

    monkeypatch.setattr(audit.subprocess, "run", run)
    train = {"data": "text.txt", "audit_every": 0, "reward": ["evil.py:f"]}
    chain_of(tmp_path, verb="grpo", train=train)
    with pytest.raises(ConfigError, match="verb is 'grpo', which does not run again; known: train, sft"):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    "record",
    [
        '{"step": 0, "start": [], "hash": "0"}',
        '{"step": 0, "state": 1, "hash": "0"}',
        '{"step": 0, "state": {"w": 1}, "hash": "0"}',
        "[]",
    ],
)
def test_a_line_that_is_not_a_record_is_named(tmp_path, record):
    (tmp_path / "audit.jsonl").write_text(record + "\n")
    assert "not a record" in Chain.read(tmp_path).problems[0]
