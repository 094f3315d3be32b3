# SPDX-License-Identifier: Apache-2.0
"""Compare the simulated step of `tune`'s best strategy with that of the published one, for published runs of dense models.

    python benchmarks/tune.py published_runs.csv --folder /tmp/kept

The file has the columns that `sporeloom plan validate` reads. Model, cluster, devices, batch and number type are the row's;
both strategies run in this package's graphs, and are simulated by the same code. A row says whether its strategy recomputes
and shards; where that is left open, it is as the cost model fills it in.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from report import ROOT, write_report

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.models.config_file import named_model
from sporeloom.models.family import with_precision
from sporeloom.planner.closed_forms import PRECISIONS, bytes_of_mask
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.published import PublishedRun, UnpredictableError, describe, read_rows
from sporeloom.planner.search import PlanRequest
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.config import OptimizerParallel, Pipeline, Recompute, Strategy
from sporeloom.strategy_search.candidates import Candidate, problems
from sporeloom.strategy_search.request import TunedModel, TuneRequest
from sporeloom.strategy_search.scoring import Scored, score
from sporeloom.strategy_search.simulated import GB, Simulated, kept, simulate_all

RUNS = (
    "alpa_ablate_data_parallel_2_2x1",
    "alpa_ablate_zero_3_2_2x1",
    "alpa_ablate_data_parallel_4_4x1",
    "alpa_ablate_data_parallel_8_8x1",
    "mf_r0.8_pangualpha_2_6b_4075",
    "mpt_149_1b_a100_40gb_8_512",
    "bloom_pre_043",
    "mf_r1.3.0_qwen1.5-0.5b_21171",
    "mf_r1.3.0_qwen1.5-1.8b_11241",
    "dlperf_meg_DP_8x1x1_16_1536x16",
    "dlperf_meg_DP_PP_8x1x4_512_1536x16",
    "bloom_pre_045",
    "dlperf_meg_2D_4x2x1_16_1536x16",
    "dlperf_meg_2D_2x4x1_16_1536x16",
    "meg21_t1_1.7b",
    "dlperf_of_DP_16x1x1_32_1536x16",
    "dlperf_meg_MP_1x16x1_16_3072x16",
    "dlperf_meg_2D_2x8x1_16_2304x24",
    "alpa_meg_1.3B_4",
    "bloom_pre_004",
)
"""Rows of the file, the quick ones first: dense models of 6 to 32 layers on 2 to 32 devices."""
MESHES = 12
"""Fewer than the tool scores, so the comparison errs on the side of the published strategy."""
DTYPES = {short: name for name, short in PRECISIONS.items()}


def request_of(run: PublishedRun, folder: Path) -> TuneRequest:
    """The search for a published run's model, cluster and batch."""
    dims, job = run.dims, run.job
    fields = {
        **{"hidden_size": dims.hidden_size, "num_layers": dims.num_layers, "num_heads": dims.num_heads},
        **{"ffn_hidden_size": dims.ffn_size, "seq_len": dims.seq_len, "num_kv_heads": dims.kv_heads},
        **{"vocab_size": -(-dims.vocab_size // 128) * 128, "head_dim": dims.hidden_size // dims.num_heads},
        **{"tied_embedding": dims.tied_embedding, "query_layer": False, "dropout_rate": 0.1 * dims.dropout},
    }
    config, cluster = folder / "model.json", folder / "cluster.yaml"
    config.write_text(json.dumps(fields))
    cluster.write_text(json.dumps({k: v for k, v in dataclasses.asdict(run.cluster).items() if v is not None}))
    size, dtype = "embedded_1b" if dims.gated_mlp else "2.6b", DTYPES[job.precision]
    model = with_precision(named_model("pangu", size, config), dtype, None if job.flash_attention else "plain")
    attention = None if job.flash_attention else "plain"
    model = dataclasses.replace(model, attention=model.attention_on_ascend)
    flash = model.attention == "flash"
    plan = PlanRequest(
        dims=of_decoder(model, has_drops=True),
        cluster=run.cluster,
        devices=job.devices,
        global_batch_size=job.global_batch_size,
        flash_attention=flash,
        mask_bytes=bytes_of_mask(flash),
        precision=job.precision,
    )
    return TuneRequest(plan, TunedModel("pangu", size, config, dtype, attention, model), cluster)


def published(run: PublishedRun) -> Candidate:
    """The row's strategy in this package's terms."""
    job = run.job
    zero = None
    if job.zero and job.replicas > 1:
        again = job.zero == 3 and job.gathers == "microbatch"
        zero = OptimizerParallel(
            reshard_after_forward=again, shard_accumulated_gradients=job.zero == 2 and job.num_microbatches > 1
        )
    recompute = None
    if job.recompute != "none":
        recompute = Recompute(kind=job.recompute, per_stage=job.recomputed_layers and [*job.recomputed_layers])
    pipeline = Pipeline(num_microbatches=job.num_microbatches, virtual_stages=job.virtual_stages)
    strategy = Strategy(
        mesh=job.mesh,
        pipeline=pipeline if job.pp > 1 else Pipeline(),
        optimizer_parallel=zero,
        recompute=recompute,
        sequence_parallel=job.sequence_parallel and job.tp > 1,
    )
    return Candidate(strategy, job.num_microbatches if job.pp == 1 else 1)


def compared(run: PublishedRun, limit: int, folder: Path) -> tuple[str, float | None]:
    """A row of the result, and the ratio of the simulated steps; None: there is none. Simulations are kept in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    request, candidate = request_of(run, folder), published(run)
    if found := problems(request, candidate):
        return f"| {run.id} | {candidate.name} | not possible: {found[0].partition(':')[2].strip()} | | | | |", None
    record, key = folder / "row.json", f"{request.key(candidate)} {limit}"
    if before := kept(record, key, {"line": str, "ratio": list}):
        return before["line"], next(iter(before["ratio"]), None)
    line, ratio = searched(run, request, candidate, limit, folder)
    write_text_atomically(record, json_text({"key": key, "line": line, "ratio": [] if ratio is None else [ratio]}))
    return line, ratio


def searched(
    run: PublishedRun, request: TuneRequest, candidate: Candidate, limit: int, folder: Path
) -> tuple[str, float | None]:
    """The row of a published strategy that is possible."""
    before = Scored(candidate, candidate.name, 0.0, 1.0)
    (theirs,) = simulate_all(request, [before], 1, folder / "published")
    if not theirs.seconds:
        return f"| {run.id} | {candidate.name} | {theirs.problem} | | | | |", None
    tried: list[Simulated] = []
    for one in simulate_all(request, score(request, MESHES).fitting, limit, folder):
        tried.append(one)
        if not one.problem and one.seconds <= theirs.seconds:
            break  # more simulations could only find a faster one
    fits = " (does not fit)" if theirs.problem else ""
    start = f"| {run.id} | {candidate.name} | {theirs.seconds:.4g} s, {theirs.peak_bytes / GB:.1f}{fits} GB |"
    best = min((one for one in tried if not one.problem), key=lambda one: one.seconds, default=None)
    if best is None:
        return f"{start} none of {len(tried)} fits | | {len(tried)} | |", None
    ratio = best.seconds / theirs.seconds
    shown = f"{best.seconds:.4g} s, {best.peak_bytes / GB:.1f} GB"
    return f"{start} {best.name} | {shown} | {len(tried)} | {ratio:.3f} |", ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="CSV file of published runs")
    parser.add_argument("--runs", nargs="+", default=RUNS, help=f"IDs of the rows (default: {len(RUNS)} of them)")
    parser.add_argument("--simulate", type=int, default=12, help="most simulated strategies of each (default: 12)")
    parser.add_argument("--folder", type=Path, help="keeps simulations: the same command continues (default: none)")
    given = parser.parse_args()
    prepare_environment()
    rows = {row["id"]: row for row in read_rows(given.file)}
    lines, ratios, started = [], list[float](), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for run in given.runs:
            try:
                line, ratio = compared(describe(rows[run]), given.simulate, (given.folder or Path(name)) / run)
            except UnpredictableError as error:
                line, ratio = f"| {run} | | not described: {error} | | | | |", None
            except ConfigError as error:
                line, ratio = f"| {run} | | **not finished**: {error.problems[0]} | | | | |", None
            lines.append(line)
            ratios += [] if ratio is None else [ratio]
            print(line, flush=True)
            report(given, lines, ratios, time.perf_counter() - started)


def report(given: argparse.Namespace, lines: list[str], ratios: list[float], seconds: float) -> None:
    """Write what is known so far."""
    slower, unfinished = sum(ratio > 1 for ratio in ratios), given.runs[len(lines) :]
    missing = ["", f"Not run yet: {', '.join(unfinished)}."] if unfinished else []
    head = [
        f"MindSpore {version('mindspore')}. Simulated steps in this package's graphs, no hardware. A search ends with the "
        f"first strategy that fits and is not slower than the published one, or after {given.simulate}; longer searches "
        "could only find faster ones. The last column is the tuned step divided by the published one's.",
        "",
        f"{len(lines)} of {len(given.runs)} runs, {len(ratios)} compared: the tuned strategy is slower in {slower}. "
        f"{seconds / 60:.0f} minutes beside other work.",
        "",
        "| published run | published strategy | simulated | tuned strategy | simulated | simulations | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    chosen = "" if given.runs is RUNS else f" --runs {' '.join(given.runs)}"
    command = f"tune.py {given.file.name} --simulate {given.simulate}{chosen}"
    write_report(
        ROOT / "benchmarks/results/tune.md", "Tuned and published strategies", command, [*head, *lines, *missing]
    )


if __name__ == "__main__":
    main()
