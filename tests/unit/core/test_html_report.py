# SPDX-License-Identifier: Apache-2.0
"""Parts of HTML reports: scales, bars, margins, equal ranks, and that a file stands alone."""

import re

import pytest

from sporeloom.core.html_report import (
    Series,
    bars,
    color,
    document,
    folded,
    heading,
    legend,
    margin,
    size,
    table,
    ticks,
)

PLAIN, GUESSED = Series("weights", "#123456"), Series("activations <x>", "#654321", is_estimated=True)


@pytest.mark.parametrize(
    ("largest", "count", "smallest", "expected"),
    [
        (10, 5, 0, [0, 2, 4, 6, 8, 10]),
        (0.0056, 5, 0, [0, 0.002, 0.004]),
        (62, 5, 0, [0, 20, 40, 60]),
        (1.31, 5, 1.02, [1.1, 1.2, 1.3]),
        (0, 5, 0, [0]),
        (3, 5, 3, [3]),
    ],
)
def test_scales_have_round_values(largest, count, smallest, expected):
    assert ticks(largest, count, smallest) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (4, "4 bytes"),
        (1536, "1.5 KB"),
        (2**20, "1 MB"),
        (123.4 * 2**20, "123 MB"),
        (62 * 2**30, "62 GB"),
    ],
)
def test_sizes_are_short(num_bytes, expected):
    assert size(num_bytes) == expected


@pytest.mark.parametrize(
    ("used", "kind", "said"),
    [
        (50, "good", "fits into 100 bytes, 50.0% left"),
        (95, "good", "5.0% left"),
        (99, "amber", "1.0% left"),
        (100, "amber", "0.0% left"),
        (101, "bad", "does not fit into 100 bytes: 1.0% too much"),
    ],
)
def test_a_device_without_margin_is_amber(used, kind, said):
    assert f"class='{kind}'" in margin(used, 100) and said in margin(used, 100)


def test_bars_are_on_one_scale_and_mark_the_limit():
    drawn = bars([("rank 0", [(PLAIN, 25), (GUESSED, 25)], "50"), ("rank 1", [(PLAIN, 100)], "100")], 100, str, 80)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
    assert widths[0] == widths[1] and widths[2] == pytest.approx(4 * widths[0], abs=0.02)
    limits = [float(left) for left in re.findall(r"<b style='left:([\d.]+)%'", drawn)]
    assert limits == pytest.approx([0.8 * widths[2]] * 2, abs=0.02)
    assert drawn.count("class='hatched'") == 1, "only what is estimated"
    assert "activations &lt;x&gt; 25" in drawn


def test_series_beyond_the_palette_have_colors_of_their_own():
    assert len({color(number) for number in range(16)}) == 16


def test_equal_neighbors_are_shown_once():
    ranks = [(0, "a"), (1, "a"), (2, "a"), (3, "b"), (8, "c"), (16, "c"), (17, "d"), (19, "d"), (21, "d"), (23, "d")]
    shown = folded(ranks, lambda rank: rank[0], lambda rank: rank[1])
    assert shown == [
        ("ranks 0 to 2", (0, "a")),
        ("rank 3", (3, "b")),
        ("ranks 8, 16", (8, "c")),
        ("ranks 17, 19, 21 and 1 more", (17, "d")),
    ]


def test_tables_align_numbers_and_escape_texts():
    written = table(("name", "bytes", "size"), [("<a>", 1234567, "1.2 MB"), ("b", 2, "2 KB")], "body")
    assert "&lt;a&gt;" in written and "1,234,567" in written and "id='body'" in written
    assert written.count("<td class='n'>") == 4 and written.count("<th class='n'>") == 2


def test_a_file_stands_alone_in_light_dark_and_on_phones():
    page = document("<t>", [heading("Time", "estimated", is_estimated=True), legend([PLAIN, GUESSED])], "let a=1")
    assert page.startswith("<!doctype html>") and "<title>&lt;t&gt;</title>" in page
    assert "name='viewport'" in page and "prefers-color-scheme:dark" in page
    assert "class='badge estimated'>estimated" in page and "<script>let a=1</script>" in page
    assert not [word for word in ("http:", "https:", "<link", "src=", "url(") if word in page]
