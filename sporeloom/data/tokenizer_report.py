# SPDX-License-Identifier: Apache-2.0
"""Statistics of tokenizers as a table and as a document."""

from __future__ import annotations

from typing import Any

from sporeloom.core.document import shortened
from sporeloom.core.errors import without_control
from sporeloom.data.tokenizer import open_tokenizer
from sporeloom.data.tokenizer_statistics import CorpusCounts, GroupCounts, StatisticsJob, TokenCounts, total_of

TOTAL = "total"
HEADS = ("tokenizer", "documents", "words", "tokens", "tokens/word", "bytes/token", "unknown", "not restored")


def report(job: StatisticsJob, counts: CorpusCounts) -> dict[str, Any]:
    """All statistics, for JSON: ratios are null where nothing is to be divided by."""
    roles = ("tokenizer", "against")[: len(job.tokenizers)]
    files = {
        role: {"path": str(path), "model": family, "vocab_size": open_tokenizer(family, path).vocab_size}
        for role, (family, path) in zip(roles, job.tokenizers, strict=True)
    }
    by = "file" if job.by_file else job.by
    groups = {name: _group(counts.groups[name]) for name in sorted(counts.groups)} if by else {}
    return {
        **files,
        "by": by,
        "groups": groups,
        "total": _group(total_of(list(counts.groups.values()))),
        "skipped": dict(sorted(counts.skipped.items())),
        "first_problems": counts.problems,
    }


def _group(group: GroupCounts) -> dict[str, Any]:
    own, *against = group.tokenizers
    made: dict[str, Any] = {"documents": group.num_documents, "bytes": group.num_bytes, "words": group.num_words}
    made["tokenizer"] = _of_tokenizer(group, own)
    if against:
        made["against"] = _of_tokenizer(group, against[0])
        made["tokens_ratio"] = _ratio(own.num_tokens, against[0].num_tokens)
    return made


def _of_tokenizer(group: GroupCounts, counts: TokenCounts) -> dict[str, Any]:
    return {
        "tokens": counts.num_tokens,
        "fertility": _ratio(counts.num_tokens, group.num_words),
        "bytes_per_token": _ratio(group.num_bytes, counts.num_tokens),
        "unknown_rate": _ratio(counts.num_unknown, counts.num_tokens),
        "round_trip_failures": counts.num_failures,
        "first_failures": counts.failures,
    }


def _ratio(number: int, divisor: int) -> float | None:
    return number / divisor if divisor else None


def table(found: dict[str, Any]) -> str:
    """Format a report as a table: a row for each group and tokenizer, the total last."""
    roles = [role for role in ("tokenizer", "against") if role in found]
    groups = [*found["groups"].items(), (TOTAL, found["total"])]
    rows = [(found["by"] or "", *HEADS, *(("ratio",) if len(roles) > 1 else ()))]
    for name, group in groups:
        for role in roles:
            rows.append(
                (
                    "" if role == "against" else shortened(without_control(name)),
                    *_row(found[role]["path"], group, group[role]),
                )
            )
            if len(roles) > 1:
                rows[-1] += ("" if role == "against" else _shown(group["tokens_ratio"]),)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _row(path: str, group: dict[str, Any], counts: dict[str, Any]) -> tuple[str, ...]:
    unknown = counts["unknown_rate"]
    return (
        path,
        f"{group['documents']:,}",
        f"{group['words']:,}",
        f"{counts['tokens']:,}",
        _shown(counts["fertility"]),
        _shown(counts["bytes_per_token"]),
        "-" if unknown is None else f"{unknown:.2%}",
        f"{counts['round_trip_failures']:,}",
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    padded = zip(row, widths, strict=True)
    cells = [f"{cell:{'<' if at < 2 else '>'}{width}}" for at, (cell, width) in enumerate(padded)]
    return "  ".join(cells).rstrip()
