# SPDX-License-Identifier: Apache-2.0
"""Result of a search as data, as a table and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from sporeloom.core.html_report import PALETTE, document, heading, size, table, ticks, unit_of
from sporeloom.core.log import counted
from sporeloom.strategy_search.certified import Front
from sporeloom.strategy_search.folders import CERTIFICATE, POINTS, STRATEGY
from sporeloom.strategy_search.request import SearchRequest
from sporeloom.strategy_search.scoring import ScoredCandidates
from sporeloom.strategy_search.simulated import GB, Simulated

TITLE = "Pareto front: strategy"
SHOWN_REFUSED = 10
WIDTH, HEIGHT, LEFT, BELOW = 720, 340, 74, 40
LIMIT_SHOWN_FROM = 0.4
"""A device's limit is drawn where a strategy needs at least this share of it."""


def as_dict(
    request: SearchRequest, scores: ScoredCandidates, simulated: list[Simulated], front: Front
) -> dict[str, Any]:
    """The result as JSON, without anything that depends on when and where it was made."""
    nearest = scores.nearest
    return {
        "inputs": request.about(),
        "usable_bytes": request.cluster.usable_bytes,
        "scored": {
            "meshes": scores.num_meshes,
            "candidates": scores.num_scored,
            "fitting": len(scores.fitting),
            "nearest_that_does_not_fit": nearest and {"name": nearest.name, "peak_bytes": nearest.peak_bytes},
        },
        "simulated": [_simulated(request, one) for one in simulated],
        "front": [_point(request, one, front) for one in front.points],
        "refused": [{"name": one.name, "reason": one.problem} for one in front.refused],
    }


def _simulated(request: SearchRequest, one: Simulated) -> dict[str, Any]:
    scored = one.scored
    return {
        "name": one.name,
        "step_time_s": one.seconds or None,
        "peak_bytes": one.peak_bytes or None,
        **({"goodput": one.goodput} if request.faults else {}),
        "closed_form": {"step_time_s": scored.seconds, "peak_bytes": scored.peak_bytes} if scored.seconds else None,
        "accumulate": scored.candidate.accumulate,
    }


def _point(request: SearchRequest, one: Simulated, front: Front) -> dict[str, Any]:
    folder, is_certified = f"{POINTS}/{one.name}", one.name in front.certified
    return {
        **_simulated(request, one),
        "rows_per_s" if "network" in request.about_model() else "tokens_per_s": request.batch_size
        * request.seq_len
        / one.seconds,
        "strategy": f"{folder}/{STRATEGY}",
        "certificate": f"{folder}/{CERTIFICATE}" if is_certified else None,
        **({"not_certified": front.failed[one.name]} if one.name in front.failed else {}),
    }


def lines(values: dict[str, Any]) -> Iterator[str]:
    """The result for a terminal."""
    yield from _facts(values)
    yield ""
    width = max(len(TITLE), *(len(point["name"]) for point in values["front"]), 0)
    has_goodput = values["inputs"]["faults"] is not None
    title = " goodput" if has_goodput else ""
    unit = _unit(values)
    yield f"{TITLE:{width}} {'step s':>10} {'closed form':>11} {'memory':>10} {f'{unit}/s':>11}{title}"
    for point in values["front"]:
        goodput = f" {point['goodput']:7.1%}" if has_goodput else ""
        yield (
            f"{point['name']:{width}} {point['step_time_s']:10.4g} {_closed_form(point):>11} "
            f"{point['peak_bytes'] / GB:8.2f}GB {point[f'{unit}_per_s']:11,.0f}{goodput}  "
            f"{_certified(point)}"
        )
    yield ""
    if refused := values["refused"]:
        yield f"refused: {len(refused)} of {len(values['simulated'])} simulated"
        yield from (f"  {one['name']}: {one['reason']}" for one in refused[:SHOWN_REFUSED])
        if len(refused) > SHOWN_REFUSED:
            yield f"  and {len(refused) - SHOWN_REFUSED} more in tune.json"


def _certified(point: dict[str, Any]) -> str:
    """Whether a point has a certificate, and why its proof was not completed."""
    reason = point.get("not_certified")
    return "certified" if point["certificate"] else f"not certified: {reason}" if reason else "not certified"


def _facts(values: dict[str, Any]) -> Iterator[str]:
    inputs, scored = values["inputs"], values["scored"]
    job, model = inputs["job"], inputs["model"]
    batch = f"{job['batch_size']} " + ("rows" if "network" in model else f"sequences of {job['seq_len']} tokens")
    yield f"{_model(values)} on {job['devices']} {inputs['cluster']['chip']}, {batch} a step"
    fitting = "" if "network" in model else f", {scored['fitting']:,} fit in closed form"
    yield (
        f"{'found' if 'network' in model else 'scored'} {scored['candidates']:,} strategies on "
        f"{counted(scored['meshes'], 'mesh', 'meshes')}{fitting}; simulated {len(values['simulated'])}"
    )


