# SPDX-License-Identifier: Apache-2.0
import csv
import dataclasses
import math
from pathlib import Path

import pytest
from conftest import shared

from sporeloom.checkpoint.contents import is_orthogonalized
from sporeloom.cli.plan import PlanConfig, requested
from sporeloom.core.command_line import parse_args
from sporeloom.models.family import size_config
from sporeloom.models.parameters import num_parameters, parameter_shapes
from sporeloom.planner import step_time as step_time_module
from sporeloom.planner.activations import layer_activations
from sporeloom.planner.cluster import Cluster, Efficiency, Overlap, read_cluster
from sporeloom.planner.dimensions import Dimensions, of_decoder
from sporeloom.planner.layer_time import head_forward, layer_forward
from sporeloom.planner.members import every
from sporeloom.planner.memory import stage_memory
from sporeloom.planner.parallelism import Parallelism, PartLayers
from sporeloom.planner.parameters import expert_parameters, layer_parameters, stage_copies, stage_parameters
from sporeloom.planner.rates import Rates, group_bandwidth, ring_latency
from sporeloom.planner.search import describe, search
from sporeloom.planner.step_time import flops_per_device, step_time
from sporeloom.strategy.schedule import microbatches_held, passes

GPT = {"vocab_size": 51200, "seq_len": 2048}
MODELS = {  # arXiv:2205.05198 table 3: dimensions and virtual stages
    "22B": (Dimensions(num_layers=48, hidden_size=6144, num_heads=64, **GPT), 1),
    "175B": (Dimensions(num_layers=96, hidden_size=12288, num_heads=96, **GPT), 3),
    "530B": (Dimensions(num_layers=105, hidden_size=20480, num_heads=128, **GPT), 3),
    "1T": (Dimensions(num_layers=128, hidden_size=25600, num_heads=160, **GPT), 1),
}
TECHNIQUES = {
    "tp baseline": {},
    "tp+sp": {"sequence_parallel": True},
    "tp+selective": {"recompute": "selective"},
    "tp+sp+selective": {"sequence_parallel": True, "recompute": "selective"},
    "full recompute": {"recompute": "full"},
}
A100 = Cluster.of_chip("a100_80gb")


def microbatches_in_flight(job, stage):
    return microbatches_held(stage, job.pp, job.num_microbatches, job.virtual_stages, job.schedule)


def job_of_row(row, virtual_stages):
    pp = int(row["pp"])
    return Parallelism(
        tp=int(row["tp"]),
        pp=pp,
        microbatch=int(row["microbatch"]),
        num_microbatches=4 * pp,
        virtual_stages=virtual_stages,
        **TECHNIQUES[row["technique"]],
    )


def test_activation_memory_is_within_two_percent_of_the_published():
    checked = 0
    with shared("facts/activation_memory.csv").open() as file:
        for row in csv.DictReader(file):
            if row["technique"] == "any":
                continue
            dims, virtual_stages = MODELS[row["model"]]
            job = job_of_row(row, virtual_stages)
            if row["unit"] == "GiB":
                found = stage_memory(dims, job)[0].activations / 2**30
            else:  # per layer, relative to tensor parallel alone
                baseline = layer_activations(dims, dataclasses.replace(job, sequence_parallel=False), "none")
                found = 100 * layer_activations(dims, job) / baseline
            assert found == pytest.approx(float(row["value"]), rel=0.02), row
            checked += 1
    assert checked == 28


