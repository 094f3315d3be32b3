# SPDX-License-Identifier: Apache-2.0
"""Fits of measurements that were made up from known latencies and rates, with noise."""

import dataclasses
import random

import numpy as np
import pytest

from sporeloom.calibration.cluster_file import as_yaml, cluster_of
from sporeloom.calibration.fit import line, spread, through_origin
from sporeloom.calibration.samples import (
    AT_ONCE,
    ATTENTION,
    COLLECTIVE,
    LAUNCH,
    OPERATOR,
    PADDING,
    PRODUCT,
    REFERENCE,
    WAIT_S,
    Sample,
    fitted_rates,
    read_samples,
    summary,
    table,
    whole_rows,
)
from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.planner.cluster import read_cluster
from sporeloom.runtime.cpu.transport import Collectives

LAUNCH_S, GRAPH_S = 40e-6, 1e-3
FLOPS, ATTENTION_FLOPS, BYTES = 30e9, 20e9, 5e9
RATES = {REFERENCE: (5e-6, BYTES), "GeLU": (20e-6, 0.2e9), "GeLUGrad": (30e-6, 0.4e9)}
"""Operator -> latency and bytes/s; the last one runs along with the one before."""
RING = {2: (150e-6, 1e9), 4: (400e-6, 0.4e9)}


def planted(noise=0.03, slowdown=1.0, rings=RING, seed=1, at_once=1, padding=PADDING):
    """Samples of a machine with the figures above, `slowdown` times as slow, that runs `at_once` operators at once."""
    rng = random.Random(seed)

    def sample(group, kind, one, times=4, num_bytes=0, **more):
        more |= {} if group == COLLECTIVE else {"padding": padding}
        called = (
            times * one + more.get("padding", 0) * LAUNCH_S + (GRAPH_S if more.get("in_graph", True) else 0)
        ) * slowdown
        seconds = [called * rng.gauss(1, noise) for _ in range(15)]
        return Sample(group=group, kind=kind, times=times, num_bytes=num_bytes, seconds=seconds, **more)

    def passes(kind, num_bytes):
        latency, rate = RATES[kind]
        return LAUNCH_S + latency + num_bytes / rate

    found = [sample(LAUNCH, REFERENCE, LAUNCH_S, times) for times in (4, 96, 288)]
    found.append(sample(AT_ONCE, "waiting", WAIT_S / at_once / slowdown, 6))  # waiting needs no cores
    for group, rate in {PRODUCT: FLOPS, ATTENTION: ATTENTION_FLOPS}.items():
        for side in (256, 512, 1024):
            flops, moved = 2 * side**3, 12 * side**2
            found.append(sample(group, str(side), LAUNCH_S + flops / rate + moved / BYTES, 6, moved, flops=flops))
    for size in (1 << 16, 1 << 20, 1 << 23):
        found += [sample(OPERATOR, kind, passes(kind, size), num_bytes=size) for kind in (REFERENCE, "GeLU")]
        both = passes("GeLU", size) + passes("GeLUGrad", 2 * size)
        found.append(sample(OPERATOR, "GeLUGrad", both, num_bytes=2 * size, also={"GeLU": size}))
        for ranks, (latency, rate) in rings.items():
            one = latency + size / rate
            found.append(sample(COLLECTIVE, "AllReduce", one, 2, size, ranks=ranks))
            found.append(sample(COLLECTIVE, "Message", one / 2, 1, size, ranks=ranks, in_graph=False))
    return found


def test_planted_latencies_and_rates_are_found_again():
    found = fitted_rates(planted(), 4)
    assert found.launch == pytest.approx(LAUNCH_S, rel=0.1)
    assert found.graph == pytest.approx(GRAPH_S, rel=0.15)
    assert found.flops == pytest.approx(FLOPS, rel=0.05)
    assert found.attention_flops == pytest.approx(ATTENTION_FLOPS, rel=0.05)
    for kind, (_, rate) in RATES.items():
        assert found.operators[kind].bytes_per_s == pytest.approx(rate, rel=0.1)
    for ranks, (latency, rate) in RING.items():
        assert found.collectives["AllReduce", ranks].latency == pytest.approx(latency, rel=0.3)
        assert found.collectives["AllReduce", ranks].bytes_per_s == pytest.approx(rate, rel=0.1)
        assert found.collectives["Message", ranks].bytes_per_s == pytest.approx(2 * rate, rel=0.1)


@pytest.mark.parametrize("padding", [0, PADDING])
def test_without_noise_they_are_found_exactly(padding):
    found = fitted_rates(planted(noise=0.0, padding=padding), 4)
    assert (found.launch, found.graph) == pytest.approx((LAUNCH_S, GRAPH_S))
    assert {kind: tuple(rate) for kind, rate in found.operators.items()} == {
        kind: pytest.approx(values) for kind, values in RATES.items()
    }
    assert found.collectives["Message", 2] == pytest.approx((75e-6, 2e9))
    assert found.flops == pytest.approx(FLOPS)


