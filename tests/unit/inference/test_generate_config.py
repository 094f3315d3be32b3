# SPDX-License-Identifier: Apache-2.0
"""What `sporeloom generate` refuses of stop tokens, bans and drafts, and where its texts end."""

import dataclasses
import shutil

import pytest

from pangu.tokenizer import train_tokenizer
from sporeloom.checkpoint.model_folder import load_config, write_config
from sporeloom.core.errors import ConfigError
from sporeloom.inference.config import GenerateConfig, check
from sporeloom.inference.speculation_config import SpeculationFlags, read_draft, speculation_problems
from sporeloom.models.family import size_config
from sporeloom.serve import config as serve_config
from sporeloom.serve.config import ServeConfig
from sporeloom.strategy.loader import load_strategy


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


def test_drafts_by_layers_that_a_model_lacks_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"--speculate mtp: this model has no layers .*; use --speculate ngram"):
        check(GenerateConfig(checkpoint=folder, speculate="mtp"), 1, [])
    flags, model = SpeculationFlags(speculate="mtp"), size_config("pangu", "2_tiny")
    assert speculation_problems(flags, model) == []
    path = tmp_path / "strategy.yaml"
    path.write_text("mesh: {tp: 2}\nengine: mindspore\n")
    (problem,) = speculation_problems(flags, model, load_strategy(path, True))
    assert problem.startswith(f"{path}:2: engine: --speculate mtp") and problem.endswith("remove the line")
    serving = ServeConfig(checkpoint=folder, speculate="mtp", lora_modules=("a=b",), port=0)
    with pytest.raises(ConfigError, match="--speculate mtp drafts without adapters; leave it out"):
        serve_config.check(serving, 1)


def draft_folder(path, folder, **fields):
    path.mkdir()
    _, model = load_config(folder)
    write_config(path, "pangu", dataclasses.replace(model, **{"num_layers": 1, **fields}))
    shutil.copy(folder / "tokenizer.model", path)
    return path


def drafting(folder, draft, **flags):
    return GenerateConfig(checkpoint=folder, speculate="model", draft_model=draft, **flags)


def test_a_draft_model_is_read_with_the_flags_of_the_model(folder, tmp_path):
    path = draft_folder(tmp_path / "draft", folder)
    for weights in ("float32", "int8", "int4-g32"):
        draft = check(drafting(folder, path, weights=weights), 1, []).draft
        assert (draft.folder, draft.family, draft.model.num_layers, draft.weights) == (path, "pangu", 1, weights)
    assert check(GenerateConfig(checkpoint=folder, speculate="ngram"), 1, []).draft is None
    named = drafting(folder, path, tokenizer=folder / "tokenizer.model")
    assert check(named, 1, []).draft


def test_flags_of_drafts_that_need_each_other(folder):
    with pytest.raises(ConfigError, match="name its checkpoint folder with --draft-model"):
        check(drafting(folder, None), 1, [])
    for way in ("off", "ngram", "mtp"):
        with pytest.raises(ConfigError, match=f"is for --speculate model, got {way}; give both or none"):
            check(GenerateConfig(checkpoint=folder, speculate=way, draft_model=folder), 1, [])


def test_all_that_is_wrong_with_a_draft_model_is_reported_at_once(folder, tmp_path):
    path = draft_folder(tmp_path / "draft", folder, vocab_size=301)
    (path / "tokenizer.model").write_bytes(train_tokenizer(["春天的河边有一座小城。"] * 20, 30))
    with pytest.raises(ConfigError) as error:
        check(drafting(folder, path), 1, [])
    assert len(error.value.problems) == 2
    assert "its vocabulary has 301 tokens, the model's 300" in error.value.problems[0]
    assert (
        f"{path / 'tokenizer.model'} is another tokenizer than {folder / 'tokenizer.model'}" in error.value.problems[1]
    )
    (path / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.model is not there; a draft model needs the tokenizer"):
        check(drafting(folder, path), 1, [])
    with pytest.raises(ConfigError, match="there is no such checkpoint folder"):
        check(drafting(folder, tmp_path / "nowhere"), 1, [])


def test_a_tokenizer_that_is_no_file_of_the_family_is_not_compared(folder, tmp_path):
    path, elsewhere = draft_folder(tmp_path / "draft", folder), tmp_path / "released"
    elsewhere.mkdir()
    flags, target = SpeculationFlags(speculate="model", draft_model=path), load_config(folder)
    with pytest.raises(ConfigError, match=r"released/tokenizer\.model is not there, .* give --tokenizer FILE"):
        read_draft(flags, target, elsewhere, None, "float32")
    assert read_draft(flags, target, folder, None, "float32").folder == path


def test_a_draft_model_reads_texts_as_long_as_the_model_makes(folder, tmp_path):
    path = draft_folder(tmp_path / "draft", folder, seq_len=32)
    prompts = [("a", "小城"), ("b", "小城在山脚下")]
    longest = max(len(prompt.tokens) for prompt in check(GenerateConfig(checkpoint=folder), 1, prompts).prompts)
    assert check(drafting(folder, path, max_new_tokens=32 - longest), 1, prompts).draft
    with pytest.raises(ConfigError, match="context of 32 tokens is shorter than the 33 that a text may have; shorten"):
        check(drafting(folder, path, max_new_tokens=33 - longest), 1, prompts)
    with pytest.raises(ConfigError, match="than the 128 that a text may have; leave out --interactive, or another"):
        check(drafting(folder, path, interactive=True), 1)
    serving = {"checkpoint": folder, "speculate": "model", "draft_model": path, "port": 0}
    assert serve_config.check(ServeConfig(**serving, max_model_len=32), 1).draft.folder == path
    with pytest.raises(ConfigError, match="than the 128 that a text may have; give --max-model-len 32, or another"):
        serve_config.check(ServeConfig(**serving), 1)


def test_drafts_of_one_rank_need_this_packages_partitioner(folder, tmp_path):
    path = tmp_path / "strategy.yaml"
    path.write_text("mesh: {tp: 2}\nengine: mindspore\n")
    flags = SpeculationFlags(speculate="model", draft_model=folder)
    (problem,) = speculation_problems(flags, None, load_strategy(path, True))
    assert problem == (
        f"{path}:2: engine: --speculate model computes drafts on one rank alone, which MindSpore's partitioner does not "
        "allow; remove the line"
    )
    path.write_text("mesh: {tp: 2}\n")
    assert speculation_problems(flags, None, load_strategy(path, True)) == []
