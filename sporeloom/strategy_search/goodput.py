# SPDX-License-Identifier: Apache-2.0
"""Goodput of a job under faults: replicas that miss a server wait for its repair, so small replicas lose less."""

from __future__ import annotations

import math

from sporeloom.simulation.intervals import daly
from sporeloom.simulation.job import Job
from sporeloom.simulation.report import simulated
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy_search.request import FaultModel

RUNS = 100


def goodput(faults: FaultModel, mesh: Mesh, seconds: float, devices_per_server: int) -> float:
    """Goodput of a job on a mesh with a step of `seconds`; 0: it makes hardly any progress.

    Checkpoints have Daly's interval. Without repair times, or with one replica, the job waits for all servers.
    """
    num_servers = max(1, mesh.size // devices_per_server)
    failures = sum(faults.rates.per_second(num_servers))
    job = Job(
        work_s=faults.steps * seconds,
        num_servers=num_servers,
        interval_s=daly(faults.checkpoint_pause_s, 1 / failures if failures else math.inf),
        pause_s=faults.checkpoint_pause_s,
        restart_s=faults.restart_s,
        repair_s=faults.repair_s,
        shrinks=mesh.dp > 1 and faults.repair_s > 0,
        servers_per_replica=mesh.size / mesh.dp / devices_per_server,
    )
    found = simulated(job, faults.rates, 0, RUNS)
    return found.goodput if found else 0.0
