# SPDX-License-Identifier: Apache-2.0
"""Terms of the closed form that this package's graphs have, and other engines have not."""

import dataclasses

import pytest

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.members import every
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.parts_time import head_passes
from sporeloom.planner.rates import Rates, all_reduce, group_bandwidth, ring_latency
from sporeloom.planner.step_time import step_time

A100 = Cluster.of_chip("a100_80gb")
DIMS = Dimensions(num_layers=48, hidden_size=6144, num_heads=64, vocab_size=51200, seq_len=2048)


@pytest.mark.parametrize(("flash", "sp"), [(False, False), (True, False), (False, True)])
def test_our_own_graphs_add_up_both_results_of_a_parallel_block(flash, sp):
    """Forward twice what other engines reduce; backward as much, but for what products of attention's input hide."""
    dims = dataclasses.replace(DIMS, block="parallel", num_kv_heads=1)
    job = Parallelism(tp=8, microbatch=2, flash_attention=flash, sequence_parallel=sp)
    theirs, ours = (step_time(dims, dataclasses.replace(job, own_graphs=own), A100) for own in (False, True))
    rates, tokens, h = Rates(dims, job, A100), 2 * 2048, dims.hidden_size
    reduced = 48 * all_reduce(2 * tokens * h, 8, rates.tp)
    beside = (
        2 * rates.matmul(tokens, h / 8, h)
        + 2 * rates.matmul(tokens, dims.head_size, h)
        + 9 * 2 * tokens * h / rates.bytes
    )
    assert theirs.tensor_parallel == pytest.approx(2 * reduced)
    hidden = 0 if flash or sp else min(2 * reduced, 48 * beside)
    assert hidden < 2 * reduced and ours.tensor_parallel == pytest.approx(4 * reduced - hidden)


def test_our_own_graphs_pass_over_sharded_logits_more_often():
    """20 bytes of a logit in both passes, 36 where collectives lie between the operators; 30 of other engines."""
    for tp, own, expected in ((1, True, 20), (8, True, 36), (8, False, 30)):
        job = Parallelism(tp=tp, microbatch=2, own_graphs=own)
        rates = Rates(DIMS, job, A100)
        passes = sum(each.memory for each in head_passes(DIMS, job, rates))
        assert passes == pytest.approx(expected * 2 * 2048 * DIMS.vocab_size / tp / rates.bytes)


def test_our_own_graphs_gather_words_in_float32():
    job = Parallelism(dp=8, zero=1)
    theirs, ours = (step_time(DIMS, dataclasses.replace(job, own_graphs=own), A100) for own in (False, True))
    extra = 7 / 8 * 2 * DIMS.vocab_size * DIMS.hidden_size / group_bandwidth(A100, 8, 1)
    hops = 48 * ring_latency(every(A100.units, 8, 1, 8))
    assert ours.weights - theirs.weights == pytest.approx(extra - hops)


def test_gathers_in_fp8_move_a_quarter_less():
    job = Parallelism(tp=8, sequence_parallel=True, precision="fp8")
    whole, less = (
        step_time(DIMS, dataclasses.replace(job, gathers_fp8=one), A100).tensor_parallel for one in (False, True)
    )
    assert less == pytest.approx(0.75 * whole) and whole > 0
