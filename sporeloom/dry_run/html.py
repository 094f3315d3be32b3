# SPDX-License-Identifier: Apache-2.0
"""Draw the report of a dry run as one self-contained HTML file: memory, time, schedule, groups, a searchable table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sporeloom.core.html_report import (
    PALETTE,
    Series,
    bars,
    document,
    folded,
    heading,
    legend,
    margin,
    size,
    table,
    unit_of,
)
from sporeloom.dry_run.memory.drawing import curves
from sporeloom.dry_run.summary import GB, describe_layout
from sporeloom.dry_run.time.drawing import ZOOM, breakdown, drawing
from sporeloom.dry_run.time.report import lines
from sporeloom.dry_run.topology import topology
from sporeloom.strategy.config import V_SHAPED
from sporeloom.strategy.schedule import splits_backward, times

PARTS = {
    "parameter_bytes": Series("parameters", PALETTE[0]),
    "optimizer_bytes": Series("optimizer", PALETTE[1]),
    "gradient_bytes": Series("gradients", PALETTE[2]),
    "computing_copy_bytes": Series("computing copies", PALETTE[4], is_estimated=True),
    "activation_bytes": Series("activations", PALETTE[3], is_estimated=True),
    "auxiliary_bytes": Series("auxiliary models and KV caches", PALETTE[5], is_estimated=True),
}
"""Parts of a rank's memory. Those that are estimated are computed by closed formulas, the others are read from its graph."""
SHOWN_MICROBATCHES = 12
COLORS = {
    "forward": ("#78a8d0", "#a8c8e4", "#5888b8", "#c8dcf0"),
    "backward": ("#90c070", "#b4d89c", "#70a050", "#d0e8c0"),
    "weights": ("#d8b060", "#ecd4a0"),
}
"""Kind of a pass -> colors of the virtual stages of a stage, in turn."""
SEARCH = """const box=document.getElementById('search'),rows=[...document.querySelectorAll('#parameters tr')];
box.oninput=()=>{const words=box.value.toLowerCase().split(' ');
rows.forEach(r=>r.hidden=!words.every(w=>r.textContent.toLowerCase().includes(w)))};"""
READ, CLOSED_FORM, SIMULATED = "read from the graphs", "estimated by closed formulas", "estimated by simulation"


def page(values: dict[str, Any]) -> str:
    """Write the HTML file."""
    job, ranks = values["job"], values["ranks"]
    facts = f"{job['num_parameters']:,} parameters on {job['mesh']}, {job['batch_size']} sequences of {job['seq_len']} tokens"
    sections = [
        f"<h1>{escape(job['model'])}, {escape(job['strategy'])}</h1><p class='note'>{escape(facts)}</p>",
        *_verdict(values),
        heading("Memory of a device"),
        memory_bars(ranks, job.get("memory_gb", 0.0) * GB),
        *_curves(ranks, job),
        *_step(values),
        heading("Pipeline") + _pipeline(job) if len(job["stages"]) > 1 else "",
        heading("Communication", READ) + _communication(ranks, job),
        heading("Parameters", READ),
        "<p><input id='search' type='search' aria-label='words to search for' placeholder='words to search for'></p>",
        _parameters(ranks),
        "".join(f"<p>{escape(text)}</p>" for text in job["advice"]),
        "<h2>Run it</h2><pre>" + escape("\n".join(line.strip() for line in job["run"][1:])) + "</pre>",
    ]
    return document(f"dry run of {job['model']}", sections, SEARCH + ZOOM)


def _verdict(values: dict[str, Any]) -> list[str]:
    """Say whether the fullest rank fits, and how long a step takes."""
    job, found = values["job"], []
    if limit := job.get("memory_gb", 0.0) * GB:
        found.append(f"<p>The fullest device {margin(job['fullest_bytes'], limit)}.</p>")
    if time := values.get("time"):
        interval = time["step_time_interval_s"]
        within = f", {interval[0]:.4g} to {interval[1]:.4g} s by published runs" if interval else ""
        found.append(
            f"<p>A step takes about {time['seconds']:.4g} s{within} on {escape(time['chip'])}: "
            f"{time['tokens_per_s']:,.0f} tokens/s, MFU {time['mfu']:.1%}.</p>"
        )
    return found


def _step(values: dict[str, Any]) -> list[str]:
    time = values.get("time")
    if time is None:
        return []
    first, *_ = lines(time)
    rows = [
        (f"stage {stage['stage']}", part, kind, f"{seconds * 1e3:.2f}")
        for stage in time["stages"]
        for part, kinds in (("busy", stage["busy"]), ("exposed", stage["exposed"]), ("idle", {"": stage["idle_s"]}))
        for kind, seconds in kinds.items()
    ]
    meaning = escape(time["interval"]["meaning"])
    return [
        heading("Time of a step", SIMULATED, is_estimated=True),
        f"<p>{escape(first)}.</p><p class='note'>The interval: {meaning}.</p>",
        f"{drawing(time)}<h3>Where the time goes</h3>{breakdown(time)}",
        f"<details><summary>as a table</summary>{table(('', 'part', 'kind', 'ms'), rows)}</details>",
    ]


