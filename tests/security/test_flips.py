# SPDX-License-Identifier: Apache-2.0
"""One flipped bit anywhere in a folder of ours is noticed, by `checkpoint-info --verify` and by whatever reads the folder."""

import hashlib
import json
import random
import shutil

import numpy as np
import pytest
from conftest import ROOT, in_process

from codegeex.config import GLM
from codegeex.tokenizer import train_tokenizer
from sporeloom.checkpoint.adapters import Adapter, read_adapter, write_adapter
from sporeloom.checkpoint.contents import check_contents
from sporeloom.checkpoint.huggingface import export_published, import_published, import_shards, open_published
from sporeloom.checkpoint.manifest import read_manifest
from sporeloom.checkpoint.model_folder import load_config, load_weights, save_checkpoint, write_config
from sporeloom.checkpoint.reshard import export, reshard
from sporeloom.checkpoint.sharded import LocalTensor, damage, file_name, finish, write_parts
from sporeloom.checkpoint.upcycle import open_dense
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import HASHES, write_hashes
from sporeloom.data.sources import DocumentSource
from sporeloom.data.token_file import TokenFile
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.data.tokenizer import folder_tokenizer, open_tokenizer
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.config import ModelConfig
from sporeloom.models.config_file import config_with_file
from sporeloom.models.parameters import parameter_shapes
from sporeloom.strategy.tensor_slice import TensorSlice

FLIPS = 12
"""Of each file, besides one in its first and one in its last byte."""
TEXT = ROOT / "examples" / "small_town.txt"
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "head_dim": 8, "ffn_hidden_size": 32, "seq_len": 8}
FAMILY = "codegeex"


