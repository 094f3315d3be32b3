# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.models.family import size_config
from sporeloom.planner.closed_forms import bytes_of_mask, job_of, optimizer_sharding
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.planner.dimensions import Dimensions, of_decoder, read_dimensions
from sporeloom.planner.report import strategy_file
from sporeloom.planner.search import (
    MIN_TOKENS,
    PlanRequest,
    describe,
    distinct,
    evaluate,
    search,
    smallest_changes,
    why_slower,
)
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask, task_memory
from sporeloom.strategy.checks import batch_problems, model_problems
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh

A100 = Cluster.of_chip("a100_80gb")


def gpt(num_layers, hidden_size, num_heads):
    return Dimensions(
        num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, vocab_size=51200, seq_len=2048
    )


PUBLISHED = [  # dimensions, cluster, devices, batch, published tp and pp
    (of_decoder(size_config("pangu", "200b")), Cluster.of_chip("ascend910a"), 2048, 2048, 8, 16),
    (gpt(105, 20480, 128), A100, 2240, 1920, 8, 35),
    (gpt(105, 20480, 128), A100, 3360, 1920, 8, 35),
    (gpt(24, 2304, 24), A100, 32, 512, 1, 1),
    (gpt(30, 3072, 32), A100, 64, 512, 2, 1),
    (gpt(80, 12288, 96), A100, 1536, 2304, 8, 8),
    (gpt(105, 20480, 128), A100, 2520, 2520, 8, 35),
    (gpt(128, 25600, 160), A100, 3072, 3072, 8, 64),
]


@pytest.mark.parametrize(("dims", "cluster", "devices", "batch", "tp", "pp"), PUBLISHED)
def test_published_choices_are_within_ten_percent_of_the_best(dims, cluster, devices, batch, tp, pp):
    request = PlanRequest(
        dims=dims,
        cluster=cluster,
        devices=devices,
        global_batch_size=batch,
        interleave=cluster is A100,
        own_graphs=False,
    )
    options = [option for option in search(request) if option.fits]
    published = next(o for o in options if (o.job.tp, o.job.pp) == (tp, pp))
    assert published.seconds <= 1.10 * options[0].seconds


def test_where_a_published_choice_is_not_the_reason_is_shown():
    request = PlanRequest(dims=gpt(48, 8192, 64), cluster=A100, devices=512, global_batch_size=1536, interleave=True)
    options = [option for option in search(request) if option.fits]
    published = next(o for o in options if (o.job.tp, o.job.pp) == (8, 2))
    assert why_slower(published, options[0]).startswith("tensor parallel +")


@pytest.fixture(scope="module")
def request_13b():
    dims = of_decoder(size_config("pangu", "13b"))
    return PlanRequest(dims=dims, cluster=Cluster.of_chip("ascend910b"), devices=64, global_batch_size=512)


def test_every_option_uses_all_devices_and_the_whole_batch(request_13b):
    options = search(request_13b)
    assert len(options) > 100
    for option in options:
        assert option.job.devices == 64
        assert option.job.global_batch_size == 512
    fitting = [option for option in options if option.fits]
    assert options[: len(fitting)] == fitting
    assert [o.seconds for o in fitting] == sorted(o.seconds for o in fitting)
    assert 0 < fitting[0].mfu <= fitting[0].hfu < 1
    assert len(distinct(fitting)) < len(fitting)


@pytest.mark.parametrize("place", [0, 5, 20, 60])
def test_a_planned_strategy_file_is_one_that_can_be_trained(request_13b, place, tmp_path):
    option = [option for option in search(request_13b) if option.fits][place]
    rules = tmp_path / "rules.yaml"
    rules.write_text("layers: [layers.*]\n")
    path = tmp_path / "plan.yaml"
    path.write_text(strategy_file(request_13b, option, rules.name))
    strategy = load_strategy(path)
    job = option.job
    assert (strategy.mesh.pp, strategy.mesh.dp, strategy.mesh.tp) == (job.pp, job.dp, job.tp)
    assert model_problems(strategy, size_config("pangu", "13b")) == []
    assert batch_problems(strategy, 512, 1024, 1 if job.pp > 1 else job.num_microbatches) == []
    assert strategy.sequence_parallel == job.sequence_parallel
    assert bool(strategy.optimizer_parallel) == bool(job.zero)
    assert (strategy.recompute.kind if strategy.recompute else "none") == job.recompute


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_of_microbatches_are_sharded_where_they_would_not_fit_whole(tmp_path, zero):
    model = size_config("pangu", "13b")
    dims, cluster = of_decoder(model), dataclasses.replace(Cluster.of_chip("ascend910b"), memory_gb=30)
    request = PlanRequest(
        dims=dims, cluster=cluster, devices=64, global_batch_size=256, reshard_after_forward=zero == 3
    )
    found = [
        o for o in search(request) if o.fits and o.job.zero == zero and o.job.num_microbatches > 1 and o.job.pp > 1
    ]
    less = {"zero": zero - 1, **({"weight_bytes": 2} if zero == 3 else {})}
    option = next(o for o in found if not evaluate(dims, dataclasses.replace(o.job, **less), cluster).fits)
    assert ("accumulated gradients sharded" if zero == 2 else "resharded after forward") in describe(option.job)
    (tmp_path / "rules.yaml").write_text("layers: [layers.*]\n")
    path = tmp_path / "plan.yaml"
    path.write_text(strategy_file(request, option, "rules.yaml"))
    again = job_of(load_strategy(path), dataclasses.replace(model, compute_dtype="bfloat16"), 256)
    for name in ("zero", "weight_bytes", "shards", "recompute", "num_microbatches", "own_graphs"):
        assert getattr(again, name) == getattr(option.job, name), name


