# SPDX-License-Identifier: Apache-2.0
"""What `sporeloom generate` refuses of stop tokens and bans, and where its texts end."""

import dataclasses
from types import SimpleNamespace

import pytest

from pangu.tokenizer import train_tokenizer
from sporeloom.checkpoint.model_folder import write_config
from sporeloom.core.errors import ConfigError
from sporeloom.inference.config import GenerateConfig, check
from sporeloom.inference.speculation_config import SpeculationFlags, speculation_problems
from sporeloom.models.family import size_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model with more tokens than its tokenizer, whose generation_config.json names an end."""
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.model").write_bytes(train_tokenizer(["小城在山脚下，一条河从城中穿过。"] * 20, 40))
    write_config(path, "pangu", dataclasses.replace(size_config("pangu", "tiny"), vocab_size=300, stop_ids=(11,)))
    (path / "generation_config.json").write_text('{"eos_token_id": [12, 9]}')
    return path


@pytest.fixture(scope="module")
def size(folder):
    count = check(GenerateConfig(checkpoint=folder), 1, []).tokenizer.vocab_size
    assert 20 < count < 300
    return count


def test_texts_end_at_the_tokens_of_every_source(folder):
    assert check(GenerateConfig(checkpoint=folder, stop_ids=(20, 11)), 1, []).stop_ids == [9, 11, 12, 20]


@pytest.mark.parametrize("way", ["stops", "bans", "both"])
def test_flags_that_leave_no_token_are_refused(folder, size, way):
    flags = {
        "stops": {"min_new_tokens": 1, "stop_ids": tuple(range(size))},
        "bans": {"banned_tokens": tuple(range(size))},  # of the tokenizer; the model has more
        "both": {"min_new_tokens": 2, "stop_ids": tuple(range(15, size)), "banned_tokens": tuple(range(15))},
    }[way]
    with pytest.raises(ConfigError, match="leave no token to choose"):
        check(GenerateConfig(checkpoint=folder, **flags), 1, [])
    most = {name: value[1:] if isinstance(value, tuple) else value for name, value in flags.items()}
    assert check(GenerateConfig(checkpoint=folder, **most), 1, [])


def test_without_a_minimum_every_token_may_end_a_text(folder, size):
    assert len(check(GenerateConfig(checkpoint=folder, stop_ids=tuple(range(size))), 1, []).stop_ids) == size


def test_drafts_that_cannot_be_taken_back_are_refused(folder):
    with pytest.raises(ConfigError, match="--speculate ngram drafts into the KV cache; leave out --no-cache"):
        check(GenerateConfig(checkpoint=folder, speculate="ngram", no_cache=True), 1, [])
    flags = SpeculationFlags(speculate="ngram")
    (problem,) = speculation_problems(flags, SimpleNamespace(has_convolutions=True))
    assert "convolutions" in problem and "leave it out" in problem
    assert speculation_problems(SpeculationFlags(), SimpleNamespace(has_convolutions=True)) == []
    assert speculation_problems(flags, SimpleNamespace(has_convolutions=False)) == []
