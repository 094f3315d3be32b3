# SPDX-License-Identifier: Apache-2.0
"""Write a certificate as one self-contained HTML file: the verdict, and the results behind it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sporeloom.core.html_report import Series, bars, color, document, folded, heading, legend, size, table
from sporeloom.dry_run.html import CLOSED_FORM, READ, memory_bars
from sporeloom.strategy.certificate import CERTIFIED, COVERS

STYLE = """.verdict{padding:1em 1.5em;border-radius:.6em;color:#fff;margin:1.5em 0}.verdict b{font-size:1.5em}
.certified{background:#2e7d4f}.refused{background:#b03a3a}"""
PROVED = "proved"
HUGE = 1e9
"""Losses beyond it are drawn at the edge: training diverged."""
QUESTIONS = {
    "strategy": ("Do mesh, rules and model fit each other?", PROVED),
    "proof": ("Does it train as on one device, scaled down?", PROVED),
    "shards": ("Do ranks of the full mesh hold the shards that the rules define?", READ),
    "memory": ("Does every stage fit the chip?", CLOSED_FORM),
}
"""Check -> the question that it answers, and how."""


def page(values: dict[str, Any]) -> str:
    """Write the HTML file."""
    verdict, mesh = values["verdict"], values[COVERS]["strategy"]["mesh"]
    degrees = " x ".join(f"{axis} {mesh[axis]}" for axis in mesh["order"] if mesh[axis] > 1)
    why = "".join(f"<br>{escape(reason)}" for reason in values["reasons"])
    facts = f"{escape(values['strategy_file'])} &middot; {values['made']}, {values['machine']}"
    sections = [
        f"<style>{STYLE}</style><h1>{escape(values['subject'])} on {degrees}</h1><p class='note'>{facts}</p>",
        f"<div class='verdict {verdict}'><b>{verdict.capitalize()}.</b> {_summary(values)}{why}</div>",
        heading("Checks") + _questions(values),
        heading("The proof", PROVED) + _proof(values),
    ]
    if "faults" in values:
        sections.append(heading("Planted faults", PROVED) + _faults(values["faults"]))
    if "full_size" in values:
        sections.append(heading("Collectives of a step", READ) + _bytes(values))
    if values.get("ranks"):
        sections.append(heading("Ranks of the full mesh", READ) + _ranks(values["ranks"]))
    if "full_size" in values:
        sections.append(heading("Memory of a device", "partly estimated", is_estimated=True) + _memory(values))
    if "estimate" in values:
        sections.append(heading("Time of a step", CLOSED_FORM, is_estimated=True) + _time(values))
    sections.append("<h2>What it covers</h2>" + _covered(values))
    if values["verdict"] == CERTIFIED and "run" in values:
        sections.append(f"<h2>Run it</h2><pre>{escape(chr(10).join(values['run']))}</pre>")
    return document(f"{verdict}: {values['subject']}", sections)


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
        mark = "<span class='bad'>&#10008; no</span>" if problems else "<span class='good'>&#10004; yes</span>"
        said, (question, how) = escape("; ".join(problems[:3])), QUESTIONS[name]
        kind = "estimated" if how == CLOSED_FORM else "measured"
        rows.append(
            f"<tr><td>{question}</td><td>{mark}</td><td><span class='badge {kind}'>{how}</span></td>"
            f"<td class='long'>{said}</td></tr>"
        )
    return f"<div class='wide'><table>{''.join(rows)}</table></div>"


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
    """Draw losses over the steps, a chart for each optimizer: circles for one device, lines for the meshes."""
    expected = proof["one_device_losses"]
    meshes = [mesh for mesh in proof["meshes"] if mesh["losses"]]
    if not expected or not meshes:
        return ""
    half = len(expected) // 2
    series = [Series(mesh["mesh"], color(number)) for number, mesh in enumerate(meshes)]
    charts = "".join(
        _chart(
            name, expected[part], [(one.color, mesh["losses"][part]) for one, mesh in zip(series, meshes, strict=True)]
        )
        for name, part in (("AdamW", slice(half)), ("SGD", slice(half, None)))
    )
    return f"<p>Loss of each step. Circles: one device.</p>{legend(series)}<div class='groups'>{charts}</div>"


def _chart(name: str, expected: Sequence[float], lines: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draw the losses of an optimizer's steps, with an axis for them."""
    finite = [x for losses in (expected, *(losses for _, losses in lines)) for x in losses if abs(x) < HUGE]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    width, height, left, bottom = 400, 190, 58, 160

    def place(step: int, loss: float) -> tuple[float, float]:
        loss = min(max(loss, low), high) if loss == loss else high
        x = left + 8 + step * (width - left - 20) / max(1, len(expected) - 1)
        return x, 12 + (high - loss) / max(high - low, 1e-9) * (bottom - 24)

    drawn = [
        f"<path class='axis' d='M{left} 6V{bottom}H{width - 4}'/>",
        *(f"<text x='{left - 6}' y='{place(0, x)[1] + 4:.1f}' text-anchor='end'>{x:.4g}</text>" for x in {low, high}),
        *(
            f"<text x='{place(step, low)[0]:.1f}' y='{bottom + 16}' text-anchor='middle'>{step + 1}</text>"
            for step in range(len(expected))
        ),
    ]
    for stroke, losses in lines:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(step, loss) for step, loss in enumerate(losses)))
        drawn.append(f"<polyline points='{points}' fill='none' stroke='{stroke}' stroke-width='2' opacity='.8'/>")
    for step, loss in enumerate(expected):
        x, y = place(step, loss)
        tip = f"<title>step {step + 1}: {loss:.6f}</title>"
        drawn.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='none' stroke='currentColor'>{tip}</circle>")
    svg = f"<svg viewBox='0 0 {width} {height}' width='{width}' style='max-width:100%' role='img' "
    return (
        f"<figure><figcaption>{name}</figcaption>{svg}aria-label='loss by step, {name}'>{''.join(drawn)}</svg></figure>"
    )


def _memory(values: dict[str, Any]) -> str:
    usable, cluster = values["full_size"]["usable_bytes"], values["cluster"]
    text = f"<p>{escape(cluster['chip'])} has {cluster['memory_gb']:g} GB, of which {size(usable)} are usable.</p>"
    return text + memory_bars(values["full_size"]["ranks"], usable)


def _bytes(values: dict[str, Any]) -> str:
    """Write the table of bytes that the graphs send."""
    ranks = folded(values["full_size"]["ranks"], _number, lambda rank: repr(rank["bytes_per_step"]))
    rows = [(label, kind, size(sent)) for label, rank in ranks for kind, sent in sorted(rank["bytes_per_step"].items())]
    return table(("", "kind and phase", "bytes a step"), rows)


def _number(rank: dict[str, Any]) -> int:
    return int(rank["rank"])


def _ranks(ranks: Sequence[dict[str, Any]]) -> str:
    """Write the tables of bytes that ranks of a custom network hold and send."""
    parts = tuple(f"{part}_bytes" for part in ("parameter", "gradient", "optimizer"))
    held = [
        (label, rank["stage"], *(size(rank[part]) for part in parts))
        for label, rank in folded(ranks, _number, lambda rank: (rank["stage"], *(rank[part] for part in parts)))
    ]
    sent = [
        (label, f"{c['kind']} {c['phase']}", len(rank["groups"][c["group"]]), c["count"], size(c["bytes_each"]))
        for label, rank in folded(ranks, _number, lambda rank: repr(rank["collectives"]))
        for c in rank["collectives"]
    ]
    text = table(("", "stage", "weights", "gradients", "AdamW's moments"), held)
    return text + table(("", "kind and phase", "ranks", "calls a step", "bytes each"), sent)


def _time(values: dict[str, Any]) -> str:
    estimate = values["estimate"]
    seconds = {name: value for name, value in estimate["seconds"].items() if value > 0 and name != "communication"}
    total = sum(seconds.values())
    parts = [
        (Series(f"{name.replace('_', ' ')} {value:.3g} s", color(number)), value)
        for number, (name, value) in enumerate(seconds.items())
    ]
    drawn = legend(series for series, _ in parts) + bars([("a step", parts, "")], total, lambda value: f"{value:.3g} s")
    if "rows_per_s" in estimate:
        return (
            f"<p>{estimate['step_time_s']:.3g} s, {estimate['rows_per_s']:,.0f} rows/s on {estimate['chip']}: the work in "
            "the graph, its memory traffic and its messages, one after the other; launching operators is not counted. No "
            f"interval is known: such estimates were never compared with measured runs.</p>{drawn}"
        )
    return (
        f"<p>{estimate['step_time_s']:.3g} s ({interval_text(estimate)}), {estimate['tokens_per_s']:,.0f} tokens/s, MFU "
        f"{estimate['mfu']:.1%}. The interval: {escape(estimate['interval']['meaning'])}.</p>{drawn}"
        f"<p>{memory_text(estimate)}. The interval: {escape(estimate['memory_interval']['meaning'])}.</p>"
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


def memory_text(estimate: dict[str, Any]) -> str:
    """Format the memory of the fullest device with its interval, from published figures."""
    peak, bounds = max(stage["total"] for stage in estimate["stages"]), estimate["memory_interval_bytes"]
    within = "no interval known" if bounds is None else f"{bounds[0] / 2**30:.1f} to {bounds[1] / 2**30:.1f} GB"
    return f"{peak / 2**30:.1f} GB a device ({within})"
