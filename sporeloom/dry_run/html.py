# SPDX-License-Identifier: Apache-2.0
"""Draw the report of a dry run as one self-contained HTML file: stages, memory, schedule, a searchable table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sporeloom.dry_run.memory.shown import curves
from sporeloom.dry_run.summary import GB, describe_layout
from sporeloom.dry_run.time.drawing import drawing
from sporeloom.dry_run.time.report import lines
from sporeloom.strategy.config import V_SHAPED
from sporeloom.strategy.schedule import splits_backward, times

PARTS = (
    ("parameter_bytes", "parameters", "#4878a8"),
    ("optimizer_bytes", "optimizer", "#78a850"),
    ("gradient_bytes", "gradients", "#d8a038"),
    ("computing_copy_bytes", "computing copies (closed formula)", "#9870b0"),
    ("activation_bytes", "activations (closed formula)", "#c85850"),
    ("auxiliary_bytes", "auxiliary models and KV caches (closed formula)", "#78a0a8"),
)
"""Parts of a rank's memory: key, name, color. Those without a closed formula are read from its graph."""
SHOWN_MICROBATCHES = 12
COLORS = {
    "forward": ("#78a8d0", "#a8c8e4", "#5888b8", "#c8dcf0"),
    "backward": ("#90c070", "#b4d89c", "#70a050", "#d0e8c0"),
    "weights": ("#d8b060", "#ecd4a0"),
}
"""Kind of a pass -> colors of the virtual stages of a stage, in turn."""
STYLE = """body{font:14px system-ui,sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.2em .6em;border-bottom:1px solid #ddd}td.n{text-align:right}input{width:30em;padding:.4em}
h2{margin-top:2em}.key{display:inline-block;width:1em;height:1em;margin:0 .3em 0 1em;vertical-align:middle}"""
SEARCH = """const box=document.getElementById('search'),rows=[...document.querySelectorAll('#parameters tr')];
box.oninput=()=>{const words=box.value.toLowerCase().split(' ');
rows.forEach(r=>r.hidden=!words.every(w=>r.textContent.toLowerCase().includes(w)))}"""


def page(values: dict[str, Any]) -> str:
    """Write the HTML file."""
    job, ranks = values["job"], values["ranks"]
    facts = f"{job['num_parameters']:,} parameters on {job['mesh']}, {job['batch_size']} sequences of {job['seq_len']} tokens"
    sections = [
        f"<h1>{escape(job['model'])}, {escape(job['strategy'])}</h1><p>{escape(facts)}</p>",
        "<h2>Memory of each rank, GB</h2>" + memory_bars(ranks),
        *_curves(ranks, job),
        *_step(values),
        "<h2>Pipeline</h2>" + _pipeline(job) if len(job["stages"]) > 1 else "",
        "<h2>Collectives of a step</h2>" + _collectives(ranks),
        "<h2>Groups</h2>" + _groups(ranks),
        "<h2>Parameters</h2><p><input id='search' placeholder='words to search for'></p>" + _parameters(ranks),
        "".join(f"<p>{escape(text)}</p>" for text in job["advice"]),
        "<pre>" + escape("\n".join(job["run"])) + "</pre>",
    ]
    title = escape(f"dry run of {job['model']}")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
        f"<body>{''.join(sections)}<script>{SEARCH}</script></body></html>\n"
    )


def _step(values: dict[str, Any]) -> list[str]:
    time = values.get("time")
    if time is None:
        return []
    first, *_ = lines(time)
    rows = [
        (stage["stage"], part, kind, f"{seconds * 1e3:.2f}")
        for stage in time["stages"]
        for part, kinds in (("busy", stage["busy"]), ("exposed", stage["exposed"]), ("idle", {"": stage["idle_s"]}))
        for kind, seconds in kinds.items()
    ]
    return ["<h2>A step</h2>", f"<p>{escape(first)}</p>", drawing(time), table(("stage", "", "kind", "ms"), rows)]


def _curves(ranks: Sequence[dict[str, Any]], job: dict[str, Any]) -> list[str]:
    measured = [rank for rank in ranks if "memory" in rank]
    if not measured:
        return []
    rows = [
        (f"rank {rank['rank']}", one["kind"], one["operator"], one["bytes"])
        for rank in measured
        for one in rank["memory"]["largest"]
    ]
    drawn = curves(measured, job.get("memory_gb", 0.0) * GB)
    return ["<h2>Memory over the step</h2>", drawn, table(("", "kind", "alive at the peak", "bytes"), rows)]


