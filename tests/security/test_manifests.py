# SPDX-License-Identifier: Apache-2.0
"""A checkpoint from elsewhere: what its manifest says is believed only where it can be true."""

import json

import numpy as np
import pytest

from sporeloom.checkpoint.contents import check_contents
from sporeloom.checkpoint.manifest import checkpoints, read_manifest
from sporeloom.checkpoint.model_folder import load_config, load_weights, write_config
from sporeloom.checkpoint.reshard import export, find_checkpoint, reshard
from sporeloom.checkpoint.sharded import LocalTensor, damage, file_name, finish, write_parts
from sporeloom.core.document import Document
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import write_hashes
from sporeloom.core.reader import fields_from
from sporeloom.models.family import size_config
from sporeloom.models.parameters import parameter_shapes
from sporeloom.strategy.tensor_slice import TensorSlice

SMALL = {"vocab_size": 40, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "seq_len": 6}


@pytest.fixture
def saved(tmp_path):
    """A complete checkpoint of a small model."""
    config = fields_from(type(size_config("pangu", "tiny")), Document("test", SMALL), size_config("pangu", "tiny"))
    shapes = {p + name: shape for p in ("", "adam_m.", "adam_v.") for name, shape in parameter_shapes(config).items()}
    rng = np.random.RandomState(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    partial = tmp_path / ".step-00000003.partial"
    write_parts(partial, 0, {name: LocalTensor(v, (0,) * v.ndim, v.shape) for name, v in tensors.items()})
    write_config(partial, "pangu", config)
    about = {
        "state": {"data": {}, "optimizer": {"name": "adamw"}, "schedule": {}},
        "model": {"family": "pangu", **config.to_dict()},
        "strategy": {},
        "versions": {},
    }
    return finish(partial, tmp_path, 1, 3, about)


def edit(folder, change):
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    write_hashes(folder)  # a liar can make these, too


def checked(folder):
    manifest = read_manifest(folder)
    check_contents(manifest, folder)
    assert damage(folder, manifest) is None


def test_a_good_one_is_good_and_opens_as_a_model(saved, tmp_path):
    checked(saved)
    family, config = load_config(saved)
    assert (family, config.hidden_size) == ("pangu", 8)
    weights = load_weights(saved)
    assert {name: v.shape for name, v in weights.items()} == parameter_shapes(config)
    export(saved, tmp_path / "model", 1 << 30)
    assert (tmp_path / "model" / "config.json").read_text() == (saved / "config.json").read_text()
    exported = load_weights(tmp_path / "model")
    assert all((exported[name] == value).all() for name, value in weights.items())
    whole = {name: [(file_name(0), TensorSlice.full(e.shape))] for name, e in read_manifest(saved).tensors.items()}
    reshard(saved, tmp_path / "whole", whole, {})
    assert load_config(tmp_path / "whole") == (family, config)
    assert load_weights(tmp_path / "whole").keys() == weights.keys()


def parts(values, name="embedding.word.weight"):
    return values["tensors"][name]["parts"]


def renamed(name):
    """The weights' file under another name, which the manifest follows."""

    def change(values):
        for tensor in values["tensors"].values():
            for part in tensor["parts"]:
                part["file"] = name
        values["files"] = {name: next(iter(values["files"].values()))}

    return change


def wrong(*keys, value):
    def change(values):
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


def without(*keys):
    def change(values):
        for key in keys[:-1]:
            values = values[key]
        del values[keys[-1]]

    return change


def doubled(values):
    """Two parts over the same half: the numbers of entries and the sums of hashes are right."""
    entry = values["tensors"]["embedding.word.weight"]
    part = {**entry["parts"][0], "shape": [20, 8], "hash": "0" * 16}
    entry["parts"] = [{**part, "hash": entry["hash"]}, part]


FIRST = ("tensors", "embedding.word.weight")
LIES = {
    "a path upwards": (renamed("../../outside.safetensors"), "is not a file of this folder"),
    "an absolute path": (renamed("/etc/passwd"), "is not a file of this folder"),
    "a folder below": (renamed("a/b.safetensors"), "is not a file of this folder"),
    "a hidden file": (renamed(".hidden"), "is not a file of this folder"),
    "a NUL": (renamed("a\0b"), "is not a file of this folder"),
    "a file that is not listed": (lambda v: parts(v)[0].update(file="other.safetensors"), "is not among the files"),
    "no tensors": (wrong("tensors", value={}), "embedding.word.weight (40, 8) is missing"),
    "tensors null": (wrong("tensors", value=None), "tensors must be a mapping"),
    "tensors a list": (wrong("tensors", value=[]), "tensors must be a mapping"),
    "a weight missing": (without("tensors", "final_norm.bias"), "final_norm.bias (8,) is missing"),
    "a moment missing": (without("tensors", "adam_v.final_norm.bias"), "adam_v.final_norm.bias (8,) is missing"),
    "a tensor too many": (
        lambda v: v["tensors"].update(x=v["tensors"]["final_norm.bias"]),
        "x does not belong to the model",
    ),
    "another dtype": (wrong(*FIRST, "dtype", value="float16"), "is float16 (40, 8); the model's is float32 (40, 8)"),
    "no dtype": (wrong(*FIRST, "dtype", value="object"), "dtype 'object'"),
    "another hidden size": (wrong("model", "hidden_size", value=16), "the model's is float32"),
    "another number of layers": (wrong("model", "num_layers", value=3), "is missing"),
    "a model that is none": (wrong("model", "num_heads", value=3), "hidden_size 8 is not divisible by num_heads 3"),
    "an unknown family": (wrong("model", "family", value="gpt"), "model.family is 'gpt'"),
    "no family": (wrong("model", value={}), "model.family is None"),
    "step null": (wrong("step", value=None), "step must be a whole number, got None"),
    "step true": (wrong("step", value=True), "step must be a whole number, got True"),
    "a negative step": (wrong("step", value=-1), "step must be a whole number, got -1"),
    "no step": (without("step"), "step is missing"),
    "an unknown key": (wrong("more", value=1), "more is unknown"),
    "no state": (wrong("state", value={}), "state.data is missing"),
    "a state of another kind": (wrong("state", value=3), "state must be a mapping"),
    "a short hash": (wrong(*FIRST, "hash", value="0"), "'0' is not a hash of 16 digits"),
    "a hash of other letters": (wrong(*FIRST, "hash", value="g" * 16), "is not a hash of 16 digits"),
    "a hash that is a number": (wrong(*FIRST, "hash", value=3), "3 is not a hash of 16 digits"),
    "a hash that is another's": (wrong(*FIRST, "hash", value="1" * 16), "the hashes of its parts do not add up"),
    "a negative shape": (wrong(*FIRST, "shape", value=[-40, -8]), "is not a shape"),
    "a shape of texts": (wrong(*FIRST, "shape", value=["40", 8]), "is not a shape"),
    "a part outside": (lambda v: parts(v)[0].update(start=[20, 0]), "lies outside of (40, 8)"),
    "a part of other dims": (lambda v: parts(v)[0].update(start=[0], shape=[320]), "lies outside of (40, 8)"),
    "parts that overlap": (doubled, "its parts overlap"),
    "parts null": (wrong(*FIRST, "parts", value=None), "parts must be a list"),
    "a part null": (wrong(*FIRST, "parts", value=[None]), "not the entry of a part"),
    "an entry null": (wrong(*FIRST, value=None), "not the entry of a tensor"),
    "sizes of texts": (lambda v: v["files"].update(dict.fromkeys(v["files"], "1")), "must have a number of bytes"),
    "another format": (wrong("format", value="x"), "not a manifest of a training checkpoint"),
    "another version": (wrong("version", value=9), "format version 9"),
}


@pytest.mark.parametrize(("change", "words"), LIES.values(), ids=LIES)
def test_a_manifest_that_cannot_be_true_is_refused_in_clear_lines(saved, change, words):
    edit(saved, change)
    with pytest.raises(ConfigError) as caught:
        checked(saved)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
    assert all(str(saved) in p and "\n" not in p and len(p) < 600 for p in caught.value.problems[:1])


TEXTS = {
    "deep": "[" * 200_000,
    "null": "null",
    "a list": "[]",
    "half": '{"format": "mind',
    "NaN": '{"format": NaN}',
    "a key twice": '{"format": 1, "format": 2}',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_manifest_that_is_none(saved, text):
    (saved / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    write_hashes(saved)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        read_manifest(saved)


def test_a_file_outside_is_not_even_looked_at(saved, tmp_path):
    (tmp_path.parent / "outside.safetensors").write_bytes(next(saved.glob("*.safetensors")).read_bytes())
    edit(saved, renamed("../../outside.safetensors"))
    for work in (read_manifest, load_weights, lambda folder: export(folder, tmp_path / "x", 1 << 30)):
        with pytest.raises(ConfigError, match="is not a file of this folder"):
            work(saved)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", ".hidden", 3, None])
def test_an_index_that_leads_elsewhere(write, name):
    path = write("model/model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=r"index\.json"):
        load_weights(path.parent)


def test_stray_folders_are_no_checkpoints(saved, tmp_path):
    for name in ("step-old", "step-1", "step-00000099.bak", "steps", ".step-00000098.1.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000097").write_text("a file")
    assert checkpoints(tmp_path) == [saved]
    assert find_checkpoint(tmp_path) == saved
