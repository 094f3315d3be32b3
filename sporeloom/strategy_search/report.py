# SPDX-License-Identifier: Apache-2.0
"""Result of a search as data, as a table and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from sporeloom.core.log import counted
from sporeloom.dry_run.html import STYLE, table
from sporeloom.strategy_search.certified import Front
from sporeloom.strategy_search.folders import CERTIFICATE, POINTS, STRATEGY
from sporeloom.strategy_search.request import TuneRequest
from sporeloom.strategy_search.scoring import ScoredCandidates
from sporeloom.strategy_search.simulated import GB, Simulated

TITLE = "Pareto front: strategy"
SHOWN_REFUSED = 10
WIDTH, HEIGHT, MARGIN = 640, 320, 48


def as_dict(request: TuneRequest, scores: ScoredCandidates, simulated: list[Simulated], front: Front) -> dict[str, Any]:
    """The result as JSON, without anything that depends on when and where it was made."""
    nearest = scores.nearest
    return {
        "inputs": request.about(),
        "usable_bytes": request.plan.cluster.usable_bytes,
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


def _simulated(request: TuneRequest, one: Simulated) -> dict[str, Any]:
    scored = one.scored
    return {
        "name": one.name,
        "step_time_s": one.seconds or None,
        "peak_bytes": one.peak_bytes or None,
        **({"goodput": one.goodput} if request.faults else {}),
        "closed_form": {"step_time_s": scored.seconds, "peak_bytes": scored.peak_bytes},
        "accumulate": scored.candidate.accumulate,
    }


def _point(request: TuneRequest, one: Simulated, front: Front) -> dict[str, Any]:
    folder, is_certified = f"{POINTS}/{one.name}", one.name in front.certified
    return {
        **_simulated(request, one),
        "tokens_per_s": request.batch_size * request.seq_len / one.seconds,
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
    yield f"{TITLE:{width}} {'step s':>10} {'closed form':>11} {'memory':>10} {'tokens/s':>11}{title}"
    for point in values["front"]:
        goodput = f" {point['goodput']:7.1%}" if has_goodput else ""
        yield (
            f"{point['name']:{width}} {point['step_time_s']:10.4g} {point['closed_form']['step_time_s']:11.4g} "
            f"{point['peak_bytes'] / GB:8.2f}GB {point['tokens_per_s']:11,.0f}{goodput}  "
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
    yield (
        f"{model['family']} {model['size']} on {job['devices']} {inputs['cluster']['chip']}, "
        f"{job['batch_size']} sequences of {job['seq_len']} tokens a step"
    )
    yield (
        f"scored {scored['candidates']:,} strategies on {counted(scored['meshes'], 'mesh', 'meshes')}, {scored['fitting']:,} "
        f"fit in closed form; simulated {len(values['simulated'])}"
    )


def page(values: dict[str, Any]) -> str:
    """The result as one self-contained HTML file."""
    has_goodput = values["inputs"]["faults"] is not None
    head = (
        "strategy",
        "step s",
        "closed form s",
        "memory GB",
        "tokens/s",
        *(["goodput"] if has_goodput else []),
        "certificate",
    )
    rows = [
        (
            point["strategy"],
            f"{point['step_time_s']:.4g}",
            f"{point['closed_form']['step_time_s']:.4g}",
            f"{point['peak_bytes'] / GB:.2f}",
            f"{point['tokens_per_s']:,.0f}",
            *([f"{point['goodput']:.1%}"] if has_goodput else []),
            point["certificate"] or _certified(point),
        )
        for point in values["front"]
    ]
    refused = [(one["name"], one["reason"]) for one in values["refused"]]
    model = values["inputs"]["model"]
    facts = "".join(f"<p>{escape(line)}</p>" for line in _facts(values))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>tune</title><style>{STYLE}</style><body>"
        f"<h1>Strategies of {escape(model['family'])} {escape(model['size'])}</h1>{facts}"
        f"<h2>Pareto front</h2>{_drawing(values)}{table(head, rows)}"
        f"<h2>Refused</h2>{table(('strategy', 'reason'), refused)}</body></html>\n"
    )


def _drawing(values: dict[str, Any]) -> str:
    """Draw step time over memory of all simulated strategies that are not refused; the front is filled."""
    refused, front = {one["name"] for one in values["refused"]}, {one["name"] for one in values["front"]}
    points = [one for one in values["simulated"] if one["name"] not in refused]
    if not points:
        return ""
    times, sizes = ([one[key] for one in points] for key in ("step_time_s", "peak_bytes"))

    def position(value: float, of: list[float], length: int) -> float:
        span = max(of) - min(of) or 1.0
        return MARGIN + (value - min(of)) / span * (length - 2 * MARGIN)

    dots = "".join(
        f"<circle cx='{position(size, sizes, WIDTH):.1f}' cy='{HEIGHT - position(seconds, times, HEIGHT):.1f}' r='4' "
        f"stroke='#4878a8' fill='{'#4878a8' if one['name'] in front else 'white'}'><title>{escape(one['name'])}: "
        f"{seconds:.4g} s, {size / GB:.2f} GB</title></circle>"
        for one, seconds, size in zip(points, times, sizes, strict=True)
    )
    texts = (
        (MARGIN, HEIGHT - 8, f"{min(sizes) / GB:.2f} GB"),
        (WIDTH - 2 * MARGIN, HEIGHT - 8, f"{max(sizes) / GB:.2f} GB"),
        (0, MARGIN - 16, f"{max(times):.4g} s"),
        (0, HEIGHT - MARGIN + 16, f"{min(times):.4g} s"),
    )
    labels = "".join(f"<text x='{x}' y='{y}' font-size='12'>{escape(text)}</text>" for x, y, text in texts)
    return f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='step time over memory'>{dots}{labels}</svg>"
