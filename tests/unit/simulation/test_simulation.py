# SPDX-License-Identifier: Apache-2.0
"""Simulated runs against closed forms, and against what must hold for each of them."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from sporeloom.cli.simulate import SimulateConfig, _with_copies, main
from sporeloom.core.errors import ConfigError
from sporeloom.simulation.faults import Component, FaultRates, Faults, read_faults
from sporeloom.simulation.intervals import daly, expected_time, young
from sporeloom.simulation.jitter import slowest_of
from sporeloom.simulation.job import EndlessError, Job, run_job, runs
from sporeloom.simulation.report import simulated

HOUR = 3600.0
JOB = Job(work_s=200 * HOUR, num_servers=16, interval_s=HOUR, pause_s=60.0, restart_s=600.0)


def rates(mtbf_hours, per="job"):
    return FaultRates.of(Faults(components=[Component(name="any", per=per, mtbf_hours=mtbf_hours)]), 8)


def test_without_failures_there_are_pauses_alone():
    done = run_job(JOB, rates(1e12), seed=0, run=0)
    assert done.finish_s == pytest.approx(JOB.work_s + done.paused_s) and not done.interruptions
    assert 199 * 60 <= done.paused_s <= 200 * 60


@pytest.mark.parametrize(("mtbf", "interval"), [(10.0, 1.0), (2.0, 0.5), (50.0, 5.0)])
def test_the_mean_time_is_that_of_dalys_model(mtbf, interval):
    job = dataclasses.replace(JOB, interval_s=interval * HOUR)
    finish = [each.finish_s for each in runs(job, rates(mtbf), 1, 1500)]
    expected = expected_time(job.work_s, job.interval_s, job.pause_s, job.restart_s, mtbf * HOUR)
    error = np.std(finish) / math.sqrt(len(finish))
    assert abs(np.mean(finish) - expected) < 4 * error + 0.002 * expected
    assert error < 0.01 * expected


def test_dalys_interval_is_the_minimum_of_the_mean_time():
    for mtbf in (HOUR, 10 * HOUR, 100 * HOUR):
        tried = np.geomspace(30, 50 * HOUR, 20_000)
        times = [expected_time(1.0, interval, 60.0, 600.0, mtbf) for interval in tried]
        best = tried[int(np.argmin(times))]
        assert daly(60.0, mtbf) == pytest.approx(best, rel=0.01)
        assert young(60.0, mtbf) == pytest.approx(math.sqrt(120 * mtbf))
    assert daly(60.0, 20.0) == 20.0


@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("write_s", [0.0, 1200.0])
def test_all_time_is_accounted_for(spares, shrinks, write_s):
    job = dataclasses.replace(
        JOB, repair_s=5 * HOUR, num_spares=spares, shrinks=shrinks, servers_per_replica=2.0, write_s=write_s
    )
    failures = 0
    for done in runs(job, rates(200.0, "server"), 3, 40):
        parts = job.work_s + done.lost_s + done.paused_s + done.down_s + done.slowed_s
        assert done.finish_s == pytest.approx(parts, rel=1e-9)
        assert min(done.lost_s, done.paused_s, done.down_s, done.slowed_s) >= 0
        assert (done.slowed_s > 0) <= shrinks
        failures += done.interruptions.total()
    assert failures > 200


def test_a_checkpoint_that_is_still_being_written_cannot_be_restored():
    slow = dataclasses.replace(JOB, write_s=0.9 * HOUR)
    lost = [simulated(job, rates(10.0), 5, 200).mean_s["lost"] for job in (JOB, slow)]
    assert lost[1] > 1.5 * lost[0]


def test_copies_in_memory_are_as_good_as_checkpoints_until_a_failure_takes_several_servers():
    """Same failures: of single servers every run is as with a checkpoint at each copy; of racks it goes back to the last one
    that was written."""
    often = dataclasses.replace(JOB, interval_s=300.0, pause_s=1.0)
    copies = dataclasses.replace(often, copies_per_checkpoint=36, write_s=600.0)
    single = rates(400.0, "server")
    assert list(runs(copies, single, 4, 20)) == list(runs(often, single, 4, 20))
    of_racks = FaultRates.of(rack(400.0, 4), 8)
    lost = [simulated(job, of_racks, 4, 100).mean_s["lost"] for job in (often, copies)]
    failures = simulated(copies, of_racks, 4, 100).interruptions["rack"]
    assert lost[0] < 0.1 * lost[1]
    assert lost[1] / failures == pytest.approx(36 * 300 / 2, rel=0.15)


def test_spares_save_the_wait_for_repairs_and_smaller_meshes_most_of_it():
    waiting = dataclasses.replace(JOB, repair_s=10 * HOUR)
    of_servers = rates(400.0, "server")
    kinds = {
        "wait": waiting,
        "spares": dataclasses.replace(waiting, num_spares=8),
        "fewer": dataclasses.replace(waiting, shrinks=True),
    }
    goodput = {name: simulated(job, of_servers, 7, 100).goodput for name, job in kinds.items()}
    assert goodput["wait"] < goodput["fewer"] < goodput["spares"] < 1


@pytest.mark.parametrize(
    ("per_replica", "missing", "speed"),
    [(1.0, 0, 1.0), (1.0, 4, 0.75), (4.0, 1, 0.75), (4.0, 4, 0.75), (4.0, 5, 0.5), (0.5, 1, 15 / 16), (16.0, 1, 0.0)],
)
def test_missing_servers_cost_their_replicas(per_replica, missing, speed):
    assert dataclasses.replace(JOB, servers_per_replica=per_replica).speed(missing) == speed


def rack(mtbf_hours, servers):
    return Faults(components=[Component(name="rack", per="group", servers=servers, mtbf_hours=mtbf_hours)])


def test_a_rack_takes_all_of_its_servers_out_at_once():
    """As many servers fail in all, but together: one restart for four, and four times as many spares."""
    together, alone = FaultRates.of(rack(400.0, 4), 8), rates(400.0, "server")
    assert together.per_second(16) == [pytest.approx(alone.per_second(16)[0] / 4)]
    spared = dataclasses.replace(JOB, repair_s=10 * HOUR, num_spares=4)
    for spares, down_s in ((4, JOB.restart_s), (3, spared.repair_s + JOB.restart_s)):
        job, of = dataclasses.replace(spared, num_spares=spares), FaultRates.of(rack(4000.0, 4), 8)
        once = [done for done in runs(job, of, 1, 40) if done.interruptions.total() == 1]
        assert len(once) > 3
        assert [done.down_s for done in once] == [pytest.approx(down_s)] * len(once)


def test_a_job_that_shrinks_goes_on_without_the_replicas_of_a_rack():
    job = dataclasses.replace(JOB, repair_s=300 * HOUR, shrinks=True, servers_per_replica=2.0)
    one = [d for d in runs(job, FaultRates.of(rack(1600.0, 4), 8), 2, 60) if d.interruptions.total() == 1]
    assert one
    for done in one:  # all work since the failure takes 8 replicas / 6 times as long
        assert done.slowed_s <= done.finish_s / 4
        assert done.slowed_s + done.lost_s + done.paused_s + done.down_s == pytest.approx(done.finish_s - job.work_s)
    assert max(done.slowed_s for done in one) > 0.1 * job.work_s


def slow(slowdown, mtbf_hours=100.0, per="device"):
    return FaultRates.of(
        Faults(components=[Component(name="slow", per=per, mtbf_hours=mtbf_hours, slowdown=slowdown)]), 8
    )


def test_a_slow_server_slows_all_of_the_job_until_it_is_replaced():
    """One that nobody finds; then the mean of many that are found, whose times seldom overlap."""
    job = dataclasses.replace(JOB, interval_s=math.inf)
    (stays,) = runs(job, slow(1.5), 0, 1)  # one in 47 minutes; from the first one on
    assert 1.48 * job.work_s < stays.finish_s < 1.5 * job.work_s and not stays.interruptions
    assert stays.finish_s == pytest.approx(job.work_s + stays.straggled_s)
    found, mtbf_hours = dataclasses.replace(job, detection_s=HOUR), 128 * 100.0  # one in 100 hours, of 128 devices
    done = list(runs(found, slow(1.5, mtbf_hours), 1, 1000))
    cost = HOUR * (1 - 1 / 1.5) + job.pause_s + job.restart_s
    finish = [each.finish_s for each in done]
    number = np.mean([each.interruptions["slow"] for each in done])
    assert np.mean(finish) - job.work_s == pytest.approx(number * cost, rel=0.02)
    assert number == pytest.approx(np.mean(finish) / (100 * HOUR), rel=0.1)


def test_the_slowest_server_alone_counts_and_failures_go_on_beside_it():
    both = Faults(
        components=[
            Component(name="slow", per="server", mtbf_hours=100.0, slowdown=1.2),
            Component(name="slower", per="server", mtbf_hours=1000.0, slowdown=2.0),
            Component(name="gone", per="server", mtbf_hours=500.0),
        ]
    )
    job = dataclasses.replace(JOB, detection_s=5 * HOUR, repair_s=5 * HOUR, num_spares=2, shrinks=True, jitter=1.1)
    met = set()
    for done in runs(job, FaultRates.of(both, 8), 3, 40):
        parts = (done.lost_s, done.paused_s, done.down_s, done.slowed_s, done.straggled_s)
        assert min(parts) >= 0 and done.finish_s == pytest.approx(job.work_s + sum(parts), rel=1e-9)
        assert 0.1 * job.work_s <= done.straggled_s <= 1.2 * (job.work_s + done.lost_s)
        met |= set(done.interruptions)
    assert met == {"slow", "slower", "gone"}


@pytest.mark.parametrize(("number", "deviation"), [(1, 0.3), (8, 0.05), (100, 0.2), (2000, 0.02)])
def test_a_step_waits_for_the_slowest_of_its_servers(number, deviation):
    drawn = np.random.default_rng(1).lognormal(-(deviation**2) / 2, deviation, (1000, number)).max(1)
    error = drawn.std() / math.sqrt(len(drawn))
    assert abs(slowest_of(number, deviation) - drawn.mean()) < 4 * error + 1e-4


def test_nothing_replaces_what_is_slow_of_a_job():
    with pytest.raises(ConfigError, match="file system: nothing replaces what is slow of a job"):
        Component(name="file system", per="job", mtbf_hours=1.0, slowdown=2.0)


def test_the_command_shows_what_finding_slow_servers_buys(write, capsys):
    path = write("faults.yaml", "components: [{name: throttled, per: device, mtbf_hours: 20000, slowdown: 1.4}]")
    flags = [*FLAGS[:2], "--faults", str(path), *FLAGS[4:], "--slow-server-hours", "2", "--step-jitter", "0.02"]
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "no failures; no checkpoints" in said and "\nslow servers stay " in said and " straggled " in said
    assert main([*flags, "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    assert policies["slow servers stay"]["goodput"] < policies["restart"]["goodput"] < 1 / slowest_of(8, 0.02)


def test_the_servers_of_a_group_are_a_number():
    with pytest.raises(ConfigError, match="rack: give `servers`, their number, with `per: group` and only there"):
        Component(name="rack", per="group", mtbf_hours=1.0)
    with pytest.raises(ConfigError, match="gpu: give `servers`"):
        Component(name="gpu", per="device", servers=2, mtbf_hours=1.0)


def test_a_seed_gives_the_same_failures():
    first, again, other = (list(runs(JOB, rates(5.0), seed, 3)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_job_that_never_gets_to_a_checkpoint_is_given_up():
    with pytest.raises(EndlessError):
        run_job(dataclasses.replace(JOB, interval_s=50 * HOUR), rates(1.0), 0, 0)
    assert simulated(dataclasses.replace(JOB, interval_s=50 * HOUR), rates(1.0), 0, 2) is None


def test_the_built_in_faults_are_those_of_the_published_job():
    found = FaultRates.of(read_faults("llama3_h100"), 8).per_second(16_384 // 8)
    assert sum(found) * 54 * 86_400 == pytest.approx(419, abs=0.1)


FLAGS = [
    *("--devices", "64", "--faults", "llama3_h100", "--steps", "100000", "--step-time-s", "5"),
    *("--checkpoint-pause-s", "10", "--restart-s", "600", "--runs", "20"),
]


def test_a_checkpoint_is_written_before_the_next_one_with_copies_too():
    given = {"devices": 8, "faults": "llama3_h100", "steps": 1, "step_time_s": 1.0, "checkpoint_pause_s": 1.0}
    config = SimulateConfig(**given, restart_s=1.0, memory_copy_every_s=40.0, memory_copy_pause_s=1.0)
    copies = [_with_copies(dataclasses.replace(JOB, interval_s=100.0, write_s=write), config) for write in (0.0, 90.0)]
    assert [each.copies_per_checkpoint for each in itertools.chain(*copies)] == [2, 3]


def test_a_window_of_a_run_is_written_as_a_trace(tmp_path, capsys):
    path = tmp_path / "run.json"
    flags = [
        *FLAGS,
        "--repair-hours",
        "24",
        "--spares",
        "1",
        "--memory-copy-every-s",
        "60",
        "--memory-copy-pause-s",
        "1",
    ]
    assert main([*flags, "--trace", str(path), "--trace-from-hours", "10", "--trace-hours", "60", "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    assert list(policies)[-1] == "1 spare servers, copies in memory"
    assert policies["1 spare servers, copies in memory"]["lost_s"] < policies["1 spare servers"]["lost_s"]
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    busy = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] < 3)
    assert busy[0][0] == 10 * HOUR * 1e6 and busy[-1][1] == pytest.approx(70 * HOUR * 1e6)
    assert all(one[1] == pytest.approx(other[0], abs=2) for one, other in itertools.pairwise(busy))  # without gaps
    assert {e["name"] for e in events if e["tid"] == 2} == {e["name"] for e in events if e["tid"] == 3}


def test_the_command_compares_policies(capsys):
    assert main([*FLAGS, "--repair-hours", "24", "--spares", "1", "--replica-devices", "16"]) == 0
    said = capsys.readouterr().out
    for line in ("wait for repairs", "1 spare servers", "fewer replicas", "spares, then fewer replicas"):
        assert f"\n{line} " in said
    assert "by Young" in said and "interruptions of a run: " in said
    assert main([*FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.9 < found["policies"]["restart"]["goodput"] < 1 and found["interval_s"] == pytest.approx(found["daly_s"])


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--devices", "63"], "--devices 63 are not servers of 8"),
        (["--replica-devices", "24"], "--replica-devices 24 does not divide --devices 64"),
        (["--spares", "1"], "--spares has no effect if failed servers are back at once"),
        (["--checkpoint-every-s", "60", "--checkpoint-write-s", "90"], "a checkpoint would begin before the last"),
        (["--faults", "llama3_h10"], "no built-in fault of that name; there are llama3_h100"),
        (["--step-time-s", "0"], "--step-time-s must be"),
        (["--memory-copy-every-s", "60"], "--memory-copy-every-s and --memory-copy-pause-s belong together"),
        (
            ["--memory-copy-every-s", "9e6", "--memory-copy-pause-s", "1"],
            "--memory-copy-every-s 9e+06 is more than half of the",
        ),
        (["--trace-hours", "9"], "--trace-hours has no effect without a trace; give --trace"),
        (["--trace", "t.json", "--trace-from-hours", "999"], "--trace-from-hours 999 is after the end of the run"),
        (
            ["--slow-server-hours", "2"],
            "--slow-server-hours 2 has no effect: no component of llama3_h100 has `slowdown`",
        ),
    ],
)
def test_flags_that_do_not_fit(more, problem):
    with pytest.raises(ConfigError) as caught:
        main([*FLAGS, *more])
    assert problem in "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("components: []", "name at least one"),
        ("components: [{name: a, per: rack, mtbf_hours: 1}]", "per must be"),
        ("components: [{name: a, per: job, mtbf_hours: 0}]", "mtbf_hours"),
        ("components: [{name: a, per: job}]", "mtbf_hours missing"),
        ("components: [{name: a, per: server, mtbf_hours: 1, slowdown: 0.9}]", "slowdown"),
        ("{}", "components missing"),
    ],
)
def test_a_file_of_faults_that_does_not_fit(write, text, problem):
    with pytest.raises(ConfigError, match=problem):
        read_faults(write("faults.yaml", text))