def _curves(ranks: Sequence[dict[str, Any]], job: dict[str, Any]) -> list[str]:
    followed = [rank for rank in ranks if "memory" in rank]
    if not followed:
        return []
    rows = [
        (label, one["kind"], one["operator"], size(one["bytes"]), f"{one['bytes'] / rank['memory']['live_bytes']:.1%}")
        for label, rank in folded(followed, _number, lambda rank: repr(rank["memory"]))
        for one in rank["memory"]["largest"]
    ]
    drawn = curves(followed, job.get("memory_gb", 0.0) * GB)
    return [
        heading("Memory over a step", READ),
        drawn,
        "<h3>Largest at the peak</h3>",
        table(("", "kind", "made by", "size", "of the peak"), rows),
    ]


def memory_bars(ranks: Sequence[dict[str, Any]], limit: float = 0.0) -> str:
    """Draw a bar for each rank's memory, equal ranks once; `limit`, bytes of a device, is a line across them.

    Whether a rank fits is said of its timeline, where it has one: that counts more.
    """
    used = {key: series for key, series in PARTS.items() if any(rank[key] for rank in ranks)}
    largest = max(rank["total_bytes"] for rank in ranks)
    unit, name = unit_of(max(largest, limit))
    rows = []
    for label, rank in folded(ranks, _number, lambda rank: tuple(rank[key] for key in (*PARTS, "total_bytes"))):
        text = size(rank["total_bytes"]) + (
            f": {margin(rank['total_bytes'], limit)}" if limit and "memory" not in rank else ""
        )
        rows.append((label, [(series, rank[key]) for key, series in used.items()], text))
    drawn = bars(rows, largest, lambda value: f"{value / unit:.3g} {name}", limit, unit)
    marked = f" Dashed: the {size(limit)} of a device." if limit else ""
    note = f"<p class='note'>Hatched: {CLOSED_FORM}; the rest is {READ}.{marked}</p>"
    return legend(used.values()) + drawn + note


def _number(rank: dict[str, Any]) -> int:
    return int(rank["rank"])


def _pipeline(job: dict[str, Any]) -> str:
    num_stages, virtual, schedule = len(job["stages"]), job["virtual_stages"], job["schedule"]
    fewest = 2 * num_stages if schedule in V_SHAPED else num_stages
    shown = min(job["num_microbatches"], max(SHOWN_MICROBATCHES, fewest))
    rows = [(f"stage {s['stage']}", s["layers"], size(s["total_bytes"]), f"{s['flops']:.3e}") for s in job["stages"]]
    stages_table = table(("", "layers", "memory of a device", "FLOPs of a device"), rows)
    stages, unit, cells = times(num_stages, shown, virtual, schedule), 16, []
    for stage, drawn in enumerate(stages):
        y = 4 + 22 * stage
        cells.append(f"<text x='0' y='{y + 14}'>stage {stage}</text>")
        for (kind, part, i), start, end in drawn:
            width, color = unit * (end - start), COLORS[kind][part % len(COLORS[kind])]
            x = 70 + unit * start
            cells.append(f"<rect x='{x:g}' y='{y}' width='{width - 1:g}' height='18' fill='{color}'/>")
            cells.append(f"<text x='{x + 2:g}' y='{y + 13}' style='font-size:10px;fill:#20262b'>{i}</text>")
    last = max(drawn[-1][2] for drawn in stages)
    note = f"{schedule}, forward blue, backward green, {shown} of {job['num_microbatches']} microbatches"
    note += "; gradients of weights that are computed later yellow" if splits_backward(schedule) else ""
    note += f"; the {virtual} virtual stages of a stage in shades" if virtual > 1 else ""
    picture = f"<svg width='{80 + unit * last:g}' height='{8 + 22 * num_stages}'>{''.join(cells)}</svg>"
    return f"{stages_table}<p>{note}</p><div class='wide'>{picture}</div>"


def _communication(ranks: Sequence[dict[str, Any]], job: dict[str, Any]) -> str:
    rows = [
        (
            label,
            c["kind"],
            c["phase"],
            c["group"],
            len(r["groups"][c["group"]]),
            c["count"],
            size(c["bytes_each"]),
            size(c["bytes_per_step"]),
        )
        for label, r in folded(ranks, _number, lambda rank: repr(rank["collectives"]))
        for c in r["collectives"]
    ]
    head = ("", "kind", "phase", "group", "ranks", "calls a step", "bytes each", "bytes a step")
    first = ranks[0]
    title = f"<h3>Groups of rank {first['rank']} on servers of {job['devices_per_server']} devices</h3>"
    drawn = title + topology(first, job["num_devices"], job["devices_per_server"])
    groups = [
        (f"rank {r['rank']}", name, ", ".join(map(str, group))) for r in ranks for name, group in r["groups"].items()
    ]
    listed = f"<details><summary>groups of each rank</summary>{table(('', 'group', 'ranks'), groups)}</details>"
    return drawn + table(head, rows) + listed


def _parameters(ranks: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            label,
            p["name"],
            str(list(p["global_shape"])),
            str(list(p["local_shape"])),
            describe_layout(p["layout"], p["optimizer_shards"]),
            size(p["num_bytes"]),
            "/".join(p["rule"].split("/")[-2:]),
        )
        for label, r in folded(ranks, _number, lambda rank: repr(rank["parameters"]))
        for p in r["parameters"]
    ]
    return table(("", "name", "global shape", "local shape", "layout", "size", "rule"), rows, "parameters")
