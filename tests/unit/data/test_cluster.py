# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster makes what one process makes, byte for byte, also where workers are killed."""

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dying_work import Counted, make

from sporeloom.core.errors import ConfigError
from sporeloom.data.cluster import RayCluster, leave, over_batches
from sporeloom.data.decontaminate import DecontaminationSettings, make_decontaminator
from sporeloom.data.dedup import SignatureBatch, dedup
from sporeloom.data.filters import FilterRules, make_filter
from sporeloom.data.fim import FillInTheMiddle
from sporeloom.data.frames import read_frames, write_frames
from sporeloom.data.minhash import MinHash
from sporeloom.data.rewrite import rewrite
from sporeloom.data.sources import DocumentSource
from sporeloom.data.substrings import SubstringSettings, dedup_substrings
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.data.workers import WorkersLostError
from sporeloom.models.family import family_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORDS = [
    *("the", "town", "river", "hills", "mill", "grain", "farmers", "carts"),
    *("autumn", "market", "apples", "cheese", "honey", "bench", "stone", "weather"),
]


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Documents of all kinds in files of all kinds, in several shards."""
    folder, rng = tmp_path_factory.mktemp("documents"), random.Random(1)
    stock = [" ".join(rng.choices(WORDS, k=rng.randint(5, 120))) for _ in range(300)]
    for number in range(5):
        texts = [
            rng.choice(stock) + (f" {rng.random()}" if rng.random() < 0.5 else "") + " ".join(rng.choices(WORDS, k=30))
            for _ in range(400)
        ]
        texts += rng.choices(stock, k=100)
        lines = "".join(json.dumps({"text": text, "id": f"{number}/{i}"}) + "\n" for i, text in enumerate(texts))
        (folder / f"{number}.jsonl").write_text(lines + '{"no text": 1}\n' * (number == 3))
    return DocumentSource((folder,), on_error="skip", shard_mb=0.2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(family_module("pangu", "tokenizer").train_tokenizer([" ".join(WORDS)] * 50, 300))
    return path


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def filtered(source, out, workers):
    rules = FilterRules(min_chars=60, rules=("gopher-repetition",))
    work = partial(make_filter, source, rules, True, 5)
    return rewrite(source, out / "o.jsonl.gz", work, workers, out / "removed.jsonl", out / "samples.txt")


def decontaminated(source, out, workers):
    test = out.parent / "test.jsonl"
    test.write_text(
        json.dumps({"text": json.loads((source.inputs[0] / "1.jsonl").read_text().splitlines()[7])["text"]})
    )
    work = partial(make_decontaminator, source, (test,), ("text",), DecontaminationSettings(margin=5, min_piece=20))
    return rewrite(source, out / "o.jsonl", work, workers, out / "cuts.jsonl")


def deduplicated(source, out, workers):
    return dedup(source, out / "unique", MinHash(0.98), workers)


def cut(source, out, workers):
    return dedup_substrings(source, out / "o.jsonl", SubstringSettings(60, 20), workers, out / "cuts.jsonl")


@pytest.mark.parametrize("job", [filtered, decontaminated, deduplicated, cut])
def test_a_cluster_makes_the_same_bytes_as_one_process(ray, source, tmp_path, job, capsys):
    reports, contents = [], []
    assert len(source.shards()) > 2
    for name in ("alone", "cluster"):
        out = tmp_path / name
        out.mkdir()
        workers = 0 if name == "alone" else RayCluster(None, 2, tmp_path / "scratch")
        reports.append(job(source, out, workers))
        contents.append(files_of(out))
    assert reports[0] == reports[1]
    assert contents[0] == contents[1]
    assert any(len(content) > 1000 for content in contents[0].values())
    told = [line for line in capsys.readouterr().err.splitlines() if " shards" in line]
    assert f"[sporeloom] processed {len(source.shards())} shards, in " in told[0]


def test_tokens_are_the_same_and_middles_too(ray, source, tokenizer, tmp_path):
    job = TokenizeJob(source, "pangu", tokenizer, FillInTheMiddle(1, 2, 3, rate=0.5))
    tokenize(job, tmp_path / "alone", 0, show_progress=False)
    tokenize(job, tmp_path / "cluster", RayCluster(None, 2, tmp_path / "scratch"), show_progress=False)
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "cluster")


def named(tmp_path, count=6):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.md").write_text(f"document {number}")
    return DocumentSource((folder,), shard_mb=1e-6)


def test_a_killed_worker_costs_its_shard_only(ray, tmp_path):
    source = named(tmp_path)
    (tmp_path / "deaths").write_text("2")
    work, cluster = partial(make, str(tmp_path), "document 3"), RayCluster(None, 2, tmp_path / "scratch")
    results = list(over_batches(cluster, Counted, work, source))
    assert results == [Counted(number << 40, 1) for number in range(6)]
    done = (tmp_path / "done").read_text().splitlines()
    assert sorted(done) == sorted([*(f"document {n}" for n in range(6)), "document 3", "document 3"])


def test_after_a_shard_that_is_always_lost_the_others_are_not_done_again(ray, tmp_path):
    source = named(tmp_path)
    (tmp_path / "deaths").write_text("100")
    work, cluster = partial(make, str(tmp_path), "document 5"), RayCluster(None, 2, tmp_path / "scratch")
    with pytest.raises(WorkersLostError, match="a shard was lost 4 times"):
        list(over_batches(cluster, Counted, work, source))
    (tmp_path / "deaths").write_text("0")
    assert list(over_batches(cluster, Counted, work, source)) == [Counted(number << 40, 1) for number in range(6)]
    done = (tmp_path / "done").read_text().splitlines()
    assert [done.count(f"document {number}") for number in range(6)] == [1, 1, 1, 1, 1, 5]


def test_a_mistake_in_the_data_is_told_as_ever(ray, tmp_path):
    source = named(tmp_path)
    (source.inputs[0] / "2.jsonl").write_text("not json\n")
    with pytest.raises(ConfigError, match=r"2\.jsonl:1"):
        rewrite(
            source,
            tmp_path / "o.jsonl",
            partial(make_filter, source, FilterRules(min_chars=1), False),
            RayCluster(None, 2, tmp_path / "scratch"),
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_other_rules_or_another_file_of_the_users_are_other_work(ray, tmp_path):
    source, edit, cluster = named(tmp_path), tmp_path / "edit.py", RayCluster(None, 2, tmp_path / "scratch")
    found = []
    for number, body in enumerate(("text.upper()", "text.upper()", "text.title() + '!'")):
        if number != 1:
            edit.write_text(f"def edit(text):\n    return {body}\n")
        out = tmp_path / f"{number}.jsonl"
        rewrite(source, out, partial(make_filter, source, FilterRules(edit=edit), False), cluster)
        found.append(out.read_text())
    assert found[0] == found[1]
    assert ["DOCUMENT" in text for text in found] == [True, True, False]
    assert len(list(cluster.scratch.iterdir())) == 2


def test_results_are_read_as_they_were_written_and_nothing_else_is(tmp_path):
    pytest.importorskip("msgpack")
    keys = np.arange(12, dtype=np.uint64).reshape(3, 4)
    signed = SignatureBatch([b"one", b"\xff"], b"hash", keys, ["a problem"], Counter(empty=2, broken=0))
    with (tmp_path / "a.results").open("wb") as file:
        write_frames(file, [signed, signed])
    for found in read_frames(tmp_path / "a.results", SignatureBatch):
        assert (found.texts, found.hashes, found.problems, found.skipped) == (
            signed.texts,
            signed.hashes,
            signed.problems,
            signed.skipped,
        )
        assert found.keys.dtype == keys.dtype
        np.testing.assert_array_equal(found.keys, keys)
    with (tmp_path / "b.results").open("wb") as file, pytest.raises(TypeError, match="cannot be sent across a cluster"):
        write_frames(file, [SignatureBatch([], b"", keys, [], object())])


def test_what_is_done_and_the_cluster_are_left_behind_by_nobody(tmp_path):
    pytest.importorskip("ray")
    cluster = RayCluster(None, 2, tmp_path / "scratch")
    cluster.scratch.mkdir()
    leave(cluster)
    assert not cluster.scratch.exists()


def test_no_cluster_at_an_address_is_told(tmp_path):
    pytest.importorskip("ray")
    source, cluster = named(tmp_path), RayCluster("127.0.0.1:9", 2, tmp_path / "s")
    with pytest.raises(ConfigError, match=r"--address 127\.0\.0\.1:9: no Ray cluster there"):
        list(over_batches(cluster, Counted, partial(make, str(tmp_path), "x"), source))
