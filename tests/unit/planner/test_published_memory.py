# SPDX-License-Identifier: Apache-2.0
"""Memory of published runs: each fact about an engine against bytes written out here, and the recorded errors."""

import dataclasses
import importlib
import math

import pytest
from conftest import ROOT, shared

from sporeloom.models.adapters import LoRAConfig
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.errors import GB, MEMORY_ERRORS, MemoryInterval, NoInterval, memory_errors, memory_interval
from sporeloom.planner.memory import stage_memory
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parameters import expert_parameters, stage_parameters
from sporeloom.planner.published import PublishedRun, describe, read_rows
from sporeloom.planner.published_experts import describe_experts, read_expert_rows
from sporeloom.planner.published_memory import ENGINES, engine_of, engine_stages, run_memory
from sporeloom.planner.recipe_memory import layer_bytes
from sporeloom.planner.recipes import recipes
from sporeloom.planner.report import as_dict, strategy_file, table
from sporeloom.planner.search import PlanRequest, search
from sporeloom.planner.task import PLAIN_TEXT, TrainedTask
from sporeloom.planner.validate import validate

H, V, S, L = 1024, 50_000, 2048, 8
DIMS = Dimensions(num_layers=L, hidden_size=H, num_heads=16, vocab_size=V, seq_len=S)
EXPERTS = dataclasses.replace(DIMS, num_experts=4, experts_per_token=1, expert_layers=L, expert_ffn_size=8)
SOURCES = {
    "Megatron-DeepSpeed": "bigscience tr11",
    "AscendSpeed": "Ascend/AscendSpeed@1 README",
    "torchtitan of 2024": "pytorch/torchtitan@1 benchmarks/llama3_h100_202412_torchtitan.md",
    "torchtitan": "pytorch/torchtitan@1 benchmarks/llama3-8b_h200_202506.md",
    "llm-foundry": "mosaicml/llm-foundry@1 benchmarking",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge@1",
    "Alpa": "alpa-projects/alpa@1",
    "other": "mindformers@1",
}
OF_EXPERTS = "facts/published_moe_runs.csv"
FULL = {"recompute": "full", "precision": "fp16", "gradient_bytes": 2}
SHARDED = Parallelism(dp=4, zero=3, sequence_parallel=True, flash_attention=True)


def run_of(engine, job, assumed=(), dims=DIMS, name="a_run"):
    return PublishedRun(name, SOURCES[engine], dims, job, Cluster.of_chip("a100_80gb"), assumed)


def stage_of(engine, job, number=0, **more):
    return engine_stages(run_of(engine, job, **more))[number]


def parameters(job, stage=0, dims=DIMS):
    return stage_parameters(dims, job)[stage]


@pytest.fixture(scope="module")
def rows():
    return read_rows(shared("facts/published_runs.csv"))


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("fit_memory")


@pytest.fixture(scope="module")
def pairs(script):
    return script.pairs_of(shared("facts/published_runs.csv"))


@pytest.mark.parametrize(
    ("engine", "job", "whole", "sharded"),
    [
        ("Megatron-DeepSpeed", {"zero": 0}, 2 + 2 + 4 + 8 + 4 + 4, 0),
        ("Megatron-DeepSpeed", {"zero": 1}, 2 + 2, 4 + 8 + 4),
        ("Megatron-DeepSpeed", {"zero": 1, "precision": "bf16", "gradient_bytes": 4}, 2 + 2, 4 + 8 + 4),
        ("Megatron-DeepSpeed", {"zero": 1, "precision": "bf16", "gradient_bytes": 6}, 2 + 6, 4 + 8),
        ("AscendSpeed", {"zero": 2, "precision": "bf16", "gradient_bytes": 4}, 2, 2 + 4 + 8 + 4),
        ("Megatron-Bridge", {"zero": 1, "precision": "fp8", "gradient_bytes": 4}, 2 + 2, 4 + 8),
        ("other", {"zero": 1, "precision": "bf16", "gradient_bytes": 4}, 2 + 4, 4 + 8),
    ],
)
def test_bytes_of_a_parameter(engine, job, whole, sharded):
    job = Parallelism(dp=4, **FULL | job)
    stage, count = stage_of(engine, job), parameters(job)
    found = stage.weights + stage.gradients + stage.optimizer
    assert found == pytest.approx(count * (whole + sharded / 4))
    assert stage.beside == (1e9 if engine in ("Megatron-DeepSpeed", "AscendSpeed") and job.zero else 0)


