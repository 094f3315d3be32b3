# SPDX-License-Identifier: Apache-2.0
"""Measure this machine and write a cluster file, for estimates of steps on it.

    sporeloom calibrate --launch 4 --out here.yaml
    sporeloom dry-run --time --cluster here.yaml --strategy pangu_tiny_dp2_tp2 --ranks 0

Measures CPU processes, all running at once, as they share the cores: products, passes over memory by operator, launches,
collectives and messages by the number of ranks. Takes minutes; nothing else should run meanwhile. See
docs/how-to/calibrate.md.
"""

from collections.abc import Sequence

from sporeloom.calibration.cluster_file import as_yaml, cluster_of
from sporeloom.calibration.config import CalibrateConfig, check
from sporeloom.calibration.run import WorkerError, levels
from sporeloom.calibration.samples import fitted_rates, summary, table
from sporeloom.core.command_line import parse_args
from sporeloom.core.files import write_text_atomically
from sporeloom.core.log import print_report
from sporeloom.runtime.environment import prepare_environment

NEXT = "sporeloom dry-run --time --cluster {} --ranks 0 --strategy {}"
STRATEGIES = {4: "pangu_tiny_dp2_tp2", 2: "pangu_tiny_dp2", 1: "STRATEGY.yaml  # mesh: {dp: 1}"}


def main(argv: Sequence[str]) -> int:
    config = check(parse_args(CalibrateConfig, __doc__, argv, check))
    prepare_environment()
    found, lines = [], list[str]()
    try:
        for processes, samples in levels(config):
            measured = fitted_rates(samples, processes)
            found.append(measured)
            lines += [f"processes running at once: {processes}", *table(samples), *summary(measured, samples), ""]
    except WorkerError as error:
        return error.code
    write_text_atomically(config.out, as_yaml(cluster_of(found), config.quick))
    strategy = next(name for size, name in STRATEGIES.items() if size <= config.launch)
    print_report("\n".join([*lines, f"cluster file: {config.out}", NEXT.format(config.out, strategy)]))
    return 0
