# SPDX-License-Identifier: Apache-2.0
"""Draw the groups of a rank on the servers of the job, with what they send in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sporeloom.core.html_report import color, size

CELL, GAP, PER_ROW = 14, 10, 8
SHOWN_SERVERS = 32
SHOWN_DEVICES = 16


def topology(rank: Mapping[str, Any], num_ranks: int, devices_per_server: int) -> str:
    """Draw a picture for each group of a rank that sends anything; servers without a member are left out.

    A rank is `devices_per_server` ranks from the next one with the same place in its server.
    """
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for each in rank["collectives"]:
        sent[each["group"]] += each["bytes_per_step"]
        calls[each["group"]] += each["count"]
    drawn = []
    for number, (name, _) in enumerate(sent.most_common()):
        members = rank["groups"][name]
        servers = sorted({member // devices_per_server for member in members})
        spans = "within one server" if len(servers) == 1 else f"across {len(servers):,} servers"
        facts = f"{len(members):,} ranks {spans}: {size(sent[name])} in {calls[name]:,} calls a step"
        picture = _servers(rank["rank"], members, servers, num_ranks, devices_per_server, color(number))
        drawn.append(f"<figure><figcaption>{escape(name)}</figcaption><p>{escape(facts)}</p>{picture}</figure>")
    return f"<div class='groups'>{''.join(drawn)}</div>" if drawn else "<p>Nothing is sent.</p>"


def _servers(
    rank: int, members: Sequence[int], servers: Sequence[int], num_ranks: int, devices_per_server: int, fill_color: str
) -> str:
    """Draw servers as boxes of devices: members of the group filled, the rank itself with a frame."""
    is_member, columns = set(members), min(devices_per_server, SHOWN_DEVICES)
    lines = -(-devices_per_server // columns)
    width, height = columns * CELL + GAP, lines * CELL + GAP + 14
    across = max(1, min(PER_ROW * 8 // columns, len(servers), SHOWN_SERVERS))
    found = []
    for place, server in enumerate(servers[:SHOWN_SERVERS]):
        left, top = place % across * width, place // across * height
        found.append(f"<text x='{left}' y='{top + 11}'>server {server}</text>")
        first = server * devices_per_server
        for device in range(first, min(first + devices_per_server, num_ranks)):
            x, y = left + (device - first) % columns * CELL, top + 14 + (device - first) // columns * CELL
            fill = fill_color if device in is_member else "var(--field)"
            frame = " stroke='var(--ink)' stroke-width='2'" if device == rank else ""
            found.append(
                f"<rect x='{x + 1}' y='{y + 1}' width='{CELL - 2}' height='{CELL - 2}' fill='{fill}'{frame}>"
                f"<title>rank {device}</title></rect>"
            )
    rows = -(-min(len(servers), SHOWN_SERVERS) // across)
    more = len(servers) - SHOWN_SERVERS
    rest = f"<p class='note'>and {more:,} more servers in the same way</p>" if more > 0 else ""
    total_width = max(across * width, 80)
    svg = f"<svg width='{total_width}' height='{rows * height}' role='img' aria-label='members of the group by server'>"
    return f"<div class='wide'>{svg}{''.join(found)}</svg></div>{rest}"