def test_fsdp_has_no_second_weights_and_gathers_two_layers_and_the_tables():
    count, layer = parameters(SHARDED), 12 * H * H + 13 * H
    stage = stage_of("llm-foundry", SHARDED)
    assert stage.optimizer + stage.gradients == pytest.approx(16 * count / 4)
    assert stage.weights == pytest.approx(2 * (2 * layer + count - L * layer))
    alone = stage_of("llm-foundry", dataclasses.replace(SHARDED, dp=1))
    assert alone.weights == 0 and alone.optimizer + alone.gradients == pytest.approx(16 * count)


def test_fsdp_in_a_pipeline_keeps_weights_gathered_and_whole_gradients():
    job = dataclasses.replace(SHARDED, pp=2, num_microbatches=8, recompute="full")
    for number, stage in enumerate(engine_stages(run_of("torchtitan of 2024", job))):
        count = parameters(job, number)
        assert stage.weights == 2 * count and stage.gradients == 4 * count and stage.optimizer == 12 * count / 4


def test_torchtitan_splits_the_batch_by_stages_unless_its_size_is_published():
    job = dataclasses.replace(SHARDED, pp=2, num_microbatches=8, recompute="full")
    told = stage_of("torchtitan of 2024", job)
    split = stage_of("torchtitan of 2024", job, assumed=("microbatch",))
    as_split = stage_of("torchtitan of 2024", dataclasses.replace(job, microbatch=4, num_microbatches=2))
    assert split == as_split and split.activations > told.activations


@pytest.mark.parametrize(
    ("engine", "tp", "expected"),
    [
        ("other", 1, 8),
        ("llm-foundry", 1, 4),
        ("torchtitan of 2024", 1, 12),
        ("torchtitan of 2024", 2, 16),
        ("torchtitan", 1, 4),
    ],
)
def test_bytes_of_a_logit(engine, tp, expected):
    job = Parallelism(tp=tp, microbatch=16, recompute="full", flash_attention=True)
    gathered = 16 * S * 2 * H / 2 if tp > 1 else 0  # the head's input
    job = dataclasses.replace(job, sequence_parallel=tp > 1)
    assert stage_of(engine, job).working == pytest.approx(16 * S * V / tp * expected + gathered)


def test_pipelines_of_deepspeed_keep_results_and_the_input_of_the_embeddings_norm():
    job = Parallelism(pp=2, num_microbatches=4, **FULL)
    graph, own = stage_memory(DIMS, job), engine_stages(run_of("Megatron-DeepSpeed", job))
    stream = 2 * S * H
    assert own[0].activations - graph[0].activations == pytest.approx(2 * 2 * stream)  # two in flight, two values
    assert own[1].activations == pytest.approx(graph[1].activations)
    cut = dataclasses.replace(job, tp=2)
    graph, own = stage_memory(DIMS, cut)[0], engine_stages(run_of("Megatron-DeepSpeed", cut))[0]
    assert own.activations - graph.activations == pytest.approx(
        2 * (2 * stream + S * H / 2)
    )  # and the other half of masks


def test_tables_of_words_count_as_layers_where_that_makes_stages_even():
    dims = dataclasses.replace(DIMS, num_layers=10)
    job = Parallelism(pp=4, num_microbatches=8, **FULL)
    even = dataclasses.replace(job, layers_of_stages=(2, 3, 3, 2))
    found = [stage.parameters for stage in engine_stages(run_of("Megatron-DeepSpeed", job, dims=dims))]
    assert found == list(stage_parameters(dims, even)) != list(stage_parameters(dims, job))


