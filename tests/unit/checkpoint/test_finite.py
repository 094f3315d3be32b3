# SPDX-License-Identifier: Apache-2.0
"""Weights that are not finite, or not any more in the type they are written in, are refused by whatever reads them."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pangu.config import OPEN_PANGU
from pangu.weights import PUBLISHED
from sporeloom.checkpoint.compare import compare
from sporeloom.checkpoint.contents import WEIGHTS_ALONE
from sporeloom.checkpoint.convert import to_ours
from sporeloom.checkpoint.finite import describe, is_finite, narrow
from sporeloom.checkpoint.huggingface import (
    export_published,
    import_published,
    import_shards,
    open_published,
    read_published,
)
from sporeloom.checkpoint.manifest import read_manifest
from sporeloom.checkpoint.model_folder import load_weights, open_weights, save_checkpoint
from sporeloom.checkpoint.reshard import export, export_merged, reshard
from sporeloom.checkpoint.sharded import CheckpointReader, LocalTensor, damage, finish, write_parts
from sporeloom.checkpoint.tensor_hashes import seal
from sporeloom.checkpoint.upcycle import UpcycleJob, open_dense, upcycled, write_model
from sporeloom.core.errors import ConfigError
from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import parameter_shapes
from sporeloom.models.parts.experts import ExpertConfig
from sporeloom.models.weight_names import Name
from sporeloom.strategy.tensor_slice import TensorSlice

MODEL = ModelConfig(
    **OPEN_PANGU, vocab_size=32, hidden_size=8, num_layers=2, num_heads=2, ffn_hidden_size=12, tied_embedding=False
)
UP, DOWN = "layers.1.mlp.up.weight", "layers.0.mlp.down.weight"
THEIRS = {UP: "model.layers.1.mlp.up_proj.weight", DOWN: "model.layers.0.mlp.down_proj.weight"}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("size", [1, 3, 1 << 18, (1 << 18) + 1, 700_001])
def test_one_number_among_many(kind, size):
    info = ml_dtypes.finfo(kind)
    fine = np.zeros(size, kind)
    fine[: min(size, 4)] = [info.max, -info.max, info.smallest_subnormal, -0.0][: min(size, 4)]
    assert is_finite(fine)
    for bad in (np.nan, np.inf, -np.inf):
        for place in {0, size // 2, size - 1}:
            spoilt = fine.copy()
            spoilt[place] = bad
            assert not is_finite(spoilt), (bad, place)
            assert not is_finite(spoilt.reshape(1, -1).T)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float32),
        np.array(2.5),
        np.arange(9, dtype=np.int8),
        np.array([True]),
        np.float32(1).reshape(()),
    ],
)
def test_what_has_nothing_to_object_to(array):
    assert is_finite(array)


def test_what_is_said_of_a_tensor():
    value = np.zeros((3, 4), np.float32)
    value[1, 2], value[2, 0], value[2, 3] = np.inf, np.nan, -np.inf
    assert describe([value[:1], value[1:]], (3, 4)) == "1 NaN and 2 infinite of 12, the first at [1, 2]"
    assert describe([np.array(np.nan)], ()) == "1 NaN of 1, the first at []"
    assert describe([np.zeros(3)], (3,)) is None


TYPES = {  # (number, its type, another): whether that holds it. bfloat16 has float32's range but for the last half of a step
    (65504.0, "float32", "float16"): True,
    (65519.0, "float32", "float16"): True,  # rounds to 65504
    (65520.0, "float32", "float16"): False,
    (-7e4, "float32", "float16"): False,
    (3.39e38, "float32", "bfloat16"): True,
    (3.4e38, "float32", "bfloat16"): False,
    (3.4e38, "float64", "float32"): True,
    (1e39, "float64", "float32"): False,
    (-1e300, "float64", "bfloat16"): False,
    (65504.0, "float16", "bfloat16"): True,
    (3.3e38, "bfloat16", "float32"): True,
    (7e4, "bfloat16", "float16"): False,
    (1e300, "float64", "float64"): True,
}


@pytest.mark.parametrize("case", TYPES)
def test_a_type_that_is_too_narrow(case):
    number, kind, other = case
    kind, other = (BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in (kind, other))
    value = np.array([0.5, number]).astype(kind)
    if TYPES[case]:
        assert is_finite(narrow(value, other, "x"))
    else:
        with pytest.raises(ConfigError, match=r"the file: w: numbers up to \S+ do not fit into \w+, which ends at"):
            narrow(value, other, "the file: w")


def weights_of(model=MODEL, bad=()):
    draw = np.random.default_rng(0)
    made = {name: draw.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(model).items()}
    for name, value in bad:
        made[name].flat[-1] = value
    return made


def model_folder(folder, tensors, dtype=np.float32, files=1):
    """As `save_checkpoint` writes one, which itself refuses what is not finite."""
    save_checkpoint(folder, weights_of(), "pangu", MODEL)
    (folder / "model.safetensors").unlink()
    tensors = {name: value.astype(dtype) for name, value in tensors.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        seal(folder)
        return folder
    names = {name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    seal(folder)
    return folder


def published(folder, tensors):
    way = PUBLISHED[0]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(way.write(MODEL)))
    save_file(
        {theirs: tensors[parts[0].name] for theirs, parts in way.tensors(MODEL).items()}, folder / "model.safetensors"
    )
    return folder


def training_checkpoint(root, tensors, num_ranks=2):
    """Rows dealt out to ranks."""
    state = {WEIGHTS_ALONE: True}
    partial = root / ".step-00000001.partial"
    for rank in range(num_ranks):
        parts = {}
        for name, value in tensors.items():
            rows = slice(rank * len(value) // num_ranks, (rank + 1) * len(value) // num_ranks)
            parts[name] = LocalTensor(value[rows], (rows.start, *[0] * (value.ndim - 1)), value.shape)
        write_parts(partial, rank, parts)
    about = {"state": state, "model": {"family": "pangu", **MODEL.to_dict()}, "strategy": {}, "versions": {}}
    return finish(partial, root, num_ranks, 1, about)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("files", [1, 3])
def test_model_folders_name_every_tensor_of_every_file(dtype, files, value, tmp_path):
    folder = model_folder(tmp_path / "m", weights_of(bad=[(UP, value), (DOWN, value)]), dtype, files)
    kind = "NaN" if np.isnan(value) else "infinite"
    with pytest.raises(ConfigError) as error:
        load_weights(folder)
    for name, place in ((UP, [11, 7]), (DOWN, [7, 11])):
        assert f"{name} (1 {kind} of 96, the first at {place})" in str(error.value)
    assert str(folder / "model") in str(error.value)


def test_a_message_ends_somewhere(tmp_path):
    every = [(name, np.nan) for name in parameter_shapes(MODEL)]
    with pytest.raises(ConfigError) as error:
        load_weights(model_folder(tmp_path / "m", weights_of(bad=every)))
    assert len(error.value.problems) == 1 and f"and {len(every) - 8} more;" in error.value.problems[0]


def test_the_part_of_a_tensor_that_a_rank_holds(tmp_path):
    weights = open_weights(model_folder(tmp_path / "m", weights_of(bad=[(UP, np.nan)])))
    assert weights.read(UP, TensorSlice((0, 0), (12, 4))).shape == (12, 4)  # the other columns
    for part in (TensorSlice.full((12, 8)), TensorSlice((11, 0), (1, 8)), TensorSlice((0, 4), (12, 4))):
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up\.weight \(1 NaN of 96"):
            weights.read(UP, part)


def shards_of(model):
    return {
        name: [("rank-00000.safetensors", TensorSlice.full(shape))] for name, shape in parameter_shapes(model).items()
    }


def into_shards(source, target):
    import_shards(open_published(source), target, shards_of(MODEL), {})


def upcycle(source, target):
    dense = open_dense(source)
    write_model(UpcycleJob(dense, upcycled(dense, ExpertConfig(num_experts=2, experts_per_token=1)), 0.0, 0), target)


READERS = {  # name: (what is made of the bad weights, what then reads it)
    "convert": (published, lambda source, target: import_published(open_published(source), target)),
    "convert to bfloat16": (published, lambda source, target: import_published(open_published(source), target, "bfloat16")),
    "convert to shards": (published, into_shards),
    "convert whole": (published, lambda source, target: read_published(open_published(source))),
    "convert back": (model_folder, export_published),
    "upcycle a model": (model_folder, upcycle),
    "upcycle a checkpoint": (training_checkpoint, upcycle),
    "reshard": (training_checkpoint, lambda source, target: reshard(source, target, shards_of(MODEL), {})),
    "export": (training_checkpoint, lambda source, target: export(source, target, 10**9)),
    "load a training checkpoint": (training_checkpoint, lambda source, target: load_weights(source)),
}  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("case", READERS)
def test_whatever_reads_weights_refuses_them_and_leaves_nothing(case, value, tmp_path):
    make, read = READERS[case]
    source = make(tmp_path / "source", weights_of(bad=[(UP, value), (DOWN, value)]))
    with pytest.raises(ConfigError) as error:
        read(source, tmp_path / "target")
    for name in (UP, DOWN):
        assert (THEIRS[name] if make is published else name) in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("case", READERS)
def test_the_same_with_finite_weights_is_done(case, tmp_path):
    make, read = READERS[case]
    source = make(tmp_path / "source", weights_of(bad=[(UP, 3.3e38), (DOWN, -1e-44)]))
    before = {path.name for path in tmp_path.iterdir()}
    read(source, tmp_path / "target")  # refuses nothing, and leaves nothing but what it was asked for
    assert {path.name for path in tmp_path.iterdir()} - before <= {"target"}


def test_a_base_under_adapters(tmp_path):
    model_folder(tmp_path / "base", weights_of(bad=[(UP, np.nan)]))
    adapter = {
        f"base_model.model.layers.0.attention.query.lora_{end}.weight": np.ones((8, 8), np.float32) for end in "AB"
    }
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../base"}))
    for read in (load_weights, lambda folder: export_merged(folder, tmp_path / "out", 10**9)):
        with pytest.raises(ConfigError, match=r"base/model\.safetensors: not finite: layers\.1\.mlp\.up\.weight"):
            read(tmp_path / "adapter")


def test_a_training_checkpoint_is_damaged_and_can_still_be_compared(tmp_path):
    bad, fine = weights_of(bad=[(UP, np.nan)]), weights_of()
    folders = [training_checkpoint(tmp_path / name, tensors) for name, tensors in (("a", bad), ("b", fine))]
    manifests = [read_manifest(folder) for folder in folders]
    assert "rank-00001.safetensors: not finite: layers.1.mlp.up.weight (1 NaN of 48, the first at [5, 7])" in damage(
        folders[0], manifests[0]
    )
    assert damage(folders[1], manifests[1]) is None
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up\.weight"):
        CheckpointReader(folders[0], manifests[0]).read(UP, TensorSlice.full((12, 8)))
    (difference,) = compare(folders[0], manifests[0], folders[1], manifests[1])
    assert (difference.name, difference.count) == (UP, 1) and np.isnan(difference.largest)


def test_buffers_that_are_no_weights_are_not_looked_at(tmp_path):
    folder = published(tmp_path / "p", weights_of())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.array([np.inf, np.nan], np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert import_published(open_published(folder), tmp_path / "ours")


def test_a_cast_that_would_overflow_names_tensor_and_number(tmp_path):
    source = model_folder(tmp_path / "m", weights_of(bad=[(UP, 3.4e38)]))
    with pytest.raises(
        ConfigError,
        match=r"m/model\.safetensors: layers\.1\.mlp\.up\.weight: numbers up to 3\.4e\+38 do not fit into bfloat16",
    ):
        export_published(source, tmp_path / "out", dtype="bfloat16")
    export_published(source, tmp_path / "wide")
    wide = published(tmp_path / "wide64", {n: v.astype(np.float64) for n, v in weights_of().items()})
    tensors = load_file(wide / "model.safetensors")
    tensors[THEIRS[UP]][0, 0] = -1e39
    save_file(tensors, wide / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj\.weight: numbers up to 1e\+39 do not fit into float32"):
        import_published(open_published(wide), tmp_path / "ours")


def test_other_peoples_names(tmp_path):
    names = {"a.weight": Name("theirs", transposed=True), "b.weight": Name("others")}
    fine = {"theirs": np.ones((2, 3), np.float16), "others": np.ones(2), "adam_m.theirs": np.array([np.nan])}
    assert to_ours(fine, names, "w.npz")["a.weight"].shape == (3, 2)
    with pytest.raises(ConfigError, match=r"w\.npz: not finite: theirs \(1 infinite of 6, the first at \[1, 2\]\)"):
        to_ours({**fine, "theirs": np.float16([[1, 2, 3], [4, 5, np.inf]])}, names, "w.npz")
    with pytest.raises(ConfigError, match=r"w\.npz: others: numbers up to 1e\+200 do not fit into float32"):
        to_ours({**fine, "others": np.array([1.0, 1e200])}, names, "w.npz")


def test_what_a_run_ends_with_is_looked_at_before_it_is_written(tmp_path):
    save_checkpoint(tmp_path / "m", weights_of(), "pangu", MODEL)
    with pytest.raises(
        ConfigError, match=r"the weights to write: not finite: layers\.1\.mlp\.up\.weight \(1 NaN of 96"
    ):
        save_checkpoint(tmp_path / "m", weights_of(bad=[(UP, np.nan)]), "pangu", dataclasses.replace(MODEL))
    assert load_weights(tmp_path / "m").keys() == weights_of().keys()
