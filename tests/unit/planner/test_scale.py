# SPDX-License-Identifier: Apache-2.0
"""How step times grow with the number of replicas, beside published ones."""

import dataclasses

import pytest

from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions
from sporeloom.planner.members import every
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.rates import NETWORK_HOP_S, RING_HOP_S, ring_latency
from sporeloom.planner.step_time import step_time
from sporeloom.strategy.axes import AXES

INTERNLM_7B = Dimensions(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    ffn_hidden_size=11008,
    vocab_size=103168,
    seq_len=2048,
    gated_mlp=True,
    position_tables=0,
    tied_embedding=False,
    dropout=False,
)
TOKENS_PER_S = {64: 3690, 128: 3571, 256: 3209, 512: 2861, 1024: 2271}
"""Of a GPU, ZeRO 1 over all of them (InternLM, doc/en/train_performance.md: tp=1, zero1=-1; 4 microbatches of 2)."""
TP_OUTSIDE = ("pp", "tp", "cp", "dp")
SERVER_GB_PER_S = 4 * 100 / 8


def internlm(devices, **changes):
    cluster = Cluster.of_chip("a100_80gb", inter_node_gb_per_s=SERVER_GB_PER_S / 8)
    job = Parallelism(
        dp=devices,
        microbatch=2,
        num_microbatches=4,
        zero=1,
        flash_attention=True,
        reduced_bytes=2,
        collectives_of_layer=9,  # each tensor of a layer on its own
    )
    return step_time(INTERNLM_7B, dataclasses.replace(job, **changes), cluster)


@pytest.mark.parametrize("devices", [128, 256, 512, 1024])
def test_steps_of_internlm_7b_slow_down_with_its_replicas_as_published(devices):
    """4.4, 5.7 and 7.2 s on 64, 512 and 1024 GPUs: rings of one tensor after the other have more hops."""
    measured = TOKENS_PER_S[64] / TOKENS_PER_S[devices]
    assert internlm(devices).total / internlm(64).total == pytest.approx(measured, rel=0.1)
    assert internlm(64).total == pytest.approx(8 * 2048 / TOKENS_PER_S[64], rel=0.15)


def test_fewer_collectives_hide_the_number_of_replicas():
    assert internlm(1024, collectives_of_layer=1).total < 1.15 * internlm(64, collectives_of_layer=1).total


@pytest.mark.parametrize(("size", "hops", "between"), [(1, 0, 0), (8, 7, 0), (16, 13, 2), (1024, 895, 128)])
def test_a_ring_has_a_hop_from_each_rank_to_the_next(size, hops, between):
    found = ring_latency(every(Cluster.of_chip("a100_80gb").units, size, 1, 0))
    assert found == pytest.approx(hops * RING_HOP_S + between * NETWORK_HOP_S)


def test_hops_are_those_of_the_order_of_the_axes():
    """dp of 8 in one server, and each in another: the same bytes are sent, over other hops."""
    with_hops, without = (
        [internlm(64, dp=8, tp=8, order=order, collectives_of_layer=count).weights for order in (AXES, TP_OUTSIDE)]
        for count in (1e6, 0)
    )
    hops = [(one - other) / 32 / 1e6 for one, other in zip(with_hops, without, strict=True)]
    assert hops == pytest.approx([8 * NETWORK_HOP_S, 7 * RING_HOP_S], rel=0.01)