def test_oneflows_buffers_hold_two_microbatches_for_each_stage(rows):
    run = describe(next(row for row in rows if row["id"] == "dlperf_of_2D_PP_2x4x4_512_2304x24"))
    graph, own = stage_memory(run.dims, run.job), engine_stages(run)
    for stage in range(3):
        assert own[stage].activations == pytest.approx(graph[stage].activations * 8 / (4 - stage))
    assert own[3].activations == graph[3].activations


def test_alpa_has_a_head_of_its_own_and_no_dropout():
    job = Parallelism(**FULL)
    stage = stage_of("Alpa", job)
    assert stage.weights == 2 * (parameters(job) + V * H)
    masks = stage_memory(DIMS, job)[0].activations - stage.activations
    assert masks == S * H  # of the embedding; layers are recomputed


@pytest.mark.parametrize(
    ("engine", "job", "fewer"),
    [  # of a layer and token; our graphs keep inputs of norms, attention's four, the MLP's two
        ("Megatron-Bridge", {"precision": "fp8"}, 2 * H + H + 4 * H),
        (
            "torchtitan",
            {"recompute": "selective"},
            2 * (2 * H + 4 * H + 4 * H) - 2 * (H + H + H + 4 * H + H + H) - 64,
        ),
    ],
)
def test_values_that_an_engine_does_not_keep(engine, job, fewer):
    job = Parallelism(flash_attention=True, **job)
    less = stage_memory(DIMS, job)[0].activations - stage_of(engine, job).activations
    assert less == pytest.approx(L * S * fewer)


T = 4096
"""Tokens of a microbatch of one sequence in the runs with experts."""


@pytest.mark.parametrize(
    ("name", "norms", "attention", "experts"),
    [
        # GQA in bf16, of whole layers with experts: norms' inputs and results; queries, keys, values, result, its sums, and
        # what the norms of queries and keys keep; rows of k experts: input, two products, their product; scores of the router
        (
            "mb_qwen3_235b_a22b_25_11_gb300",
            2 * (4 * 2 * 4096),
            2 * (2 * (2 * 8192 + 2 * 512) + 2 * (8192 + 512) + 4 * 64),
            2 * (8 * (2 * 4096 + 6 * 1536) + 8 * 128),
        ),
        # MXFP8: a product's input in one byte, beside what is kept in two; the result of the first norm is fused with queries
        (
            "mb_qwen3_235b_a22b_26_04_01_b300",
            2 * (4 + 1 + 2) * 4096,
            2 * (2 * (2 * 8192 + 2 * 512) + 2 * (8192 + 512) + 8192 + 4 * 64),
            2 * (8 * (4096 + 5 * 1536) + 8 * 128),
        ),
        # recomputed norms and activation of experts; no norms of queries and keys
        (
            "mb_gpt_oss_120b_26_04_01_h100",
            4 * 2880,
            2 * (2 * 4096 + 2 * 512) + 4 * 64,
            4 * (2 * 2880 + 4 * 2880) + 8 * 128,
        ),
    ],
)
def test_bytes_that_a_layer_with_experts_keeps(name, norms, attention, experts):
    run = with_experts()[name]
    assert layer_bytes(run.dims, run.job, recipes()[name]) == pytest.approx(T * (norms + attention + experts))