def drawn(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def whole_in_one_file(shapes):
    return {name: [(file_name(0), TensorSlice.full(shape))] for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind that is written here, all of one small model."""
    root = tmp_path_factory.mktemp("folders")
    vocabulary = root / "tokenizer.json"
    vocabulary.write_bytes(train_tokenizer([TEXT.read_text(encoding="utf-8")], 400))
    tokenizer = open_tokenizer(FAMILY, vocabulary)
    ids = {"vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id, "loss_ignore_id": tokenizer.eod_id}
    model = ModelConfig(**GLM, **SIZES, **ids, num_kv_heads=2, tied_embedding=False, rope_dim=4)

    def add_files(folder):
        tokenizer.save(folder)
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        (folder / "generation_config.json").write_text('{"eos_token_id": 3}')

    shapes = parameter_shapes(model)
    save_checkpoint(root / "model", drawn(shapes), FAMILY, model, add_files)
    export_published(root / "model", root / "published")
    published = open_published(root / "published")
    import_published(published, root / "converted", "bfloat16")
    import_shards(published, root / "start", whole_in_one_file(shapes), {"dp": 1})
    lora = LoRAConfig(r=2)
    write_adapter(root / "adapter", Adapter(lora, drawn(lora.shapes(model))), FAMILY, model, root / "model", add_files)
    tokenize(TokenizeJob(DocumentSource((TEXT,)), FAMILY, vocabulary), root / "tokens", workers=0)
    partial = root / "states" / ".step-00000003.partial"
    moments = {p + name: shape for p in ("", "adam_m.", "adam_v.") for name, shape in shapes.items()}
    write_parts(partial, 0, {name: LocalTensor(v, (0,) * v.ndim, v.shape) for name, v in drawn(moments).items()})
    write_config(partial, FAMILY, model)
    add_files(partial)
    schedule = {"learning_rate": 0.001, "min_learning_rate": 0.0001, "warmup_steps": 5, "decay_steps": 50}
    about = {"state": {"data": {}, "optimizer": {"name": "adamw"}, "schedule": schedule}}
    about |= {"model": {"family": FAMILY, **model.to_dict()}, "strategy": {"dp": 1}, "versions": {"numpy": "1"}}
    finish(partial, root / "states", 1, 3, about).rename(root / "state")
    reshard(root / "state", root / "resharded", whole_in_one_file(moments), {})
    export(root / "state", root / "exported", 1 << 14)  # several files and their index
    return root


def read_state(folder):
    manifest = read_manifest(folder)
    check_contents(manifest, folder)
    if problem := damage(folder, manifest):
        raise ConfigError(problem)


def read_model(folder):
    family, model = load_config(folder)
    load_weights(folder)
    folder_tokenizer(family, folder, model)


def read_tokens(folder):
    TokenFile(folder)
    open_tokenizer(FAMILY, folder / "tokenizer.json")


READERS = {
    "model": (read_model, open_dense),
    "converted": (read_model,),
    "exported": (read_model,),
    "published": (open_published,),
    "adapter": (read_model, lambda folder: read_adapter(folder, *load_config(folder))),
    "tokens": (read_tokens,),
    "state": (read_state, read_model, open_dense),
    "resharded": (read_state,),
    "start": (read_state, read_model),
}


def is_refused(read, folder):
    try:
        read(folder)
    except ConfigError as error:
        return str(folder) in error.problems[0]
    return False


def verified(folder):
    return in_process("tools/checkpoint_info.py", folder, "--verify")


@pytest.mark.parametrize("kind", READERS)
def test_every_flipped_bit_is_noticed(folders, tmp_path, kind):
    folder = tmp_path / kind
    shutil.copytree(folders / kind, folder)
    shutil.copytree(folders / "model", tmp_path / "model", dirs_exist_ok=True)  # of the adapters
    assert verified(folder).code == 0
    for read in READERS[kind]:
        read(folder)
    random_ = random.Random(kind)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert HASHES in map(str, names) and len(names) > 2
    missed = []
    for name in names:
        content = (folder / name).read_bytes()
        places = [0, len(content) - 1, *(random_.randrange(len(content)) for _ in range(FLIPS))]
        for number, place in enumerate(places):
            bit = 1 << random_.randrange(8)
            (folder / name).write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            missed += [(str(name), place, bit) for read in READERS[kind] if not is_refused(read, folder)]
            if number % 9 == 0:
                outcome = verified(folder)
                assert outcome.code == 2 and "Traceback" not in outcome.output, outcome.output
        (folder / name).write_bytes(content)
    assert missed == []
    assert verified(folder).code == 0


@pytest.mark.parametrize("kind", READERS)
def test_a_lost_or_cut_file_is_noticed(folders, tmp_path, kind):
    folder = tmp_path / kind
    shutil.copytree(folders / kind, folder)
    shutil.copytree(folders / "model", tmp_path / "model", dirs_exist_ok=True)
    for path in [path for path in folder.iterdir() if path.name != HASHES]:
        content = path.read_bytes()
        path.unlink()
        assert verified(folder).code == 2, path
        path.write_bytes(content[: len(content) // 2])
        assert verified(folder).code == 2, path
        path.write_bytes(content)
    assert verified(folder).code == 0


def test_what_a_person_is_told_who_edited_a_file_on_purpose(folders, tmp_path):
    """The message has the command; after it the edit counts."""
    for kind in ("model", "state"):
        folder = tmp_path / kind
        shutil.copytree(folders / kind, folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "seq_len": 7}))
        with pytest.raises(ConfigError) as caught:
            load_config(folder)
        assert caught.value.problems[0].startswith(f"{folder / 'config.json'}: ")
        assert caught.value.problems[1].endswith(f"sporeloom checkpoint-info {folder} --accept-changes")
        with pytest.raises(ConfigError):
            config_with_file(folder / "config.json", load_config(folders / kind)[1], FAMILY)
        outcome = in_process("tools/checkpoint_info.py", folder, "--accept-changes")
        assert outcome.code == 0, outcome.output
        assert load_config(folder)[1].seq_len == 7
        assert verified(folder).code == 0


def test_changes_that_cannot_be_are_not_accepted(folders, tmp_path):
    folder = tmp_path / "state"
    shutil.copytree(folders / "state", folder)
    weights = folder / file_name(0)
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    outcome = in_process("tools/checkpoint_info.py", folder, "--accept-changes")
    assert outcome.code == 2 and "the content is not what was written" in outcome.output
    weights.write_bytes(content)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace('"step": 3', '"step": -3'))
    outcome = in_process("tools/checkpoint_info.py", folder, "--accept-changes")
    assert outcome.code == 2 and "step must be a whole number" in outcome.output


def test_without_hashes_a_published_folder_is_read_and_a_checkpoint_is_not(folders, tmp_path):
    for kind in ("model", "published", "adapter", "tokens", "state"):
        shutil.copytree(folders / kind, tmp_path / kind)
        (tmp_path / kind / HASHES).unlink()
    open_published(tmp_path / "published")
    read_model(tmp_path / "model")
    read_model(tmp_path / "adapter")
    read_tokens(tmp_path / "tokens")
    for read in READERS["state"]:
        with pytest.raises(ConfigError, match=r"hashes\.json: missing.*--accept-changes"):
            read(tmp_path / "state")
    assert in_process("tools/checkpoint_info.py", tmp_path / "state", "--accept-changes").code == 0
    read_state(tmp_path / "state")


LIES = {
    "a path upwards": {"../outside": {"bytes": 1, "sha256": "0"}},
    "an absolute path": {"/etc/passwd": {"bytes": 1, "sha256": "0"}},
    "a hidden file": {".hidden": {"bytes": 1, "sha256": "0"}},
    "a NUL": {"a\0b": {"bytes": 1, "sha256": "0"}},
    "nothing before a slash": {"a//b": {"bytes": 1, "sha256": "0"}},
    "no hash": {"config.json": {"bytes": 1}},
    "no size": {"config.json": {"sha256": "0"}},
    "a size that is a text": {"config.json": {"bytes": "1", "sha256": "0"}},
    "a size that is true": {"config.json": {"bytes": True, "sha256": "0"}},
    "a hash that is none": {"config.json": {"bytes": 1, "sha256": None}},
    "tensors that are a list": {"model.safetensors": {"bytes": 1, "header": "0", "tensors": []}},
    "tensors without hashes": {"model.safetensors": {"bytes": 1, "header": "0", "tensors": {"a": 1}}},
    "more keys": {"config.json": {"bytes": 1, "sha256": "0", "more": 1}},
    "an entry that is a text": {"config.json": "0"},
    "a list": ["config.json"],
    "null": None,
}


@pytest.mark.parametrize("files", LIES.values(), ids=LIES)
def test_hashes_that_lie_are_refused_in_one_line_and_open_no_file_outside(folders, tmp_path, files, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(folders / "model", folder)
    before = json.dumps({"format": "sporeloom-hashes", "version": 1, "files": files}, indent=1).removesuffix("\n}")
    seal = hashlib.sha256(before.encode()).hexdigest()
    (folder / HASHES).write_text(f'{before},\n "sha256": "{seal}"\n}}\n')
    with pytest.raises(ConfigError, match=r"hashes\.json: not a list of hashes of the files of this folder"):
        load_config(folder)


def test_the_format_is_as_documented(tmp_path):
    """Made by hand from what docs/reference/checkpoint_format.md says."""
    (tmp_path / "a.txt").write_bytes(b"hello\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.bin").write_bytes(bytes(range(256)))
    (tmp_path / ".hidden").write_bytes(b"x")
    write_hashes(tmp_path)
    entries = {"a.txt": b"hello\n", "b/c.bin": bytes(range(256))}
    files = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in entries.items()}
    before = json.dumps({"format": "sporeloom-hashes", "version": 1, "files": files}, indent=1).removesuffix("\n}")
    assert (
        tmp_path / HASHES
    ).read_text() == f'{before},\n "sha256": "{hashlib.sha256(before.encode()).hexdigest()}"\n}}\n'


@pytest.mark.parametrize("kind", ["model", "state"])
def test_files_that_were_put_there_later_are_named(folders, tmp_path, kind):
    """Some are read, such as a template, and --verify does not vouch for them."""
    folder = shutil.copytree(folders / kind, tmp_path / kind)
    (folder / "notes.txt").write_text("{}")
    outcome = in_process("tools/checkpoint_info.py", folder, "--verify")
    assert outcome.code == 0
    assert outcome.output.endswith("  notes.txt: has no hash; it was put here later\n")


def test_a_model_folder_without_hashes_cannot_be_verified(folders, tmp_path):
    folder = shutil.copytree(folders / "model", tmp_path / "model")
    (folder / HASHES).unlink()
    outcome = in_process("tools/checkpoint_info.py", folder, "--verify")
    assert outcome.code == 2 and "there is no hashes.json" in outcome.output and "--accept-changes" in outcome.output
    assert in_process("tools/checkpoint_info.py", folder, "--accept-changes").code == 0
    assert in_process("tools/checkpoint_info.py", folder, "--verify").code == 0
