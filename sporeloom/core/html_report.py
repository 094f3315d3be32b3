# SPDX-License-Identifier: Apache-2.0
"""Parts of HTML reports: one self-contained file, light or dark, for screens of any width, that fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

Item = TypeVar("Item")
PALETTE = ("#4b8bd0", "#5fa844", "#c8962a", "#d0604b", "#a070c8", "#3fa3a3", "#d06a9c", "#8a8f98")
"""Colors of series, in turn; all can be seen on white and on black."""
UNITS = ((2**40, "TB"), (2**30, "GB"), (2**20, "MB"), (2**10, "KB"), (1, "bytes"))
AMBER_FROM = 0.95
"""A device that is filled beyond this share has no margin: the report says so in amber."""
STYLE = """:root{color-scheme:light dark;--ink:#20262b;--paper:#fff;--line:#d5dade;--soft:#5b6770;--field:#eef1f3;
--good:#2e7d4f;--amber:#a86a00;--bad:#b03a3a}
@media(prefers-color-scheme:dark){:root{--ink:#eceff1;--paper:#14181b;--line:#37424a;--soft:#a9b5bd;--field:#20272c;
--good:#6cc490;--amber:#e5b04a;--bad:#ee8a80}}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:72em;padding:1em;
color:var(--ink);background:var(--paper)}h1{font-weight:600;margin:.4em 0 .2em;overflow-wrap:anywhere}
h2{margin:2em 0 .4em;font-size:1.25em}h3{margin:1.4em 0 .3em;font-size:1em}p{margin:.4em 0}.note{color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;white-space:nowrap;font-size:.93em}
td,th{text-align:left;padding:.25em .8em .25em 0;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}td.long{white-space:normal;min-width:14em}
pre,code{background:var(--field);border-radius:.3em}pre{padding:.7em;white-space:pre-wrap;overflow-wrap:anywhere}
code{padding:.1em .3em}input{font:inherit;padding:.35em .6em;width:min(100%,30em)}
.badge{font-size:.72em;font-weight:600;padding:.15em .6em;border-radius:1em;border:1px solid;margin-left:.5em;
vertical-align:middle;white-space:nowrap}.measured{color:var(--good)}.estimated{color:var(--amber)}
.good{color:var(--good)}.amber{color:var(--amber)}.bad{color:var(--bad)}
.legend{display:flex;flex-wrap:wrap;gap:.2em 1.2em;margin:.5em 0;font-size:.9em}
.legend i,.key{display:inline-block;width:1em;height:1em;margin-right:.4em;vertical-align:-.12em;border-radius:.15em}
.bars{display:grid;grid-template-columns:max-content 1fr max-content;gap:.35em .8em;align-items:center;font-size:.93em}
.bar{display:contents}@media(max-width:40em){.bars{display:block}.bar{display:grid;grid-template:"l v" "t t"/1fr auto;
margin:.4em 0}.bar span{grid-area:l}.bar span:last-child{grid-area:v}.bar .track,.bar .scale{grid-area:t}}
.track{position:relative;display:flex;height:1.4em;background:var(--field)}.track i{display:block;height:100%}
.track b{position:absolute;top:-.2em;bottom:-.2em;border-left:2px dashed var(--bad)}
.scale{position:relative;height:1.3em;color:var(--soft);font-size:.85em}
.scale span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.scale span:first-child{transform:none}.scale span:last-child{transform:translateX(-100%)}
.hatched{background-image:repeating-linear-gradient(45deg,transparent 0 3px,var(--paper) 3px 4px)}
figure{margin:.6em 0 1.2em}figcaption{font-weight:600;margin:.3em 0}svg{display:block}
svg.chart{width:100%;min-width:30em;max-width:60em;height:auto}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.lanes{display:grid;grid-template-columns:max-content 1fr;gap:0 .8em}.lanes svg{width:100%;touch-action:pan-y}
.names span{display:block}.zoom button{font:inherit;min-width:2.4em;margin:0 .3em .4em 0;padding:.1em .6em}
.groups{display:flex;flex-wrap:wrap;gap:0 2em}.groups figure{max-width:100%}details{margin:.6em 0}summary{cursor:pointer}
svg .axis{stroke:var(--line);fill:none}svg .limit{stroke:var(--bad);fill:none}"""


@dataclass(frozen=True)
class Series:
    """An entry of a legend: its name, its color, and whether its values are estimated, which is drawn hatched."""

    name: str
    color: str
    is_estimated: bool = False

    @property
    def mark(self) -> str:
        """Attributes of an element that is filled as the series is."""
        hatched = " class='hatched'" if self.is_estimated else ""
        return f"{hatched} style='background-color:{self.color}'"


def color(number: int) -> str:
    """Choose the color of a series by its number: beyond the palette, the same colors in a lighter shade."""
    shade = PALETTE[number % len(PALETTE)]
    return shade if number < len(PALETTE) else f"color-mix(in srgb,{shade} 50%,var(--paper))"


def document(title: str, sections: Iterable[str], script: str = "") -> str:
    """Write the file."""
    tail = f"<script>{script}</script>" if script else ""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(sections)}{tail}</body></html>\n"
    )


def heading(title: str, badge: str = "", *, is_estimated: bool = False) -> str:
    """Write the title of a section; `badge` says whether it is estimated, or measured, read or proved."""
    kind = "estimated" if is_estimated else "measured"
    mark = f"<span class='badge {kind}'>{escape(badge)}</span>" if badge else ""
    return f"<h2>{escape(title)}{mark}</h2>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "") -> str:
    """Write a table of texts and numbers; `name` is its body's id. Columns of numbers are aligned to the right."""
    numeric = [bool(rows) and all(is_numeric(row[column]) for row in rows) for column in range(len(head))]

    def cell(tag: str, value: Any, column: int) -> str:
        text = f"{value:,}" if isinstance(value, int) else str(value)
        kind = " class='n'" if numeric[column] else " class='long'" if len(text) > 60 else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    def line(tag: str, row: Sequence[Any]) -> str:
        return "<tr>" + "".join(cell(tag, value, column) for column, value in enumerate(row)) + "</tr>"

    body, titles = "".join(line("td", row) for row in rows), line("th", head)
    return f"<div class='wide'><table><thead>{titles}</thead><tbody id='{name}'>{body}</tbody></table></div>"


def is_numeric(value: Any) -> bool:
    """Whether a cell is a number, or a text of one with its unit."""
    return isinstance(value, int | float) or (
        isinstance(value, str) and value[:1].isdecimal() and "," not in value[-2:]
    )


def legend(series: Iterable[Series]) -> str:
    """Write names and colors of what is drawn."""
    return "<div class='legend'>" + "".join(f"<span><i{s.mark}></i>{escape(s.name)}</span>" for s in series) + "</div>"


def unit_of(num_bytes: float) -> tuple[int, str]:
    """Choose the largest unit of which there is one: its bytes, its name."""
    return next((each for each in UNITS if num_bytes >= each[0]), UNITS[-1])


def size(num_bytes: float) -> str:
    """Format bytes in the largest unit of which there is one, to three digits."""
    unit, name = unit_of(num_bytes)
    value = num_bytes / unit
    return f"{value:,.0f} {name}" if value >= 100 or unit == 1 else f"{value:.3g} {name}"


def ticks(largest: float, count: int = 5, smallest: float = 0.0) -> list[float]:
    """Choose round values between `smallest` and `largest`, at most `count` + 1 of them."""
    if not largest > smallest:
        return [smallest]
    rough = (largest - smallest) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(smallest / step - 1e-9), math.floor(largest / step * (1 + 1e-9))
    return [step * number for number in range(first, last + 1)]


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[Series, float]], str]],
    largest: float,
    shown: Callable[[float], str],
    limit: float = 0.0,
    unit: float = 1.0,
) -> str:
    """Draw a stacked bar for each row, on one scale that begins at zero.

    Args:
        rows: (label, parts, text behind the bar) of each bar.
        largest: the end of the scale.
        shown: how a value is written.
        limit: a value that is marked across all bars, if not 0.
        unit: values at the scale are round multiples of this.
    """
    top = max(largest, limit) * 1.02 or 1.0
    line = f"<b style='left:{100 * limit / top:.2f}%' title='{escape(shown(limit))}'></b>" if limit else ""
    drawn = []
    for label, parts, text in rows:
        inner = "".join(
            f"<i{series.mark[:-1]};width:{100 * value / top:.2f}%' title='{escape(series.name)} {escape(shown(value))}'></i>"
            for series, value in parts
            if value > 0
        )
        track = f"<div class='track'>{inner}{line}</div>"
        drawn.append(f"<div class='bar'><span>{escape(label)}</span>{track}<span>{text}</span></div>")
    values = [unit * value for value in ticks(top / unit)]
    scale = "".join(f"<span style='left:{100 * value / top:.2f}%'>{escape(shown(value))}</span>" for value in values)
    last = f"<div class='bar'><span></span><div class='scale'>{scale}</div><span></span></div>"
    return f"<div class='bars'>{''.join(drawn)}{last}</div>"


def margin(used: float, limit: float) -> str:
    """Say whether `used` bytes fit into `limit`, and by how much: in amber where hardly anything is left."""
    share = used / limit
    if share > 1:
        return f"<b class='bad'>does not fit into {size(limit)}: {share - 1:.1%} too much</b>"
    kind = "amber" if share > AMBER_FROM else "good"
    return f"<b class='{kind}'>fits into {size(limit)}, {1 - share:.1%} left</b>"


def folded(
    items: Sequence[Item], number: Callable[[Item], int], key: Callable[[Item], Hashable]
) -> list[tuple[str, Item]]:
    """Join neighbors with the same key into one (label, first of them): "rank 0", "ranks 0 to 7", "ranks 0, 8, 16"."""
    groups: list[list[Item]] = []
    for item in items:
        if groups and key(groups[-1][0]) == key(item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return [(_ranks([number(item) for item in group]), group[0]) for group in groups]


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:3]))}{f' and {len(numbers) - 3} more' if len(numbers) > 3 else ''}"