def test_weights_gradients_and_moments_are_the_published():
    with shared("facts/activation_memory.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["technique"] == "any"]
    for row in rows:  # their figure has no embeddings
        dims = MODELS[row["model"]][0]
        layers = 18 * 12 * dims.num_layers * dims.hidden_size**2 / int(row["tp"]) / int(row["pp"])
        assert layers / 2**30 == pytest.approx(float(row["value"]), rel=0.005)
        job = Parallelism(tp=int(row["tp"]), pp=int(row["pp"]))
        middle = stage_memory(dims, job)[job.pp // 2]
        if job.pp > 2:
            assert middle.weights + middle.gradients + middle.optimizer == pytest.approx(layers, rel=0.005)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        *(("pangu", size) for size in ("tiny", "13b", "200b", "embedded_1b", "embedded_7b", "ultra_135b")),
        *(("codegeex", size) for size in ("13b", "2_6b", "4_9b")),
        ("palm", "540b"),
        *(
            ("pangu", size)
            for size in ("pro_moe_72b", "switch_2.6b", "gshard_13b", "sigma_1t", "ultra_moe_718b", "2_flash")
        ),
    ],
)
def test_parameters_are_counted_as_the_models_count_them(family, size):
    config = size_config(family, size)
    dims, count = of_decoder(config), num_parameters(config)
    assert dims.num_parameters == count
    (experts,) = expert_parameters(dims, Parallelism())
    assert stage_parameters(dims, Parallelism()) == (count - experts,)
    (copies,) = stage_copies(dims, Parallelism(tp=4))
    assert sum(4 // of_each * size for of_each, size in copies.items()) == count - experts
    halves = Parallelism(pp=2)
    staged = stage_parameters(dims, halves) + expert_parameters(dims, halves)
    assert sum(staged) == count + config.tied_embedding * dims.vocab_size * dims.hidden_size  # a tied table twice


def test_other_architectures():
    llama = Dimensions(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, vocab_size=128256, seq_len=8192,
        ffn_hidden_size=14336, gated_mlp=True, position_tables=0, tied_embedding=False,
        qkv_bias=False, output_bias=False, mlp_bias=False, norm_bias=False, dropout=False,
    )  # fmt: skip
    assert llama.num_parameters == 8_030_261_248  # Llama 3.1 8B
    parallel = dataclasses.replace(llama, block="parallel")
    assert parallel.num_parameters == llama.num_parameters - 32 * 4096  # one norm less a layer
    job = Parallelism(tp=8, flash_attention=True)
    assert step_time(parallel, job, A100).tensor_parallel == pytest.approx(
        step_time(llama, job, A100).tensor_parallel / 2
    )


def test_one_replica_gathers_no_weights():
    dims, job = MODELS["22B"][0], Parallelism(tp=8, zero=3)
    assert stage_memory(dims, job) == stage_memory(dims, dataclasses.replace(job, zero=0))


def test_first_stages_hold_more_microbatches():
    job = Parallelism(pp=4, num_microbatches=8)
    assert [microbatches_in_flight(job, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert microbatches_in_flight(dataclasses.replace(job, num_microbatches=2), 0) == 2
    assert microbatches_in_flight(dataclasses.replace(job, virtual_stages=3), 0) == 5


def test_the_optimizer_is_cut_over_the_replicas():
    dims, plain = MODELS["22B"][0], Parallelism(dp=8, tp=8, zero=0)
    whole = stage_memory(dims, plain)[0]
    for level in (1, 2, 3):
        cut = stage_memory(dims, dataclasses.replace(plain, zero=level))[0]
        assert cut.optimizer == whole.optimizer / 8
        assert cut.gradients == whole.gradients / (8 if level >= 2 else 1)
        layer, count = layer_parameters(dims, 8), whole.parameters
        gathered = 2 * 2 * layer + 2 * (count - dims.num_layers * layer)  # two layers, and the tables
        assert cut.weights == (whole.weights / 8 + gathered if level >= 3 else whole.weights)
    groups = stage_memory(dims, dataclasses.replace(plain, zero=1, zero_shards=4))[0]
    assert groups.optimizer == whole.optimizer / 4


@pytest.mark.parametrize(("family", "size"), [("pangu", "2.6b"), ("pangu", "pro_moe_72b")])
def test_muon_has_no_second_moments_of_the_matrices_of_layers(family, size):
    model = size_config(family, size)
    job = Parallelism(dp=2, zero=0)
    plain, muon = (
        stage_memory(of_decoder(model), dataclasses.replace(job, muon=m))[0].optimizer for m in (False, True)
    )
    shapes = parameter_shapes(model)
    matrices = sum(math.prod(shape) for name, shape in shapes.items() if is_orthogonalized(name, shape))
    assert plain - muon == pytest.approx(4 * matrices, rel=1e-3)
    cut = (
        stage_memory(of_decoder(model), dataclasses.replace(job, muon=m, zero=1))[0].optimizer for m in (False, True)
    )
    assert next(cut) - next(cut) == pytest.approx(2 * matrices, rel=1e-3)


def test_the_bubble_is_that_of_1f1b():
    dims = dataclasses.replace(MODELS["175B"][0], vocab_size=8)  # next to no head: all stages alike
    job = Parallelism(tp=8, pp=8, num_microbatches=16)
    time = step_time(dims, job, A100)
    working = time.matmul + time.attention + time.memory + time.overhead + time.tensor_parallel
    assert time.bubble / working == pytest.approx(7 / 16, rel=0.01)
    interleaved = step_time(dims, dataclasses.replace(job, virtual_stages=3), A100)
    assert interleaved.bubble == pytest.approx(time.bubble / 3)


def test_the_bubble_of_zero_bubble_v_is_its_own():
    """Of equal stages its order leaves (p - 1) x 2 x the gradients of a part's inputs, where these take longer than its
    forward pass and the gradients of its weights."""
    dims = dataclasses.replace(MODELS["175B"][0], vocab_size=8)
    job = Parallelism(tp=8, pp=8, num_microbatches=32, virtual_stages=2)
    # The head launches kernels, too, however small it is: here launches take no time.
    quick = dataclasses.replace(A100, efficiency=dataclasses.replace(A100.fitted, layer_overhead_us=0))
    interleaved, found = (
        step_time(dims, dataclasses.replace(job, schedule=schedule), quick) for schedule in ("1f1b", "zero_bubble_v")
    )
    work = sum(getattr(found, name) for name in ("matmul", "attention", "memory", "overhead", "tensor_parallel"))
    assert interleaved.bubble == pytest.approx(7 * work / 2 / 32, rel=0.01)
    weights = found.matmul / 3  # forward, gradients of inputs, gradients of weights
    forward = weights + found.attention / 3 + found.memory / 2.5 + found.overhead / 3 + found.tensor_parallel / 2
    inputs = work - forward - weights
    assert inputs > max(forward, weights)
    assert found.bubble == pytest.approx(7 * 2 * inputs / 2 / 32, rel=0.01)
    assert found.bubble < interleaved.bubble


def test_no_schedule_is_faster_than_its_slowest_stage():
    """zero_bubble_v has the head on stage 0, and stages of other lengths."""
    dims = MODELS["22B"][0]
    even = Parallelism(tp=8, pp=4, num_microbatches=16, virtual_stages=2, schedule="zero_bubble_v")
    for job in (even, dataclasses.replace(even, layers_of_stages=(9, 13, 13, 13), recompute="full")):
        assert step_time(dims, job, A100).bubble > 0


def replayed(dims, job, stage, parts):
    """Bytes that a stage holds at its fullest, by its order of passes; `parts`: (layers, recomputed) of each."""
    tokens = job.microbatch * dims.seq_len
    sizes = [
        (layers - again) * layer_activations(dims, job, "none") + again * layer_activations(dims, job)
        for layers, again in parts
    ]
    sizes[0] += tokens * dims.seq_len * job.mask_bytes
    if stage == 0:
        sizes[0] += tokens * dims.hidden_size / job.tp * dims.dropout * (2 if dims.float32_softmax else 1)
    order = passes(stage, job.pp, job.num_microbatches, job.virtual_stages, job.schedule)
    late = {(one.part, one.microbatch) for one in order if one.kind == "weights"}
    held = most = 0.0
    for one in order:
        if one.kind == "forward":
            held += sizes[one.part]
        elif one.kind == "weights" or (one.part, one.microbatch) not in late:
            held -= sizes[one.part]
        most = max(most, held)
    return most


@pytest.mark.parametrize(("schedule", "parts"), [("zero_bubble_h1", 1), ("zero_bubble_v", 2), ("dualpipe_v", 2)])
def test_the_bubble_of_many_microbatches_is_as_counted_out(schedule, parts, monkeypatch):
    job = Parallelism(tp=8, pp=4, num_microbatches=200, virtual_stages=parts, schedule=schedule, own_graphs=True)
    dims = MODELS["22B"][0]
    found = step_time(dims, job, A100).bubble
    monkeypatch.setattr(step_time_module, "COUNTED_GROUPS", (50, 60))
    assert step_time(dims, job, A100).bubble == pytest.approx(found, rel=1e-9) and found > 0


@pytest.mark.parametrize("schedule", ["1f1b", "seqpipe", "zero_bubble_v"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_of_other_lengths_are_held_as_the_order_says(schedule, recompute):
    dims = dataclasses.replace(MODELS["22B"][0], num_layers=16)
    layers = {0: ((1, 1), (6, 0)), 1: ((5, 2), (4, 1))}
    job = Parallelism(
        pp=2,
        num_microbatches=6,
        virtual_stages=2,
        schedule=schedule,
        recompute=recompute,
        layers_of_stages=(7, 9),
        recomputed_layers=(1, 3),
        layers_of_parts=tuple(tuple(PartLayers(*one, 0) for one in parts) for parts in layers.values()),
    )
    for stage, memory in enumerate(stage_memory(dims, job)):
        head = 2 * 2 * dims.hidden_size * dims.seq_len if stage == job.last_stage else 0
        assert memory.activations - head == pytest.approx(replayed(dims, job, stage, layers[stage]))


def test_under_gpipe_the_logits_of_all_microbatches_wait():
    dims, job = MODELS["22B"][0], Parallelism(tp=8, pp=2, num_microbatches=6, virtual_stages=2)
    together, in_turn = (
        stage_memory(dims, dataclasses.replace(job, schedule=schedule))[1] for schedule in ("gpipe", "1f1b")
    )
    layers = (6 - microbatches_in_flight(job, 1)) * 24 * layer_activations(dims, job)
    logits = 5 * 4 * dims.seq_len * dims.vocab_size / 8
    assert together.activations - in_turn.activations == pytest.approx(layers + logits)


def test_the_plan_of_2048_devices_with_virtual_stages_fits_as_the_order_of_passes_has_it():
    """The command of the guide with --interleave."""
    flags = "--model pangu --size 200b --cluster ascend910a --devices 2048 --global-batch-size 2048 --interleave"
    request = requested(parse_args(PlanConfig, "", flags.split()))
    assert request.mask_bytes == 4  # numbers, as the models make them without a fused kernel
    dims, cluster, options = request.dims, request.cluster, search(request)
    fitting = [option for option in options if option.fits and option.job.virtual_stages > 1]
    assert len(fitting) > 100 and {option.job.virtual_stages for option in fitting} == {2, 3, 4} & {
        option.job.virtual_stages for option in options
    }
    for option in [*fitting[:6], *fitting[6::120]]:
        job, each = option.job, dims.num_layers // option.job.pp // option.job.virtual_stages
        for stage, memory in enumerate(option.memory):
            again = (0,) * job.pp if job.recompute == "none" else job.recomputed_layers or job.stages(dims.num_layers)
            parts = [(each, min(each, max(0, again[stage] - part * each))) for part in range(job.virtual_stages)]
            spread = job.tp if job.sequence_parallel else 1
            tokens = job.microbatch * dims.seq_len
            head = 2 * 2 * dims.hidden_size * tokens / spread if stage == job.last_stage else 0
            assert memory.activations - head == pytest.approx(replayed(dims, job, stage, parts)), describe(job)
            assert memory.total <= cluster.usable_bytes


def test_time_adds_up_and_answers_to_what_it_should():
    dims, job = MODELS["22B"][0], Parallelism(dp=2, tp=8, microbatch=2, num_microbatches=4)
    time = step_time(dims, job, A100)
    assert time.total == sum(vars(time).values())
    assert step_time(dims, dataclasses.replace(job, tp=1), A100).tensor_parallel == 0
    assert step_time(dims, dataclasses.replace(job, dp=1), A100).gradients == 0
    full = step_time(dims, dataclasses.replace(job, recompute="full"), A100)
    assert full.recompute > step_time(dims, dataclasses.replace(job, recompute="selective"), A100).recompute > 0
    model, again = flops_per_device(dims, dataclasses.replace(job, recompute="full"))
    assert again / model == pytest.approx(4 / 3, rel=0.02)
    slower = dataclasses.replace(A100, inter_node_gb_per_s=1.0)
    assert step_time(dims, dataclasses.replace(job, tp=1, dp=16), slower).total > time.total
    assert step_time(dims, job, A100, Overlap(gradients=0.0, weights=0.0)).gradients >= time.gradients


def test_products_in_fp8_quantize_their_inputs_and_the_head_stays_in_bf16():
    """The efficiencies of one chip are given, so that twice the speed is twice the speed."""
    shares = dict.fromkeys(("matmul", "attention", "memory", "intra_node", "inter_node"), 0.5)
    h100 = Cluster.of_chip("h100", efficiency=Efficiency(**shares, layer_overhead_us=0, fp8=2.0))
    dims = dataclasses.replace(MODELS["22B"][0], tied_embedding=True, dropout=False)
    half, eighth = (Parallelism(flash_attention=True, precision=one) for one in ("bf16", "fp8"))
    layer, quantized = (layer_forward(dims, job, Rates(dims, job, h100)) for job in (half, eighth))
    bandwidth = h100.memory_gb_per_s * 1e9 * 0.5
    inputs = (2 + 1 + 4) * dims.hidden_size * dims.seq_len  # of query, key, value; of output; of the MLP's matrices
    assert quantized.memory - layer.memory == pytest.approx(4 * inputs / bandwidth)
    head, same = (head_forward(dims, job, Rates(dims, job, h100)) for job in (half, eighth))
    assert 0.9 < same.matmul / head.matmul <= 1
    assert quantized.matmul < 0.6 * layer.matmul


def test_overlapped_communication_takes_less():
    dims, job = (
        MODELS["175B"][0],
        Parallelism(tp=8, pp=8, virtual_stages=3, num_microbatches=64, sequence_parallel=True),
    )
    whole, sliced = (step_time(dims, dataclasses.replace(job, overlaps_tensor_parallel=o), A100) for o in (False, True))
    assert sliced.tensor_parallel == pytest.approx(whole.tensor_parallel / 2)
    behind = step_time(dims, dataclasses.replace(job, overlaps_sends=True), A100)
    assert behind.pipeline == pytest.approx(whole.pipeline * 7 / (64 * 3 + 7))
    one = dataclasses.replace(job, virtual_stages=1)
    assert step_time(dims, one, A100) == step_time(dims, dataclasses.replace(one, overlaps_sends=True), A100)
    twice = dataclasses.replace(job, attention_share=2 * A100.fitted.attention)
    faster = step_time(dims, twice, A100)
    assert faster.attention == pytest.approx(whole.attention / 2)


def test_hidden_gathers_slow_the_computation_down():
    dims, job = MODELS["22B"][0], Parallelism(dp=8, zero=3, flash_attention=True, microbatch=8)
    free, shared_cores = (
        step_time(dims, job, A100, Overlap(gradients=1, weights=1, contention=c)) for c in (0.0, 0.25)
    )
    assert free.weights == free.gradients == 0
    ring = 7 / 8 / group_bandwidth(A100, 8, 1)
    num_bytes = 2 * max(stage_parameters(dims, job))
    hops = dims.num_layers * ring_latency(every(A100.units, 8, 1, 0))
    assert shared_cores.weights == pytest.approx(0.25 * 2 * (ring * num_bytes + hops))
    assert shared_cores.gradients == pytest.approx(0.25 * (ring * num_bytes + hops))


@pytest.mark.parametrize(("block", "share"), [("sequential", 1 / 2), ("parallel", 1), ("sandwich", 0)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_graphs_leave_out_the_last_sum_of_a_layer_that_is_computed_again(block, share, sequence_parallel):
    dims = dataclasses.replace(MODELS["22B"][0], block=block)
    graph = Parallelism(tp=8, microbatch=2, num_microbatches=4, recompute="full", sequence_parallel=sequence_parallel)
    time = step_time(dims, graph, A100)
    all_of_it = step_time(dims, dataclasses.replace(graph, repeats_results=True), A100)
    forward = time.tensor_parallel / 2  # as much goes backward
    spared = share * forward / (2 if sequence_parallel else 1)
    assert all_of_it.recompute - time.recompute == pytest.approx(spared, abs=1e-9)


@pytest.mark.parametrize(("block", "products"), [("sequential", 1), ("parallel", 2), ("sandwich", 0)])
def test_our_own_graphs_leave_out_the_last_product_too(block, products):
    dims = dataclasses.replace(MODELS["22B"][0], block=block, ffn_hidden_size=6144)  # as wide as the queries
    job = Parallelism(microbatch=2, num_microbatches=4, recompute="full")
    theirs, ours = (step_time(dims, dataclasses.replace(job, own_graphs=own), A100) for own in (False, True))
    rates = Rates(dims, job, A100)
    spared = rates.matmul(2 * 2048, 6144, 6144 * products) if products else 0
    apart = 3 * rates.matmul(2 * 2048, 6144, 6144) - rates.matmul(2 * 2048, 3 * 6144, 6144)  # queries, keys and values
    assert theirs.recompute - ours.recompute == pytest.approx(4 * 48 * (spared - apart))
    flops = [flops_per_device(dims, dataclasses.replace(job, own_graphs=own))[1] for own in (False, True)]
    assert flops[0] - flops[1] == products * 2 * 8 * 2048 * 48 * 6144 * 6144


def test_our_own_graphs_cast_and_add_up_in_each_microbatch():
    """Weights are cast once (6 bytes), gradients cast back (6), added to those before (12), read for their norm (4) and
    clipped (8)."""
    dims, (small, large) = MODELS["22B"][0], (Parallelism(tp=8, num_microbatches=n, own_graphs=True) for n in (1, 8))
    (count,) = stage_parameters(dims, large)
    rate = Rates(dims, large, A100).bytes
    assert step_time(dims, large, A100).accumulation == pytest.approx((6 + 8 * 6 + 7 * 12) * count / rate)
    assert step_time(dims, small, A100).accumulation == pytest.approx((6 + 6) * count / rate)
    theirs = dataclasses.replace(large, own_graphs=False)
    assert step_time(dims, theirs, A100).accumulation == 0
    passes = step_time(dims, large, A100).optimizer - step_time(dims, theirs, A100).optimizer
    assert passes == pytest.approx((4 + 8) * count / rate)


def test_our_own_graphs_hide_the_sums_of_gradients_only_where_one_graph_is_the_step():
    dims, job = MODELS["22B"][0], Parallelism(dp=16, microbatch=4)
    for microbatches, is_hidden in ((1, True), (8, False)):
        job = dataclasses.replace(job, num_microbatches=microbatches)
        theirs, ours = (step_time(dims, dataclasses.replace(job, own_graphs=own), A100) for own in (False, True))
        assert (ours.gradients == theirs.gradients) == is_hidden and ours.gradients >= theirs.gradients


def test_heads_that_do_not_fill_the_matrix_unit_are_slow():
    dims = MODELS["175B"][0]
    odd = dataclasses.replace(dims, num_heads=1024, hidden_size=12288)  # 12 a head
    assert step_time(odd, Parallelism(tp=8), A100).attention > 5 * step_time(dims, Parallelism(tp=8), A100).attention


def test_rings_that_leave_a_node_share_its_links():
    intra, inter = A100.fitted.intra_node, A100.fitted.inter_node
    assert group_bandwidth(A100, 8, 1) == pytest.approx(300e9 * intra)
    assert group_bandwidth(A100, 16, 8) == pytest.approx(25e9 * inter)
    assert group_bandwidth(A100, 16, 4) == pytest.approx(2 * 25e9 * inter)


def test_what_waits_in_the_hosts_memory_takes_its_link():
    dims, job = MODELS["22B"][0], Parallelism(dp=2, tp=8, microbatch=2, num_microbatches=4, zero=1)
    plain = step_time(dims, job, A100)
    assert plain.offload == 0
    moments = dataclasses.replace(job, optimizer_on_host=True)
    held = 8 * stage_parameters(dims, job)[0] / 2
    assert step_time(dims, moments, A100).offload == pytest.approx(2 * held / 32e9)
    assert step_time(dims, moments, A100, adapters=1000).offload == pytest.approx(2 * 8000 / 32e9)
    away = dataclasses.replace(job, offloaded_layers=(10,))
    assert step_time(dims, away, dataclasses.replace(A100, host_gb_per_s=1e6)).offload == 0  # hidden
    compute = step_time(dims, away, A100)
    busy = compute.total - compute.offload - compute.gradients - compute.weights - compute.optimizer
    slow = step_time(dims, away, dataclasses.replace(A100, host_gb_per_s=0.1))
    moved = 10 * layer_activations(dims, job) * 4 / 0.1e9
    assert slow.offload == pytest.approx(2 * moved - busy)


def test_narrow_heads_cost_a_fused_kernel_what_wide_ones_do():
    times = [
        step_time(dataclasses.replace(MODELS["22B"][0], num_heads=heads), Parallelism(tp=8, flash_attention=True), A100)
        for heads in (24, 48, 96)  # 256, 128 and 64 a head
    ]
    assert times[0].attention == pytest.approx(times[1].attention)
    assert times[2].attention == pytest.approx(2 * times[1].attention)


def test_multi_token_prediction_adds_its_layer_and_a_head_to_the_flops():
    config = size_config("pangu", "embedded_tiny")
    plain, more = of_decoder(config, 64), of_decoder(dataclasses.replace(config, num_mtp_layers=1), 64)
    layer, head = plain.layer_matrices + 2 * config.hidden_size**2, config.vocab_size * config.hidden_size
    expected = 6 * (layer + head) + 12 * 64 * plain.query_size
    assert more.model_flops(1.0) - plain.model_flops(1.0) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("precision", "passes"), [("bf16", 5), ("fp32", 2)])
def test_operators_of_rms_norm_pass_over_memory_more_often_than_a_kernel(precision, passes):
    """Two norms of each of 4 layers, 2.5 times for forward and backward, in our own graphs only."""
    kernel = Dimensions(num_layers=4, hidden_size=1024, num_heads=8, **GPT)
    operators = dataclasses.replace(kernel, operator_norm=True)
    cluster = read_cluster(Path("ascend910b"))

    def memory(dims, own_graphs):
        job = Parallelism(microbatch=2, num_microbatches=1, precision=precision, own_graphs=own_graphs)
        return step_time(dims, job, cluster).memory

    width = 4 if precision == "fp32" else 2
    seconds = 2 * 4 * 2.5 * passes * width * 2 * 2048 * 1024 / (cluster.memory_gb_per_s * 1e9 * cluster.fitted.memory)
    assert memory(operators, True) - memory(kernel, True) == pytest.approx(seconds)
    assert memory(operators, False) == memory(kernel, False)
