# SPDX-License-Identifier: Apache-2.0
"""End tokens that generation_config.json names end texts, wherever a model folder is read."""

import dataclasses
import json

import numpy as np
import pytest

from sporeloom.checkpoint.adapters import Adapter, write_adapter
from sporeloom.checkpoint.generation_config import end_tokens
from sporeloom.checkpoint.huggingface import export_published, import_published, open_published
from sporeloom.checkpoint.model_folder import load_config, save_checkpoint, write_config
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import write_hashes
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes

MODEL = dataclasses.replace(size_config("pangu", "tiny"), vocab_size=100, eod_id=9, stop_ids=(11,))


def folder_with(path, content, model=MODEL):
    path.mkdir(exist_ok=True)
    write_config(path, "pangu", model)
    if content is not None:
        (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def zeros(shapes):
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, (9, 11)),
        ({}, (9, 11)),
        ({"eos_token_id": None, "temperature": 0.6}, (9, 11)),
        ({"eos_token_id": []}, (9, 11)),
        ({"eos_token_id": 5}, (9, 11, 5)),
        ({"eos_token_id": 0}, (9, 11, 0)),
        ({"eos_token_id": [5, 9, 99, 5], "pad_token_id": 300}, (9, 11, 5, 99)),
        ({"eos_token_id": 9}, (9, 11)),
        ({"eos_token_id": [11, 9]}, (9, 11)),
    ],
)
def test_a_model_ends_at_its_own_and_at_those_tokens(tmp_path, content, expected):
    family, model = load_config(folder_with(tmp_path / "model", content))
    assert (family, model.end_ids, model.eod_id, model.loss_ignore_id) == ("pangu", expected, 9, MODEL.loss_ignore_id)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"eos_token_id": 100}, "100 is not a token of the model's vocabulary of 100"),
        ({"eos_token_id": -1}, "-1 is not a token"),
        ({"eos_token_id": [5, 100]}, "100 is not a token"),
        ({"eos_token_id": "</s>"}, "'</s>' is not a token"),
        ({"eos_token_id": 5.0}, "5.0 is not a token"),
        ({"eos_token_id": True}, "True is not a token"),
        ({"eos_token_id": [[5]]}, r"\[5\] is not a token"),
        ({"eos_token_id": {"id": 5}}, "is not a token"),
        ("[5]", "a mapping of keys is expected"),
        ("{", "not JSON"),
    ],
)
def test_what_is_no_token_is_named_with_file_and_key(tmp_path, content, said):
    folder = folder_with(tmp_path / "model", content)
    with pytest.raises(ConfigError, match=rf"model.generation_config.json.*{said}"):
        load_config(folder)


def test_adapters_end_at_their_models_tokens_and_at_their_own(tmp_path):
    base = folder_with(tmp_path / "base", {"eos_token_id": 5})
    weights = zeros(LoRAConfig().shapes(MODEL))
    write_adapter(tmp_path / "adapter", Adapter(LoRAConfig(), weights), "pangu", MODEL, base)
    assert load_config(tmp_path / "adapter")[1].end_ids == (9, 11, 5)
    (tmp_path / "adapter" / "generation_config.json").write_text('{"eos_token_id": [6, 5]}')
    assert load_config(tmp_path / "adapter")[1].end_ids == (9, 11, 5, 6)
    assert end_tokens(tmp_path / "nowhere", 100) == ()


@pytest.mark.parametrize(
    ("config", "content", "expected", "ignored"),
    [
        (45, {"eos_token_id": [45, 46]}, (45, 46), 45),
        (45, {"eos_token_id": 46}, (45, 46), 45),
        ([45, 47], {"eos_token_id": [46, 47]}, (45, 47, 46), 45),
        (45, None, (45,), 45),
        (None, {"eos_token_id": [46, 45]}, (46, 45), 46),
        (None, None, (9,), 6),
    ],
)
def test_a_published_folder_ends_where_it_says(tmp_path, config, content, expected, ignored):
    model = dataclasses.replace(size_config("pangu", "embedded_tiny"), num_layers=1, vocab_size=100)
    save_checkpoint(tmp_path / "ours", zeros(parameter_shapes(model)), "pangu", model)
    export_published(tmp_path / "ours", tmp_path / "published")
    path = tmp_path / "published" / "config.json"
    values = {**json.loads(path.read_text()), "eos_token_id": config}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    write_hashes(path.parent)
    if content is not None:
        (tmp_path / "published" / "generation_config.json").write_text(json.dumps(content))
    source = open_published(tmp_path / "published")
    assert (source.model.end_ids, source.model.loss_ignore_id) == (expected, ignored)
    import_published(source, tmp_path / "back")
    assert load_config(tmp_path / "back")[1].end_ids == expected
    assert json.loads((tmp_path / "back" / "config.json").read_text())["stop_ids"] == list(expected[1:])
    export_published(tmp_path / "back", tmp_path / "again")
    found = json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"]
    assert found == (list(expected) if len(expected) > 1 else expected[0])
