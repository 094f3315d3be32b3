# SPDX-License-Identifier: Apache-2.0
"""Members of groups in units of the network, against a count over the ranks of a job."""

import dataclasses
from collections import Counter

import pytest
from conftest import CONFIGS

from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.models.family import size_config
from sporeloom.planner.cluster import Level, read_cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.members import counterparts, every, pairs
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.rates import all_to_all, group_bandwidth
from sporeloom.planner.step_time import GRADIENT_BYTES, step_time
from sporeloom.strategy.mesh import Mesh

H100, NVL72, SUPER_NODE = (8,), (4, 72), (16, 768)


def counted(units, ranks):
    return *(min(Counter(rank // devices for rank in ranks).values()) for devices in units), len(ranks)


def placed(members):
    return {each.counts for each in members}


def sending(units, groups):
    """The most ranks of a unit below each level that are in groups with members in others."""
    groups, found = [list(group) for group in groups], []
    for below, within in zip((1, *units), (*units, 1 << 30), strict=True):
        ranks = {
            rank
            for group in groups
            for rank in group
            if any(other // within == rank // within and other // below != rank // below for other in group)
        }
        found.append(max(Counter(rank // below for rank in ranks).values(), default=1))
    return tuple(found)


def blocks(size, stride, devices):
    """Groups of every `stride`-th rank, by the coordinates of each rank."""
    for rank in range(devices):
        if rank // stride % size == 0:
            yield range(rank, rank + size * stride, stride)


@pytest.mark.parametrize(
    ("units", "size", "stride", "devices", "expected"),
    [
        (H100, 8, 1, 64, {(8, 8)}),
        (H100, 16, 4, 64, {(2, 16)}),
        (H100, 2, 8, 32, {(1, 2)}),
        (H100, 12, 1, 12, {(4, 12)}),
        (H100, 6, 2, 12, {(2, 6)}),
        (H100, 10, 1, 10, {(2, 10)}),
        (H100, 5, 2, 10, {(1, 5)}),
        (H100, 3, 3, 9, {(3, 3), (1, 3)}),  # ranks 0, 3, 6 are in one server, 2, 5, 8 are not
        (H100, 3, 8, 24, {(1, 3)}),
        (H100, 6, 1, 48, None),
        (NVL72, 64, 1, 64, {(4, 64, 64)}),
        (NVL72, 64, 1, 128, {(4, 64, 64), (4, 8, 64)}),  # 8 ranks of the second are in the first rack
        (NVL72, 8, 1, 576, None),
        (NVL72, 16, 4, 1024, None),
        (NVL72, 6, 12, 144, None),
        (NVL72, 18, 4, 144, {(1, 18, 18)}),
        (SUPER_NODE, 48, 16, 768, {(1, 48, 48)}),
        (SUPER_NODE, 2, 512, 1024, None),
        ((4, 16, 64), 24, 2, 768, None),
    ],
)
def test_groups_of_a_job_are_counted_by_unit(units, size, stride, devices, expected):
    found = {counted(units, ranks) for ranks in blocks(size, stride, devices)}
    assert placed(every(units, size, stride, devices)) == found
    assert expected is None or found == expected
    shown = counterparts(units, tuple(range(0, size * stride, stride)), devices, devices)
    assert placed(shown) == found
    senders = {sending(units, blocks(size, stride, devices))}
    assert {each.senders for each in shown} == senders


@pytest.mark.parametrize("units", [H100, NVL72, (4, 12, 24)])
def test_all_small_groups_are_counted_as_their_ranks_lie(units):
    for size in range(1, 14):
        for stride in range(1, 14):
            for times in (1, 2, 5):
                devices = times * size * stride
                found = {counted(units, ranks) for ranks in blocks(size, stride, devices)}
                assert placed(every(units, size, stride, devices)) == found, (size, stride, devices)


@pytest.mark.parametrize(
    ("units", "stage", "pp"),
    [(H100, 8, 4), (H100, 4, 4), (H100, 4, 2), (H100, 6, 3), (NVL72, 36, 4), (NVL72, 48, 3), (SUPER_NODE, 144, 8)],
)
def test_pairs_of_stages_are_counted_as_their_ranks_lie(units, stage, pp):
    last = (pp - 1) * stage
    assert placed(pairs(units, stage, last)) == {counted(units, (rank, rank + stage)) for rank in range(last)}
    assert placed(pairs(units, last, stage)) == {counted(units, (rank, rank + last)) for rank in range(stage)}
    for begin in range(0, last, stage):
        of_stage = {counted(units, (rank, rank + stage)) for rank in range(begin, begin + stage)}
        found = counterparts(units, (begin, begin + stage), stage, pp * stage)
        assert placed(found) == of_stage
        sent = [(rank, rank + stage) for rank in range(last)]  # all stages send at once
        assert {each.senders for each in found} == {sending(units, sent)}


@pytest.mark.parametrize("mesh", [Mesh(dp=3, cp=2, tp=2), Mesh(pp=2, dp=6, cp=2, tp=3), Mesh(tp=3, cp=2, dp=5)])
def test_counterparts_of_a_group_are_those_of_the_other_ranks_of_its_stage(mesh):
    for axes in (("tp",), ("dp",), ("cp",), ("dp", "cp"), ("dp", "tp"), ("cp", "tp"), ("dp", "cp", "tp")):
        for stage in range(mesh.pp):
            groups = [tuple(mesh.group(rank, *axes)) for rank in mesh.ranks_of_stage(stage)]
            found = {counted(H100, ranks) for ranks in groups}
            assert all(placed(counterparts(H100, ranks, mesh.stage_size, mesh.size)) == found for ranks in groups)


def test_a_group_that_tiles_no_stage_is_counted_alone():
    assert placed(counterparts(H100, (0, 1, 3), 12, 12)) == {counted(H100, (0, 1, 3))}
    assert placed(counterparts(H100, (1, 6, 9), 0, 0)) == {counted(H100, (1, 6, 9))}


@pytest.mark.parametrize(("size", "stride", "devices"), [(12, 1, 24), (6, 2, 24), (5, 2, 10), (3, 3, 9), (64, 1, 128)])
@pytest.mark.parametrize("name", ["h100", "gb200_nvl72"])
def test_the_closed_form_and_the_simulation_move_data_equally_fast(name, size, stride, devices):
    cluster = read_cluster(CONFIGS / f"clusters/{name}.yaml")
    device, ranks = DeviceModel(cluster, devices, devices), range(0, size * stride, stride)
    bandwidth = group_bandwidth(cluster, size, stride, devices)
    moved = device.collective("AllGather", 2e12, ranks).seconds - device.collective("AllGather", 1e12, ranks).seconds
    assert moved == pytest.approx((size - 1) / size * 1e12 / bandwidth)
    sent = all_to_all(cluster, 2e12, every(cluster.units, size, stride, devices))
    sent -= all_to_all(cluster, 1e12, every(cluster.units, size, stride, devices))
    exchanged = device.collective("AlltoAll", 2e12, ranks).seconds
    exchanged -= device.collective("AlltoAll", 1e12, ranks).seconds
    assert exchanged == pytest.approx(sent)  # the efficiency of all-to-alls is in both, once


def test_the_second_group_of_64_is_in_two_racks_and_all_wait_for_it():
    cluster = read_cluster(CONFIGS / "clusters/gb200_nvl72.yaml")
    inside, network = cluster.links[0], cluster.links[-1]
    assert group_bandwidth(cluster, 64, 1, 64) == inside.rate(1) * 1e9
    assert group_bandwidth(cluster, 64, 1, 128) == pytest.approx(8 * network.rate(72) * 1e9)


@pytest.fixture(scope="module")
def dims():
    return of_decoder(size_config("pangu", "13b"))


@pytest.mark.parametrize(("pp", "is_inside"), [(2, True), (7, True), (8, True), (10, True), (12, True), (16, False)])
def test_stages_of_a_super_node_add_up_tied_words_over_its_links_however_far_apart(dims, pp, is_inside):
    cluster = read_cluster(CONFIGS / "clusters/cloudmatrix384.yaml")
    job = Parallelism(dp=8, tp=8, pp=pp, num_microbatches=16, own_graphs=True)  # stages of 64; 768 devices
    tied, apart = (
        step_time(dataclasses.replace(dims, tied_embedding=tied), job, cluster).gradients for tied in (True, False)
    )
    link = cluster.links[1 if is_inside else 2]
    words = GRADIENT_BYTES * dims.vocab_size * dims.hidden_size / job.tp
    assert tied - apart == pytest.approx(words / (link.rate(1) * 1e9))


@pytest.mark.parametrize(("tp", "pp", "is_inside"), [(36, 2, True), (36, 4, False), (8, 9, True), (8, 10, False)])
def test_a_pipeline_waits_for_the_pair_of_stages_in_two_racks(dims, tp, pp, is_inside):
    racks = read_cluster(CONFIGS / "clusters/gb200_nvl72.yaml")
    one_rack = dataclasses.replace(racks, levels=[Level(devices=4 * tp * pp, gb_per_s=900)])
    job = Parallelism(tp=tp, pp=pp, num_microbatches=16)
    slowdown = step_time(dims, job, racks).pipeline / step_time(dims, job, one_rack).pipeline
    assert slowdown == pytest.approx(1 if is_inside else racks.links[1].rate(1) / racks.links[2].rate(1))


@pytest.mark.parametrize(("tp", "is_inside"), [(2, True), (4, True), (6, False), (8, False)])
def test_stages_of_which_a_server_has_several_send_over_its_own_links(dims, tp, is_inside):
    cluster = read_cluster(CONFIGS / "clusters/h100.yaml")
    one_server = dataclasses.replace(cluster, devices_per_node=8 * tp)
    job = Parallelism(tp=tp, pp=8, num_microbatches=16)
    slowdown = step_time(dims, job, cluster).pipeline / step_time(dims, job, one_server).pipeline
    assert slowdown == pytest.approx(1 if is_inside else cluster.links[0].rate(1) / cluster.links[1].rate(1))
