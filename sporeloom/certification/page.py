# SPDX-License-Identifier: Apache-2.0
"""Write a certificate as one self-contained HTML file: the verdict, and the results behind it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sporeloom.dry_run.html import memory_bars, table
from sporeloom.dry_run.summary import GB
from sporeloom.strategy.certificate import CERTIFIED, COVERS

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60em;padding:2em;color:#222}
h1{font-weight:600;margin-bottom:.2em}h2{margin-top:2.2em;border-bottom:2px solid #eee}
.verdict{padding:1em 1.5em;border-radius:.6em;color:#fff;margin:1.5em 0}.verdict b{font-size:1.6em}
.certified{background:#2e7d4f}.refused{background:#b03a3a}.ok{color:#2e7d4f}.wrong{color:#b03a3a}
table{border-collapse:collapse;width:100%;font-size:.92em}
td,th{text-align:left;padding:.25em .7em;border-bottom:1px solid #e4e4e4}
td.n{text-align:right;font-variant-numeric:tabular-nums}code{background:#f3f3f3;padding:.1em .3em;border-radius:.2em}
.key{display:inline-block;width:1em;height:1em;margin:0 .3em 0 1em;vertical-align:middle}
.note{color:#666}pre{white-space:pre-wrap}svg text{font:12px system-ui,sans-serif}"""
COLORS = ("#4878a8", "#c85850", "#78a850", "#9870b0", "#d8a038", "#50a0a0")
QUESTIONS = {
    "strategy": "Do mesh, rules and model fit each other?",
    "proof": "Does it train as on one device, scaled down?",
    "shards": "Do ranks of the full mesh hold the shards that the rules define?",
    "memory": "Does every stage fit the chip?",
}


def page(values: dict[str, Any]) -> str:
    """Write the HTML file."""
    verdict, mesh = values["verdict"], values[COVERS]["strategy"]["mesh"]
    degrees = " x ".join(f"{axis} {mesh[axis]}" for axis in mesh["order"] if mesh[axis] > 1)
    why = "".join(f"<br>{escape(reason)}" for reason in values["reasons"])
    facts = f"{escape(values['strategy_file'])} &middot; {values['made']}, {values['machine']}"
    sections = [
        f"<h1>{escape(values['subject'])} on {degrees}</h1><p class='note'>{facts}</p>",
        f"<div class='verdict {verdict}'><b>{verdict.capitalize()}.</b> {_summary(values)}{why}</div>",
        "<h2>Checks</h2>" + _questions(values),
        "<h2>The proof</h2>" + _proof(values),
    ]
    if "faults" in values:
        sections.append("<h2>Planted faults</h2>" + _faults(values["faults"]))
    if "full_size" in values:
        sections += [
            "<h2>Memory of a device, GB</h2>" + _memory(values),
            "<h2>Collectives of a step</h2>" + _bytes(values),
        ]
    if values.get("ranks"):
        sections.append("<h2>Ranks of the full mesh</h2>" + _ranks(values["ranks"]))
    if "estimate" in values:
        sections.append("<h2>Time of a step</h2>" + _time(values))
    sections.append("<h2>What it covers</h2>" + _covered(values))
    if values["verdict"] == CERTIFIED and "run" in values:
        sections.append(f"<h2>Run it</h2><pre>{escape(chr(10).join(values['run']))}</pre>")
    title = escape(f"{verdict}: {values['subject']}")
    head = f"<meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'>{head}<body>{''.join(sections)}</body></html>\n"


def _summary(values: dict[str, Any]) -> str:
    if values["verdict"] != CERTIFIED:
        return "Do not book the cluster yet."
    if "estimate" not in values:
        return "It trains as on one device."
    estimate = values["estimate"]
    if "rows_per_s" in estimate:
        return f"It trains as on one device; a step has {estimate['step_time_s']:.3g} s of work (no interval known)."
    return (
        f"It trains as on one device and fits. Estimated: a step of {estimate['step_time_s']:.3g} s "
        f"({interval_text(estimate)}), {estimate['tokens_per_s']:,.0f} tokens/s."
    )


