# SPDX-License-Identifier: Apache-2.0
"""A partitioner with one deliberate fault at a time, and what notices it; writes results/planted_faults.md.

The faults are those of `tests/parity/planted_faults.py`. Who looks: the first step of two small networks on four ranks beside
one device, held against the limits of a certificate and of `check=True`; and the property tests of `tests/unit/partition`, a
part of their cases each.
"""

import inspect
import signal
import sys

import numpy as np
import pytest
from report import ROOT, write_report

sys.path.insert(0, str(ROOT / "tests" / "parity"))
sys.path.insert(0, str(ROOT / "tests" / "unit" / "partition"))

import all_ranks
import test_operators
import test_propagate
import test_random_graphs
import test_redistribute
from first_steps import FirstSteps
from planted_faults import FAULTS, planted
from planted_networks import NETWORKS

from sporeloom.partition import rank_mindir
from sporeloom.partition.grid import DeviceGrid

RESULTS = ROOT / "benchmarks" / "results" / "planted_faults.md"
INPUTS, GRAPHS, LONGEST_S = 8, range(12), 15


def redistribution():
    for degrees in ({"a": 2, "b": 2}, {"a": 3, "b": 2}):
        assert not test_redistribute.off(degrees, 2)[0]


def operators():
    for kind, sample in test_operators.SAMPLES.items():
        draw, random = test_operators.Draw(1), np.random.default_rng(1)
        for case in range(INPUTS):
            grid = DeviceGrid(test_operators.GRIDS[case % len(test_operators.GRIDS)])
            test_operators.check(kind, sample(draw), grid, random)


def graphs():
    """Random ones, then those that show one thing each."""
    test_random_graphs.compare(GRAPHS)
    for name, function in vars(test_propagate).items():
        asked = inspect.signature(function).parameters if inspect.isfunction(function) else {"": None}
        if name.startswith("test_") and set(asked) <= {"monkeypatch"}:
            with pytest.MonkeyPatch.context() as monkeypatch:
                function(**dict.fromkeys(asked, monkeypatch))


WHY = {
    "a stale copy of an updated parameter": "not there: MindSpore reads each state of a parameter by a Load of its own",
    "losses are divided by the number of a rank's own tokens": "not met by these networks, whose losses have no weights",
    "the gradient of a weight that stages share is of one stage alone": "not met by these networks, which have one stage",
    "a number is not added up over stages": "not met by these networks, which have one stage",
    "a weight stays stale: its update is lost": "not met by these networks, whose optimizer is one operator",
    "columns of one-hot rows count from the first of all": "not met by these networks, which take parts of whole rows",
}
PROPERTIES = (redistribution, operators, graphs)


def notices(function):
    """Whether it fails, or does not end."""
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST_S)
    try:
        function()
    except (Exception, pytest.fail.Exception):
        return True
    finally:
        signal.alarm(0)
    return False


def too_long(*_):
    raise TimeoutError(f"not done in {LONGEST_S} s")


def main():
    first_steps, rows, missed = FirstSteps(), [], []
    assert not any(any(of.values()) for of in first_steps.differences().values())
    assert not any(map(notices, PROPERTIES))
    for name in FAULTS:
        with planted(name):
            found = first_steps.differences()
            properties = [
                FAULTS[name][0] not in (rank_mindir._Writer, all_ranks) and notices(each) for each in PROPERTIES
            ]
        by_step = {who: any(found[net][who] for net in NETWORKS) for who in ("certificate", "check")}
        shown = next((f"{net}: {found[net]['certificate']}" for net in NETWORKS if found[net]["certificate"]), "")
        caught = [*by_step.values(), *properties]
        missed += [name] if not any(caught) else []
        rows.append((name, caught, shown))
        print(name, caught, shown, flush=True)
    write_report(RESULTS, "Planted faults", "planted_faults.py", list(lines_of(rows, missed)))


def lines_of(rows, missed):
    by = [sum(caught[place] for _, caught, _ in rows) for place in range(2 + len(PROPERTIES))]
    yield (
        f"{len(rows)} faults of the partitioner, one at a time. **Caught by the first step of two small networks as a "
        f"certificate compares it: {by[0]}; as `check=True` does: {by[1]}; by the property tests: "
        f"{sum(any(caught[2:]) for _, caught, _ in rows)}; by nothing: {len(missed)}.** Of the property tests, which are "
        "run in part here, redistribution is told to look at steps alone, operators at handlers, graphs at all but what "
        "is written for a rank."
    )
    yield ""
    yield "| fault | certificate | check=True | redistribution | operators | graphs | what a certificate says first |"
    yield "|---|---|---|---|---|---|---|"
    for name, caught, shown in rows:
        yield f"| {name} | {' | '.join('caught' if each else '-' for each in caught)} | {shown or WHY.get(name, '-')} |"


if __name__ == "__main__":
    main()
