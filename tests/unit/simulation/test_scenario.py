# SPDX-License-Identifier: Apache-2.0
"""Elastic runs through given faults: their events, worked out by hand."""

import json

import pytest

from sporeloom.cli.simulate import main
from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text

BASE = {
    "steps": 10,
    "meshes": [{"devices": 4, "step_s": 1, "start_s": 5}, {"devices": 2, "step_s": 2, "start_s": 3}],
    **{"detect_s": 0.5, "look_s": 0.25, "stop_s": 0.75, "end_s": 0.1},
}


@pytest.fixture
def simulated(write, capsys):
    def simulate(faults, **more):
        path = write("scenario.yaml", json_text({**BASE, **more, "faults": faults}))
        assert main(["scenario", str(path), "--json"]) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(e["time"], e["event"], e["devices"], e["size"], e["step"]) for e in events]

    return simulate


START, FIRST = (0, "start", 4, 4, 0), (1, "step", 4, 4, 1)


@pytest.mark.parametrize(
    ("faults", "wanted"),
    [
        ([], [(10.1, "end", 4, 4, 10)]),
        ([{"at_s": 3.5, "until_s": 5.5, "slow_rank": 3, "delay_s": 0.5}], [(10.6, "end", 4, 4, 10)]),
        (
            [{"at_s": 3, "until_s": 4, "slow_link": [0, 1], "delay_s": 0.01, "messages": 30}],
            [(10.4, "end", 4, 4, 10)],
        ),
        (  # step 4 is lost; 2 of 3 devices are used; rank 3 is gone, so a slow rank 3 slows nothing
            [{"at_s": 3.5, "kill": 1}, {"at_s": 5, "until_s": 99, "slow_rank": 3, "delay_s": 9}],
            [(4, "lost", 3, 4, 3), (4, "start", 3, 2, 3), (9, "step", 3, 2, 4), (21.1, "end", 3, 2, 10)],
        ),
        (  # two kills at once; a change of devices is noticed in a step, and takes effect after it
            [{"at_s": 3.5, "kill": 1}, {"at_s": 3.75, "kill": 2}, {"at_s": 9.5, "devices": 4}],
            [
                *[(4, "lost", 2, 4, 3), (4, "start", 2, 2, 3), (9, "step", 2, 2, 4), (9.75, "resize", 4, 2, 4)],
                *[(11.75, "start", 4, 4, 5), (17.75, "step", 4, 4, 6), (21.85, "end", 4, 4, 10)],
            ],
        ),
        (  # a change before the first step stops the processes at once; a third device changes nothing
            [{"at_s": 3.5, "kill": 1}, {"at_s": 4.5, "devices": 3}, {"at_s": 5.25, "devices": 4}],
            [
                *[(4, "lost", 3, 4, 3), (4, "start", 3, 2, 3), (5.5, "resize", 4, 2, 3), (5.5, "start", 4, 4, 3)],
                *[(11.5, "step", 4, 4, 4), (17.6, "end", 4, 4, 10)],
            ],
        ),
        (  # a kill while the processes start, until too few are left; nothing comes back
            [{"at_s": 3.5, "kill": 1}, {"at_s": 5, "kill": 1}, {"at_s": 6, "kill": 0}],
            [
                *[(4, "lost", 3, 4, 3), (4, "start", 3, 2, 3), (5.5, "lost", 2, 2, 3), (5.5, "start", 2, 2, 3)],
                *[(6.5, "lost", 1, 2, 3), (6.5, "wait", 1, 2, 3)],
            ],
        ),
    ],
)
def test_events_and_times(simulated, faults, wanted):
    assert simulated(faults) == [(pytest.approx(time), *rest) for time, *rest in (START, FIRST, *wanted)]


def test_a_loss_leads_back_to_the_last_state(simulated):
    found = simulated([{"at_s": 7.5, "kill": 0}], save_every=3)
    assert found[2:4] == [(8, "lost", 3, 4, 7), (8, "start", 3, 2, 6)]


def test_the_loss_after_the_last_restart_ends_the_run(simulated):
    faults = [{"at_s": 3.5, "kill": 1}, {"at_s": 5, "kill": 1}]
    assert simulated(faults, max_restarts=1)[-2:] == [(5.5, "lost", 2, 2, 3), (5.5, "end", 2, 2, 3)]


def test_a_change_of_devices_in_the_last_step_starts_nothing(simulated):
    assert simulated([{"at_s": 9.5, "devices": 2}])[-1][1:] == ("end", 2, 4, 10)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"faults": [{"at_s": 1}]}, "at 1 s: give one of kill, devices, slow_rank and slow_link"),
        ({"faults": [{"at_s": 1, "kill": 0, "delay_s": 1}]}, "delay_s and until_s belong to slow_rank"),
        ({"faults": [{"at_s": 1, "slow_rank": 0}]}, "delay_s and until_s belong to slow_rank"),
        ({"faults": [{"at_s": 1, "slow_link": [1, 1], "delay_s": 1, "until_s": 2, "messages": 1}]}, "takes two ranks"),
        ({"faults": [{"at_s": 1, "slow_link": [1, 0], "delay_s": 1, "until_s": 2}]}, "give `messages` with slow_link"),
        ({"faults": [{"at_s": -1, "kill": 0}]}, "at_s"),
        ({"faults": [{"at_s": 3, "until_s": 3, "slow_rank": 0, "delay_s": 1}]}, "until_s 3 must be later"),
        ({"faults": [{"at_s": 3, "kill": 4}]}, "at 3 s: there is no rank 4; the largest mesh has 4"),
        ({"meshes": []}, "meshes: name at least one"),
        ({"stepz": 3}, "stepz is unknown; did you mean steps"),
    ],
)
def test_what_is_wrong_with_a_scenario_is_reported(write, change, told):
    path = write("scenario.yaml", json_text({**BASE, "faults": [], **change}))
    with pytest.raises(ConfigError, match=told):
        main(["scenario", str(path)])