def _questions(values: dict[str, Any]) -> str:
    rows = []
    for name, problems in values["checks"].items():
        mark = "<span class='wrong'>&#10008; no</span>" if problems else "<span class='ok'>&#10004; yes</span>"
        rows.append(f"<tr><td>{QUESTIONS[name]}</td><td>{mark}</td><td>{escape('; '.join(problems[:3]))}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _proof(values: dict[str, Any]) -> str:
    proof = values["proof"]
    small = values.get("small_model")
    what = (
        f"A model of {small['num_layers']} layers, {small['hidden_size']} wide, in float32"
        if small
        else "The network itself"
    )
    text = f"<p>{what}, trained for 5 steps of AdamW and 5 of SGD on real processes, and on one device.</p>"
    kinds = [kind for kind in proof["limits"] if any(kind in mesh["differences"] for mesh in proof["meshes"])]
    rows = []
    for mesh in proof["meshes"]:
        found = [f"{mesh['differences'][k]:.1e}" if k in mesh["differences"] else "" for k in kinds]
        rows.append([mesh["mesh"], *found, mesh["failure"] or "equal"])
    limits = ["at most", *(f"{proof['limits'][kind]:.0e}" for kind in kinds), ""]
    return text + _curves(proof) + table(["mesh", *kinds, ""], [*rows, limits])


def _faults(faults: dict[str, Any]) -> str:
    """Write how many of the faults that were planted in the program the proof caught."""
    counts = ("planted", "caught", "escaped", "without effect")
    rows = [[row["kind"], *(row[count] for count in counts)] for row in faults["kinds"] if row["planted"]]
    missing = [row["kind"] for row in faults["kinds"] if not row["planted"]]
    escapes = [each for each in faults["faults"] if each["outcome"] == "escaped"]
    said = ("{kind}: {operator}, {mesh}: {details}".format_map(each) for each in escapes)
    listed = "".join(f"<li>{escape(line)}</li>" for line in said)
    text = f"<p>One fault at a time was planted in the program under proof: {faults['caught']} of {faults['planted']} caught."
    text += f" No operator fits: {escape('; '.join(missing))}.</p>" if missing else "</p>"
    return text + table(["fault", *counts], rows) + (f"<p>Escaped:</p><ul>{listed}</ul>" if escapes else "")


def _curves(proof: dict[str, Any]) -> str:
    """Draw losses over the steps: circles for one device, lines for the meshes."""
    expected = proof["one_device_losses"]
    series = [mesh["losses"] for mesh in proof["meshes"] if mesh["losses"]]
    finite = [x for losses in [expected, *series] for x in losses if abs(x) < 1e9]
    if not expected or not finite:
        return ""
    low, high = min(finite), max(finite)
    width, height, half = 720, 180, len(expected) // 2

    def position(step: int, loss: float) -> tuple[float, float]:
        loss = min(max(loss, low), high) if loss == loss else high
        x = 20 + (step % half) * (width / 2 - 60) / max(1, half - 1) + (width / 2 if step >= half else 0)
        return x, 30 + (high - loss) / max(high - low, 1e-9) * (height - 50)

    drawn = [f"<text x='20' y='14'>AdamW</text><text x='{width / 2 + 20}' y='14'>SGD</text>"]
    for number, losses in enumerate(series):
        for part in (range(half), range(half, len(losses))):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (position(step, losses[step]) for step in part))
            color = COLORS[number % len(COLORS)]
            drawn.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2' opacity='.7'/>")
    for step, loss in enumerate(expected):
        x, y = position(step, loss)
        drawn.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='none' stroke='#222'><title>{loss:.6f}</title></circle>"
        )
    keys = "".join(
        f"<span class='key' style='background:{COLORS[n % len(COLORS)]}'></span>{escape(mesh['mesh'])}"
        for n, mesh in enumerate(mesh for mesh in proof["meshes"] if mesh["losses"])
    )
    picture = f"<svg width='{width}' height='{height}'>{''.join(drawn)}</svg>"
    return f"<p>Loss of each step. Circles: one device.{keys}</p>{picture}"