def test_bytes_that_latent_attention_keeps_with_and_without_its_projections():
    run, of = with_experts()["mb_deepseek_v3_no_mtp_25_11_gb200"], recipes()["mb_deepseek_v3_no_mtp_25_11_gb200"]
    without = dataclasses.replace(of, repeats=())
    heads = 2 * 128 * (192 + 192 + 128)
    assert layer_bytes(run.dims, run.job, without) - layer_bytes(run.dims, run.job, of) == pytest.approx(T * heads)
    whole = 4 * 2 * 7168 + 4 * (1536 + 512 + 64) + 2 * 128 * 128 + 4 * 128
    dense, sparse = 6 * 18432, 6 * 2048 + 8 * (2 * 7168 + 6 * 2048) + 8 * 256
    mean = (3 * dense + 58 * sparse) / 61
    assert layer_bytes(run.dims, run.job, of) == pytest.approx(T * (whole + mean))


def test_state_of_runs_with_experts_is_that_of_their_recipes():
    """Moments in bf16 in DeepSeek's recipes; bf16 alone in Automodel, whose weights stay gathered."""
    for name, state in (
        ("mb_deepseek_v3_26_08_gb200", (2, 2, 8)),
        ("mb_qwen3_30b_a3b_26_04_01_b200", (2, 2, 12)),
        ("na_gptoss120_64", (2, 2, 4)),
    ):
        job = with_experts()[name].job
        assert (job.weight_bytes, job.gradient_bytes, job.optimizer_bytes) == state
    run = with_experts()["na_qwen3_30b_8"]
    (stage,), (others,), (experts,) = (
        engine_stages(run),
        stage_parameters(run.dims, run.job),
        expert_parameters(run.dims, run.job),
    )
    assert stage.weights == pytest.approx(2 * (others + experts) + 2 * others / 8)
    assert stage.gradients == 4 * others + 2 * experts
    assert stage.optimizer == pytest.approx(4 * (others / 8 + experts))
    assert (
        stage.working >= 6 * 4 * T * run.dims.vocab_size
    )  # logits of 4 sequences, as they are, as logarithms and gradients


def test_runs_with_experts_that_ran_are_said_to_fit():
    fits = validate(shared(OF_EXPERTS))["fits"]
    assert fits["rows"] == fits["right"] == 26


def with_experts():
    return {row["id"]: describe_experts(row) for row in read_expert_rows(shared(OF_EXPERTS))}


def test_deepspeeds_zero_3_gathers_matrices_not_layers(rows):
    run = describe(next(row for row in rows if row["id"] == "meg21_t2_zero3_530b_640"))
    stage, layer = engine_stages(run)[0], 12 * run.dims.hidden_size**2
    assert stage.weights < stage_memory(run.dims, run.job)[0].weights - 2 * layer
    assert stage.total < run.cluster.usable_bytes


def test_only_figures_of_pytorchs_pool_have_the_fitted_number():
    job, pool = Parallelism(**FULL), memory_errors()["pytorch_pool"]
    for engine, figure, has_pool in (
        ("Megatron-DeepSpeed", "device", True),
        ("torchtitan", "reserved", True),
        ("Alpa", "allocated", False),
        ("other", "device", False),
    ):
        run = run_of(engine, job)
        memory, outside = run_memory(run), run.cluster.reserved_gb * 2**30 if figure == "device" else 0
        assert engine_of(run).figure == figure and memory.has_pool == has_pool and pool > 1
        assert memory.shown() == pytest.approx(memory.needed * (pool if has_pool else 1) + outside)
        assert memory.shown(2.0) == pytest.approx(memory.needed * (2 if has_pool else 1) + outside)


def test_what_is_recomputed_is_either_published_or_leaves_it_open():
    job = Parallelism(microbatch=4)
    told, open_ = run_memory(run_of("other", job)), run_memory(run_of("other", job, assumed=("recompute",)))
    full = run_memory(run_of("other", dataclasses.replace(job, recompute="full")))
    assert told.least == told.needed == open_.needed > open_.least == full.needed


def test_every_engine_is_of_some_run(rows, pairs):
    named = {f"{row['source']} {row['id']}" for row in [*rows, *read_expert_rows(shared(OF_EXPERTS))]}
    for name, engine in ENGINES.items():
        assert any(
            engine_of(PublishedRun(text.split()[-1], " ".join(text.split()[:-1]), *[None] * 3)) is engine
            for text in named
        ), name
    assert len(pairs) == 76