def _model(values: dict[str, Any]) -> str:
    model = values["inputs"]["model"]
    return str(model["network"]) if "network" in model else f"{model['family']} {model['size']}"


def _unit(values: dict[str, Any]) -> str:
    return "rows" if "network" in values["inputs"]["model"] else "tokens"


def _closed_form(point: dict[str, Any]) -> str:
    return f"{point['closed_form']['step_time_s']:.4g}" if point["closed_form"] else "-"


def page(values: dict[str, Any]) -> str:
    """The result as one self-contained HTML file."""
    has_goodput = values["inputs"]["faults"] is not None
    head = (
        "strategy",
        "step s",
        "closed form s",
        "memory GB",
        f"{_unit(values)}/s",
        *(["goodput"] if has_goodput else []),
        "certificate",
    )
    rows = [
        (
            point["strategy"],
            f"{point['step_time_s']:.4g}",
            _closed_form(point),
            f"{point['peak_bytes'] / GB:.2f}",
            f"{point[f'{_unit(values)}_per_s']:,.0f}",
            *([f"{point['goodput']:.1%}"] if has_goodput else []),
            point["certificate"] or _certified(point),
        )
        for point in values["front"]
    ]
    refused = [(one["name"], one["reason"]) for one in values["refused"]]
    facts = "".join(f"<p>{escape(line)}</p>" for line in _facts(values))
    title = f"Strategies of {_model(values)}"
    sections = [
        f"<h1>{escape(title)}</h1>{facts}",
        heading("Pareto front", "estimated by simulation", is_estimated=True),
        _drawing(values) + table(head, rows),
        f"<h2>Refused</h2>{table(('strategy', 'reason'), refused)}" if refused else "",
    ]
    return document(title, sections)


def _range(values: list[float]) -> tuple[float, float]:
    """Choose where an axis begins and ends, a little outside of the values."""
    span = max(values) - min(values) or 0.1 * max(values)
    return max(0.0, min(values) - 0.15 * span), max(values) + 0.1 * span


def _drawing(values: dict[str, Any]) -> str:
    """Draw step time over memory of all simulated strategies that are not refused; the front is filled."""
    refused, front = {one["name"] for one in values["refused"]}, {one["name"] for one in values["front"]}
    points = [one for one in values["simulated"] if one["name"] not in refused]
    if not points:
        return ""
    limit = values["usable_bytes"]
    sizes, times = ([one[key] for one in points] for key in ("peak_bytes", "step_time_s"))
    has_limit = max(sizes) >= LIMIT_SHOWN_FROM * limit
    (left, most), (low, longest) = _range([*sizes, *([limit] if has_limit else [])]), _range(times)
    right, bottom, (unit, _) = WIDTH - 12, HEIGHT - BELOW, unit_of(most)

    def x(value: float) -> float:
        return LEFT + (right - LEFT) * (value - left) / (most - left)

    def y(value: float) -> float:
        return bottom - (bottom - 12) * (value - low) / (longest - low)

    dots = "".join(
        f"<circle cx='{x(one['peak_bytes']):.1f}' cy='{y(one['step_time_s']):.1f}' r='4.5' stroke='{PALETTE[0]}' "
        f"fill='{PALETTE[0] if one['name'] in front else 'none'}'><title>{escape(one['name'])}: "
        f"{one['step_time_s']:.4g} s, {size(one['peak_bytes'])}</title></circle>"
        for one in points
    )
    across = "".join(
        f"<text x='{x(value):.1f}' y='{bottom + 16}' text-anchor='middle'>{size(value) if value else 0}</text>"
        for value in (unit * tick for tick in ticks(most / unit, 5, left / unit))
    )
    up = "".join(
        f"<text x='{LEFT - 6}' y='{y(value) + 4:.1f}' text-anchor='end'>{value:.4g} s</text>"
        for value in ticks(longest, 5, low)
    )
    axes = f"<path class='axis' d='M{LEFT} 6V{bottom}H{right}'/>"
    tip = f"<title>usable: {size(limit)}</title>"
    line = f"<path class='limit' stroke-dasharray='6' d='M{x(limit):.1f} 6V{bottom}'>{tip}</path>" if has_limit else ""
    name = f"<text x='{right}' y='{HEIGHT - 4}' text-anchor='end'>memory of the fullest device, of {size(limit)}</text>"
    return (
        f"<p>Filled: the front. Step time over memory of all that were simulated.</p><div class='wide'><svg class='chart' "
        f"viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='step time over memory'>{axes}{across}{up}{line}{dots}{name}"
        "</svg></div>"
    )