def _memory(values: dict[str, Any]) -> str:
    usable = values["full_size"]["usable_bytes"] / GB
    cluster = values["cluster"]
    text = f"<p>{escape(cluster['chip'])} has {cluster['memory_gb']:g} GB, of which {usable:.1f} are usable. "
    text += "Parameters, moments and gradients are read from the graphs; the rest is computed by closed formulas.</p>"
    return text + memory_bars(values["full_size"]["ranks"], values["full_size"]["usable_bytes"])


def _bytes(values: dict[str, Any]) -> str:
    """Write the table of bytes that the graphs send."""
    rows = [
        (f"rank {rank['rank']}", kind, int(sent))
        for rank in values["full_size"]["ranks"]
        for kind, sent in sorted(rank["bytes_per_step"].items())
    ]
    return table(("", "kind and phase", "bytes a step"), rows)


def _ranks(ranks: Sequence[dict[str, Any]]) -> str:
    """Write the tables of bytes that ranks of a custom network hold and send."""
    parts = ("parameter", "gradient", "optimizer")
    held = [
        (f"rank {rank['rank']}", rank["stage"], *(f"{rank[f'{part}_bytes'] / 2**20:.2f}" for part in parts))
        for rank in ranks
    ]
    sent = [
        (
            f"rank {rank['rank']}",
            f"{c['kind']} {c['phase']}",
            len(rank["groups"][c["group"]]),
            c["count"],
            c["bytes_each"],
        )
        for rank in ranks
        for c in rank["collectives"]
    ]
    text = table(("", "stage", "weights, MB", "gradients, MB", "AdamW's moments, MB"), held)
    return text + table(("", "kind and phase", "ranks", "times a step", "bytes each"), sent)


def _time(values: dict[str, Any]) -> str:
    estimate, x, bars, keys = values["estimate"], 0.0, [], []
    seconds = {name: value for name, value in estimate["seconds"].items() if value > 0 and name != "communication"}
    total = sum(seconds.values())
    for number, (name, value) in enumerate(seconds.items()):
        width, color = 720 * value / total, COLORS[number % len(COLORS)]
        bars.append(
            f"<rect x='{x:.1f}' width='{width:.1f}' height='28' fill='{color}'><title>{name} {value:.3g} s</title></rect>"
        )
        keys.append(
            f"<span class='key' style='background:{color}'></span>{escape(name.replace('_', ' '))} {value:.3g} s"
        )
        x += width
    drawn = f"<svg width='720' height='28'>{''.join(bars)}</svg><p>{''.join(keys)}</p>"
    if "rows_per_s" in estimate:
        return (
            f"<p>{estimate['step_time_s']:.3g} s, {estimate['rows_per_s']:,.0f} rows/s on {estimate['chip']}: the work in "
            "the graph, its memory traffic and its messages, one after the other; launching operators is not counted. No "
            f"interval is known: such estimates were never compared with measured runs.</p>{drawn}"
        )
    return (
        f"<p>{estimate['step_time_s']:.3g} s ({interval_text(estimate)}), {estimate['tokens_per_s']:,.0f} tokens/s, MFU "
        f"{estimate['mfu']:.1%}. The interval: {escape(estimate['interval']['meaning'])}.</p>{drawn}"
    )


def interval_text(estimate: dict[str, Any]) -> str:
    """Format the interval of the time of a step, from published runs."""
    bounds = estimate["step_time_interval_s"]
    if bounds is None:
        return "no interval known"
    return f"{bounds[0]:.3g} to {bounds[1]:.3g} s for {estimate['interval']['coverage']:.0%} of published runs on plain text"


def _covered(values: dict[str, Any]) -> str:
    rows = [(name, digest[:16]) for name, digest in values["hashes"].items()]
    versions = values[COVERS]["versions"]
    text = f"MindSpore {versions['mindspore']}, sporeloom {versions['sporeloom']}"
    note = "<p><code>tools/train.py --certificate certificate.json</code> starts only if all of this is unchanged.</p>"
    return table(("part", "SHA-256"), rows) + f"<p>{escape(text)}.</p>" + note