def test_the_recorded_errors_are_those_of_the_published_figures(script, pairs):
    """A change of the formulas, of what is known of engines, or of the file needs benchmarks/fit_memory.py."""
    found, _ = script.held_out_rows(pairs)
    assert script.errors_text(found, script.fit(pairs)) == MEMORY_ERRORS.read_text()
    one = script.figures(found)
    assert one["median"] <= 0.07 and abs(one["bias"]) <= 0.03


def test_no_number_has_seen_the_publisher_that_it_predicts(script, pairs):
    found, pools = script.held_out_rows(pairs)
    assert pools.keys() == {row[1] for row in found} == {"Alpa", "BigScience", "Meta", "OneFlow"}
    assert pools["BigScience"] != pools["Meta"]
    changed = [(run, memory, size * (2 if run.source.startswith("bigscience") else 1)) for run, memory, size in pairs]
    again, other = script.held_out_rows(changed)
    assert other["BigScience"] == pools["BigScience"] and other["Meta"] != pools["Meta"]
    for before, after in zip(found, again, strict=True):
        if before[1] == "BigScience":
            assert after[3] == pytest.approx(before[3] - math.log(2), abs=2e-5)


def test_the_interval_has_four_in_five_figures_of_each_publisher_alike(script):
    few = [["", "a", "", 0.3], ["", "a", "", 0.01]]
    many = [["", "b", "", 0.02 * (-1) ** n] for n in range(40)]
    assert script.interval([*few, *many]) == pytest.approx((math.exp(-0.3), math.exp(0.3)), abs=1.1e-3)
    one = memory_errors()
    assert memory_interval(DIMS, Parallelism()).of(1.0) == (one["low"], one["high"])


@pytest.mark.parametrize(
    ("job", "task", "dims", "why"),
    [
        ({"precision": "fp32"}, PLAIN_TEXT, DIMS, "float32"),
        ({"optimizer_on_host": True}, PLAIN_TEXT, DIMS, "host"),
        ({"offloaded_layers": (1,)}, PLAIN_TEXT, DIMS, "host"),
        ({}, TrainedTask("ppo"), DIMS, "ppo"),
        ({}, TrainedTask(lora=LoRAConfig(r=8)), DIMS, "adapters"),
        ({}, PLAIN_TEXT, EXPERTS, "experts"),
    ],
)  # fmt: skip
def test_no_interval_where_no_figure_is_of_such_a_run(job, task, dims, why):
    found = memory_interval(dims, Parallelism(**job), task)
    assert isinstance(found, NoInterval) and why in found.explain()


def test_plans_print_the_interval_of_their_memory_and_its_figures():
    request = PlanRequest(
        dims=DIMS, cluster=Cluster.of_chip("ascend910b"), devices=8, global_batch_size=16, flash_attention=True
    )
    options = search(request)
    best, interval = options[0], memory_interval(DIMS, options[0].job)
    assert isinstance(interval, MemoryInterval) and interval.rows == 76 and interval.publishers == 4
    low, high = (bound * best.peak_bytes / GB for bound in (memory_errors()["low"], memory_errors()["high"]))
    bounds = f"{low:.1f} to {high:.1f} GB for 80% of 76 published figures"
    assert f"; the fullest: {bounds}\nmemory: at least 80% of 76 published figures" in table(request, options)
    assert bounds in strategy_file(request, best, "rules.yaml")
    values = as_dict(best, best, request.cluster)
    assert values["memory_interval_bytes"] == pytest.approx((low * GB, high * GB))
    assert values["memory_interval"]["rows"] == 76
    none = as_dict(
        dataclasses.replace(best, job=dataclasses.replace(best.job, precision="fp32")), best, request.cluster
    )
    assert none["memory_interval_bytes"] is None and "float32" in none["memory_interval"]["meaning"]
