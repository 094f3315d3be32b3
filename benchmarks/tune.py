# SPDX-License-Identifier: Apache-2.0
"""Compare the simulated step of `tune`'s best strategy with that of the published one, for published runs of dense models.

    python benchmarks/tune.py published_runs.csv --runs dlperf_meg_2D_2x4x1_16_1536x16 meg21_t1_3.6b --simulate 6

The file has the columns that `sporeloom plan validate` reads. Model, cluster, devices, batch and number type are the row's;
both strategies run in this package's graphs, and are simulated by the same code. A row says whether its strategy recomputes
and shards; where that is left open, it is as the cost model fills it in.
"""

import argparse
import dataclasses
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

from report import ROOT, write_report

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
from sporeloom.strategy_search.scoring import score
from sporeloom.strategy_search.simulated import GB, simulate, simulate_all

RUNS = ("dlperf_meg_2D_2x4x1_16_1536x16", "dlperf_meg_2D_4x2x1_16_1536x16", "dlperf_meg_DP_PP_8x1x4_512_1536x16")
MESHES = 40
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


def compared(run: PublishedRun, limit: int) -> str:
    """A row of the result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request, candidate = request_of(run, folder), published(run)
        if found := problems(request, candidate):
            return f"| {run.id} | {candidate.name} | not possible: {found[0].partition(':')[2].strip()} | | | |"
        path = folder / "published.yaml"
        path.write_text(candidate.text(request.model.values))
        theirs = simulate(request, candidate, path)
        scores = score(request, MESHES)
        tuned = [one for one in simulate_all(request, scores.fitting, limit, folder) if not one.problem]
    seconds = theirs["seconds"]
    memory = f"{theirs['peak_bytes'] / GB:.1f}" + (" (does not fit)" if theirs["problem"] else "")
    before = f"| {run.id} | {candidate.name} | {seconds:.4g} s, {memory} GB |"
    if not tuned:
        return f"{before} none of {limit} fits | | |"
    best = min(tuned, key=lambda one: (one.seconds, one.name))
    shown = f"{best.seconds:.4g} s, {best.peak_bytes / GB:.1f} GB"
    return f"{before} {best.name} | {shown} | {best.seconds / seconds:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="CSV file of published runs")
    parser.add_argument("--runs", nargs="+", default=RUNS, help="IDs of the rows (default: three small ones)")
    parser.add_argument("--simulate", type=int, default=6, help="number of simulated strategies of each (default: 6)")
    given = parser.parse_args()
    prepare_environment()
    rows = {row["id"]: row for row in read_rows(given.file)}
    head = [
        f"MindSpore {version('mindspore')}. Simulated steps in this package's graphs, no hardware; {given.simulate} "
        "strategies of each search are simulated. The last column is the tuned step divided by the published one's.",
        "",
        "| published run | published strategy | simulated | tuned strategy | simulated | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines = []
    for number, name in enumerate(given.runs, 1):
        try:
            lines.append(compared(describe(rows[name]), given.simulate))
        except UnpredictableError as error:
            lines.append(f"| {name} | | not described: {error} | | | |")
        print(lines[-1], flush=True)
        command = f"tune.py {given.file.name} --simulate {given.simulate} --runs {' '.join(given.runs[:number])}"
        write_report(ROOT / "benchmarks/results/tune.md", "Tuned and published strategies", command, [*head, *lines])


if __name__ == "__main__":
    main()