def test_weights_are_gathered_twice_where_they_would_not_fit_whole(tmp_path):
    """As PaLM's, on 6144 devices of 32 GB."""
    model = dataclasses.replace(size_config("palm", "540b"), vocab_size=258048)
    cluster = dataclasses.replace(Cluster.of_chip("ascend910b"), memory_gb=32)
    request = PlanRequest(
        dims=of_decoder(model),
        cluster=cluster,
        devices=6144,
        global_batch_size=512,
        flash_attention=True,
        reshard_after_forward=True,
    )
    asked = (12, 1, 3, 1)
    option = next(
        o for o in search(request) if o.fits and (o.job.tp, o.job.pp, o.job.zero, o.job.num_microbatches) == asked
    )
    assert all(o.job.zero < 3 for o in search(dataclasses.replace(request, reshard_after_forward=False)))
    once = dataclasses.replace(option.job, **optimizer_sharding(True, False, "bf16"))
    assert not evaluate(request.dims, once, cluster).fits
    assert "resharded after forward" in describe(option.job)
    (tmp_path / "rules.yaml").write_text("layers: [layers.*]\n")
    path = tmp_path / "plan.yaml"
    path.write_text(strategy_file(request, option, "rules.yaml"))
    strategy = load_strategy(path)
    found = job_of(strategy, model, 512)
    for name in ("zero", "weight_bytes", "shards", "recompute", "global_batch_size"):
        assert getattr(found, name) == getattr(option.job, name), name
    assert model_problems(strategy, model) == []


def test_long_sequences_are_shared_out_and_so_is_the_file_that_is_written(tmp_path):
    model = dataclasses.replace(size_config("pangu", "embedded_7b"), seq_len=131072, compute_dtype="bfloat16")
    request = PlanRequest(
        dims=of_decoder(model),
        cluster=Cluster.of_chip("ascend910b"),
        devices=64,
        global_batch_size=8,
        flash_attention=True,
    )
    options = [option for option in search(request) if option.fits]
    best, whole = options[0], next(option for option in options if option.job.cp == 1)
    assert best.job.cp > 1 and best.job.devices == 64 and best.seconds < whole.seconds
    assert max(option.job.cp for option in options) <= 131072 // MIN_TOKENS
    (tmp_path / "rules.yaml").write_text("layers: [layers.*]\n")
    path = tmp_path / "plan.yaml"
    path.write_text(strategy_file(request, best, "rules.yaml"))
    strategy = load_strategy(path)
    assert (strategy.mesh.cp, strategy.mesh.size) == (best.job.cp, 64)
    assert model_problems(strategy, model) == []
    assert batch_problems(strategy, 8, 131072, 1 if best.job.pp > 1 else best.job.num_microbatches) == []
    sampling = dataclasses.replace(request, task=TrainedTask("grpo"))
    assert {option.job.cp for option in search(sampling)} == {1}


def test_recomputation_is_as_much_as_memory_asks_for(request_13b):
    small = dataclasses.replace(request_13b, cluster=dataclasses.replace(request_13b.cluster, memory_gb=24))
    partly = [o for o in search(small) if o.fits and o.job.recomputed_layers and any(o.job.recomputed_layers)]
    assert partly
    for option in partly[:20]:
        fewer = tuple(max(0, count - 1) for count in option.job.recomputed_layers)
        assert not evaluate(small.dims, dataclasses.replace(option.job, recomputed_layers=fewer), small.cluster).fits


