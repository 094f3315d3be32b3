# SPDX-License-Identifier: Apache-2.0
"""List runs and compare their curves.

    sporeloom runs out
    sporeloom runs out/first out/second --metric validation/loss --html runs.html

A FOLDER is a run's, or one whose folders are runs. The plot has a letter for each run, as the table does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sporeloom.core.command_line import Overwrite, argument, option, output, parse_args
from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.files import write_text_atomically
from sporeloom.core.log import print_report
from sporeloom.train.recorded import RecordedRun, find_runs
from sporeloom.train.run_plots import plot, table
from sporeloom.train.runs_page import page


@dataclass(frozen=True, kw_only=True)
class RunsConfig(Overwrite):
    folders: tuple[Path, ...] = argument("folders of runs, or folders that hold those")
    metric: str = option("loss", "metric that is drawn: a key of metrics.jsonl")
    html: Path | None = output(None, "HTML file with the table and all curves (default: none)")


def main(argv: Sequence[str]) -> int:
    config = parse_args(RunsConfig, __doc__, argv)
    runs = find_runs(config.folders)
    _check_metric(runs, config.metric)
    print_report(table(runs))
    if any(run.points(config.metric) for run in runs):
        print_report("\n" + plot(runs, config.metric))
    if config.html:
        write_text_atomically(config.html, page(runs))
        print(f"\ncurves in {config.html}")
    return 0


def _check_metric(runs: Sequence[RecordedRun], metric: str) -> None:
    """Raises:
    ConfigError: no run has such a metric, although there are metrics.
    """
    known = {name: None for run in runs for line in run.lines for name in line if name != "step"}
    if known and metric not in known:
        raise ConfigError(
            f"--metric {metric}: no run has it{did_you_mean(metric, known)}; there are {', '.join(known)}"
        )