def memory_bars(ranks: Sequence[dict[str, Any]], limit: float = 0.0) -> str:
    """Draw a bar for each rank's memory; `limit`, bytes of a device, is a line across them."""
    largest = max(limit, *(rank["total_bytes"] for rank in ranks))
    bars = []
    for row, rank in enumerate(ranks):
        x, y = 90.0, 6 + 26 * row
        bars.append(f"<text x='0' y='{y + 15}'>rank {rank['rank']}</text>")
        for key, name, color in PARTS:
            width = 640 * rank[key] / largest
            tip = f"<title>{name} {rank[key] / GB:.3f} GB</title>"
            bars.append(f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='20' fill='{color}'>{tip}</rect>")
            x += width
        bars.append(f"<text x='{x + 6:.1f}' y='{y + 15}'>{rank['total_bytes'] / GB:.2f}</text>")
    if limit:
        x = 90 + 640 * limit / largest
        bars.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='0' y2='{12 + 26 * len(ranks)}' stroke='#222' stroke-dasharray='4'/>"
        )
    keys = "".join(f"<span class='key' style='background:{color}'></span>{name}" for _, name, color in PARTS)
    return f"<p>{keys}</p><svg width='840' height='{12 + 26 * len(ranks)}'>{''.join(bars)}</svg>"


def _pipeline(job: dict[str, Any]) -> str:
    num_stages, virtual, schedule = len(job["stages"]), job["virtual_stages"], job["schedule"]
    fewest = 2 * num_stages if schedule in V_SHAPED else num_stages
    shown = min(job["num_microbatches"], max(SHOWN_MICROBATCHES, fewest))
    rows = [(s["stage"], s["layers"], f"{s['total_bytes'] / GB:.2f} GB", f"{s['flops']:.3e}") for s in job["stages"]]
    stages_table = table(("stage", "layers", "memory of a device", "FLOPs of a device"), rows)
    stages, unit, cells = times(num_stages, shown, virtual, schedule), 16, []
    for stage, drawn in enumerate(stages):
        y = 4 + 22 * stage
        cells.append(f"<text x='0' y='{y + 14}'>stage {stage}</text>")
        for (kind, part, i), start, end in drawn:
            width, color = unit * (end - start), COLORS[kind][part % len(COLORS[kind])]
            x = 70 + unit * start
            cells.append(f"<rect x='{x:g}' y='{y}' width='{width - 1:g}' height='18' fill='{color}'/>")
            cells.append(f"<text x='{x + 2:g}' y='{y + 13}' font-size='10'>{i}</text>")
    last = max(drawn[-1][2] for drawn in stages)
    note = f"{schedule}, forward blue, backward green, {shown} of {job['num_microbatches']} microbatches"
    note += "; gradients of weights that are computed later yellow" if splits_backward(schedule) else ""
    note += f"; the {virtual} virtual stages of a stage in shades" if virtual > 1 else ""
    size = f"width='{80 + unit * last:g}' height='{8 + 22 * num_stages}'"
    return f"{stages_table}<p>{note}</p><div style='overflow-x:auto'><svg {size}>{''.join(cells)}</svg></div>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "") -> str:
    """Write a table of texts and numbers; `name` is its body's id."""

    def cell(value: Any) -> str:
        if isinstance(value, int):
            return f"<td class='n'>{value:,}</td>"
        return f"<td>{escape(str(value))}</td>"

    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody id='{name}'>{body}</tbody></table>"


def _collectives(ranks: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"rank {r['rank']}",
            c["kind"],
            c["phase"],
            len(r["groups"][c["group"]]),
            c["count"],
            c["bytes_each"],
            c["bytes_per_step"],
        )
        for r in ranks
        for c in r["collectives"]
    ]
    return table(("", "kind", "phase", "ranks", "times", "bytes each", "bytes a step"), rows)


def _groups(ranks: Sequence[dict[str, Any]]) -> str:
    rows = [
        (f"rank {r['rank']}", name, ", ".join(map(str, group))) for r in ranks for name, group in r["groups"].items()
    ]
    return table(("", "group", "ranks"), rows)


def _parameters(ranks: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"rank {r['rank']}",
            p["name"],
            str(list(p["global_shape"])),
            str(list(p["local_shape"])),
            describe_layout(p["layout"], p["optimizer_shards"]),
            p["num_bytes"],
            p["rule"],
        )
        for r in ranks
        for p in r["parameters"]
    ]
    return table(("", "name", "global shape", "local shape", "layout", "bytes", "rule"), rows, "parameters")