def test_when_nothing_fits_the_smallest_changes_are_named(request_13b):
    request = dataclasses.replace(request_13b, devices=1, global_batch_size=8)
    options = search(request)
    assert not options[0].fits
    lines = smallest_changes(request, options)
    assert "GB too few" in lines[0]
    assert "devices with at least" in lines[1]
    assert any(line.startswith(("4 devices", "8 devices", "16 devices")) for line in lines)


def test_no_mesh_divides(request_13b):
    with pytest.raises(ConfigError, match="no dp x tp x pp = 7 divides the model"):
        search(dataclasses.replace(request_13b, devices=7, global_batch_size=3))


def test_the_first_ascend_is_planned_no_groups_that_mindspore_refuses_there():
    widths = {"num_heads": 12, "num_kv_heads": 12, "hidden_size": 768, "ffn_hidden_size": 3072, "vocab_size": 1536}
    dims, degrees = dataclasses.replace(of_decoder(size_config("pangu", "tiny")), **widths), {}
    for chip in ("ascend910a", "ascend910b"):
        cluster = Cluster.of_chip(chip)
        request = PlanRequest(dims=dims, cluster=cluster, devices=24, global_batch_size=24)
        degrees[chip] = {option.job.tp for option in search(request)}
    assert Cluster.of_chip("ascend910b").refuses(Mesh(dp=8, tp=3)) is None
    assert "tp 3: MindSpore refuses such groups on ascend910a" in Cluster.of_chip("ascend910a").refuses(
        Mesh(dp=8, tp=3)
    )
    assert degrees == {"ascend910a": {1, 2, 4}, "ascend910b": {1, 2, 3, 4, 6, 12}}


def test_cluster_and_dimension_files(write):
    cluster = read_cluster(write("c.yaml", "chip: ascend910a\ninter_node_gb_per_s: 6\n"))
    assert (cluster.inter_node_gb_per_s, cluster.memory_gb) == (6, 32)
    for text, words in (
        ("chip: ascend910\n", "chip ascend910 is not known; did you mean"),
        ("chip: h100\nmemory_gb: -1\n", "memory_gb must be above 0, got -1"),
        ("chip: h100\nmemory: 3\n", "memory is unknown; did you mean memory_gb?"),
        ("chip: h100\nmemory_gb: much\n", "memory_gb must be a number, got 'much'"),
        ("- 1\n", "a mapping of keys is expected"),
        ("a: [", "not YAML"),
    ):
        with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
            read_cluster(write("bad.yaml", text))
    with pytest.raises(ConfigError, match="vocab_size missing"):
        read_dimensions(write("d.yaml", "num_layers: 2\nhidden_size: 8\nnum_heads: 2\nseq_len: 4\n"))
    with pytest.raises(ConfigError, match="hidden_size 9 is not divisible by num_heads 2"):
        read_dimensions(write("d.yaml", "num_layers: 2\nhidden_size: 9\nnum_heads: 2\nseq_len: 4\nvocab_size: 5\n"))


@pytest.mark.parametrize("chip", ["ascend910a", "ascend910b"])
def test_a_plan_and_a_dry_run_of_its_file_have_the_same_memory(chip, tmp_path):
    """Of the options that fit, the best with each number of virtual stages, recomputed layers and all."""
    cluster = Cluster.of_chip(chip)
    config = dataclasses.replace(size_config("pangu", "13b"), compute_dtype="bfloat16")
    flash = cluster.flash_attention and config.attention_on_ascend == "flash"
    if not flash:
        config = dataclasses.replace(config, attention="plain")
    request = PlanRequest(
        dims=of_decoder(config),
        cluster=cluster,
        devices=128,
        global_batch_size=256,
        interleave=True,
        flash_attention=flash,
        mask_bytes=bytes_of_mask(flash),
        recomputations=("full",) if flash else ("selective", "full"),
    )
    fitting = [option for option in search(request) if option.fits and option.job.pp > 1]
    chosen = {(option.job.virtual_stages, option.job.recompute): option for option in reversed(fitting)}
    assert {virtual for virtual, _ in chosen} == {1, 2, 4}
    for option in chosen.values():
        path = tmp_path / "plan.yaml"
        path.write_text(strategy_file(request, option, "decoder"))
        strategy = load_strategy(path)
        job = job_of(strategy, config, option.job.global_batch_size)
        assert job.layers_of_parts == option.job.parts(config.num_layers)
        found, planned = task_memory(of_decoder(config), job, PLAIN_TEXT), option.memory
        for name in ("weights", "gradients", "optimizer", "activations", "working", "total"):
            assert [getattr(stage, name) for stage in found] == pytest.approx([getattr(s, name) for s in planned]), name