def test_the_written_file_is_read_back_and_costs_what_was_measured(tmp_path):
    alone, two = (
        fitted_rates(planted(0.0, rings={}), 1),
        fitted_rates(planted(0.0, slowdown=2.0, rings={2: RING[2]}), 2),
    )
    path = tmp_path / "here.yaml"
    written = cluster_of([alone, two])
    path.write_text(as_yaml(written, quick=False), encoding="utf-8")
    cluster = read_cluster(path)
    assert cluster == written
    assert path.read_text(encoding="utf-8").startswith("# Measured by sporeloom calibrate on ")
    for processes, slowdown in {1: 1, 2: 2}.items():
        device = DeviceModel(cluster.with_running(processes))
        assert device.launch == pytest.approx(slowdown * LAUNCH_S, rel=1e-3)
        assert device.graph == pytest.approx(slowdown * GRAPH_S, rel=1e-3)
        for in_float32 in (True, False):
            product = device.product(1e9, 1e6, in_float32)
            assert product == pytest.approx(slowdown * (1e9 / FLOPS + 1e6 / BYTES), rel=1e-3)
        latency, rate = RATES["GeLU"]
        assert device.operator("GeLU", 1e6) == pytest.approx(slowdown * (latency + 1e6 / rate), rel=1e-3)
        assert device.operator("Unmeasured", 1e6) == pytest.approx(slowdown * 1e6 / BYTES, rel=1e-3)
    latency, rate = RING[2]
    assert device.collective("AllReduce", 1e6, [0, 1]).seconds == pytest.approx(2 * (latency + 1e6 / rate), rel=1e-3)


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
@pytest.mark.parametrize("slowdown", [1.0, 4.0])
def test_operators_that_wait_tell_how_many_run_at_once(at_once, slowdown):
    found = fitted_rates(planted(slowdown=slowdown, at_once=at_once), 4)
    assert found.at_once == at_once
    assert DeviceModel(cluster_of([found])).one_at_a_time == (at_once == 1)


def test_a_machine_that_is_far_too_slow_still_runs_one_operator():
    slow = [dataclasses.replace(s, seconds=[9.0]) if s.group == AT_ONCE else s for s in planted()]
    assert fitted_rates(slow, 4).at_once == 1


def test_a_kind_that_was_not_measured_takes_what_a_ring_of_the_measured_speed_takes():
    two = fitted_rates(planted(0.0, rings={2: (0.0, 1e9)}), 2)
    device = DeviceModel(cluster_of([fitted_rates(planted(0.0, rings={}), 1), two]).with_running(2))
    assert device.collective("AllGather", 1e9, [0, 1]).seconds == pytest.approx(0.5, rel=0.01)


def test_a_fit_never_has_a_negative_part():
    assert line([1, 2], [3.0, 2.0])[1] == 0
    assert line([1, 2], [1.0, 3.0])[0] == 0
    assert line([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1, 2))
    assert through_origin([1, 2], [3.0, 6.0], [1.0, 1.0]) == pytest.approx(3)
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(0.25)


def with_flat(samples, *kinds):
    """The samples, with times of some kinds that do not depend on the size."""
    return [dataclasses.replace(s, seconds=[0.01]) if s.kind in kinds and s.group != LAUNCH else s for s in samples]


def test_what_is_lost_in_noise_is_left_out_by_name_or_refused():
    samples = with_flat(planted(), "GeLUGrad", "Message")
    found = fitted_rates(samples, 4)
    assert found.operators.keys() == {REFERENCE, "GeLU"}
    assert "left out, lost in noise: GeLUGrad" in summary(found, samples)
    assert "left out, lost in noise: Message of 4" in summary(found, samples)
    with pytest.raises(ConfigError, match=r"bandwidth of memory: .* run calibrate again while the machine is idle"):
        fitted_rates(with_flat(planted(), REFERENCE), 4)
    falling = [dataclasses.replace(s, seconds=[1e-9]) if s.group == PRODUCT else s for s in planted()]
    with pytest.raises(ConfigError, match="rate of product"):
        fitted_rates(falling, 4)


def test_a_gradient_is_left_out_with_the_operator_that_runs_along_with_it():
    samples = with_flat(planted(), "GeLU")
    found = fitted_rates(samples, 4)
    assert found.operators.keys() == {REFERENCE}
    for kind in ("GeLU", "GeLUGrad"):
        assert f"left out, lost in noise: {kind}" in summary(found, samples)


def test_links_never_get_the_rate_of_memory_because_all_reduces_are_lost_in_noise():
    with pytest.raises(ConfigError, match="rate of all-reduces: times did not grow"):
        fitted_rates(with_flat(planted(), "AllReduce"), 4)
    some = [s for s in planted(0.0) if (s.kind, s.ranks) != ("AllReduce", 4)]
    assert fitted_rates(some, 4).ring_bytes_per_s == pytest.approx(RING[2][1])


class Alone(Collectives):
    """A rank to which the others send what it sends to itself."""

    def __init__(self, ranks):
        self.group = list(range(ranks))

    def exchange(self, parts, phase=""):
        assert len({part.shape for part in parts}) == 1
        return list(parts)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 12, 32])
def test_tensors_of_collectives_have_equal_parts_for_any_number_of_ranks(ranks):
    for asked in (16, 256, 1024, 4096):
        rows = whole_rows(asked, ranks)
        assert asked <= rows < asked + ranks
        assert rows == asked or ranks not in (2, 4)
        x = np.ones((rows, 1), np.float32)
        assert Alone(ranks).reduce_scatter(x).shape == (rows // ranks, 1)
        assert Alone(ranks).all_to_all(x, 0, 0).shape == x.shape
        assert Alone(ranks).all_gather(x[: rows // ranks]).shape == x.shape


def test_samples_survive_json_and_the_table_shows_each():
    samples = planted()
    assert read_samples(dataclasses.asdict(sample) for sample in samples) == samples
    lines = table(samples)
    assert len(lines) == 1 + len(samples)
    assert all(text.endswith("%") for text in lines[1:])
