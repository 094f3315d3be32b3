# SPDX-License-Identifier: Apache-2.0
"""Schedules from files: what is read is what was written, and every fault of a file is named."""

import random

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.strategy.config import V_SHAPED, stage_of_part
from sporeloom.strategy.listed_schedule import Pass, read_schedule
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.schedule import (
    held_parts,
    idle_microbatches,
    microbatches_held,
    part_of_model,
    passes,
    split_passes,
    splits_backward,
    times,
)
from sporeloom.strategy.text import strategy_text

SIZES = [(1, 3), (2, 4), (2, 5), (3, 7), (4, 8), (4, 11)]
KINDS = [
    *((v, schedule) for v in (1, 2, 3) for schedule in ("1f1b", "gpipe")),
    *((3, "seqpipe"), (1, "zero_bubble_h1"), (2, "zero_bubble_v"), (2, "dualpipe_v")),
]
GRID = [(p, m, v, s) for p, m in SIZES for v, s in KINDS if s not in V_SHAPED or (p > 1 and m >= 2 * p)]
LETTERS = {"forward": "F", "weights": "W"}


def written(p, m, v, schedule):
    """A built-in schedule in the words of a file."""
    rows = []
    for stage in range(p):
        order = passes(stage, p, m, v, schedule)
        split = split_passes(order)
        letters = [LETTERS.get(one.kind, "I" if one in split else "B") for one in order]
        parts = [part_of_model(one.part, stage, p, schedule) for one in order]
        rows.append(",".join(f"{part}{k}{one.microbatch}" for part, k, one in zip(parts, letters, order, strict=True)))
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(("p", "m", "v", "schedule"), GRID)
def test_a_built_in_schedule_from_a_file_is_what_it_was(tmp_path, p, m, v, schedule):
    path = tmp_path / "order.csv"
    path.write_text(written(p, m, v, schedule))
    listed = read_schedule(path)
    assert (len(listed.orders), listed.num_microbatches, listed.virtual_stages) == (p, m, v)
    assert splits_backward(listed) == (any(split_passes(passes(s, p, m, v, schedule)) for s in range(p)))
    assert [stage_of_part(part, p, listed) for part in range(p * v)] == [
        stage_of_part(part, p, schedule) for part in range(p * v)
    ]
    for stage in range(p):
        assert passes(stage, p, m, v, listed) == passes(stage, p, m, v, schedule)
        assert [part_of_model(k, stage, p, listed) for k in range(v)] == [
            part_of_model(k, stage, p, schedule) for k in range(v)
        ]
        assert microbatches_held(stage, p, m, v, listed) == microbatches_held(stage, p, m, v, schedule)
        assert max(held_parts(stage, p, m, v, listed)) == max(held_parts(stage, p, m, v, schedule))
    assert idle_microbatches(p, m, v, listed) == pytest.approx(idle_microbatches(p, m, v, schedule))
    assert times(p, m, v, listed) == times(p, m, v, schedule)


ONE_TO_ONE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_idle_cells_and_blank_lines_are_left_out(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0, 0F1,,, 0B0,0B1\r\n\r\n,1F0,1B0,1F1,1B1\n")
    listed = read_schedule(path)
    assert listed.orders[1] == (
        Pass("forward", 0, 0),
        Pass("backward", 0, 0),
        Pass("forward", 0, 1),
        Pass("backward", 0, 1),
    )
    assert listed.parts == ((0,), (1,))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no passes"]),
        ("0F0,0X0\n1F0,oops\n", ["row 1, column 2: '0X0' is not a pass", "row 2, column 2: 'oops' is not a pass"]),
        ("\n,,\n0F0,0B0\n\n1F0,oops\n", ["row 2, column 2: 'oops'"]),
        ("0F0," + "x" * 200_000, ["column 2: 'xxxxxxxxxxxxxxxxxxxx' is not a pass"]),
        ("0F0,0SEND_F0,0B0\n", ["column 2: '0SEND_F0' is not a pass"]),
        (ONE_TO_ONE.replace("0B1", "0B0"), ["row 1: 0B0 is there 2 times", "part 0 needs 0B1, or 0I1 and 0W1"]),
        (ONE_TO_ONE.replace(",1F1", ""), ["row 2: 1F1 is missing"]),
        (ONE_TO_ONE.replace("1B1", "1I1"), ["row 2: microbatch 1 of part 1 needs 1B1, or 1I1 and 1W1"]),
        (ONE_TO_ONE.replace("1B1", "1B1,1W1"), ["row 2: microbatch 1 of part 1 needs 1B1, or 1I1 and 1W1"]),
        (
            ONE_TO_ONE.replace("1F0,1B0", "1B0,1F0"),
            ["row 1 waits for ever at 0B0", "row 2 waits for ever at 1B0, which"],
        ),
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1W0,1I0,1B1\n", ["row 2 waits for ever at 1W0, which needs 1I0 first"]),
        ("0F0,0B0\n0F1,0B1\n", ["part 0 is on 2 rows"]),
        ("0F0,0B0\n2F0,2B0\n", ["part 1 is missing: 2 parts are numbered from 0"]),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", ["the rows hold 2, 1 parts"]),
        ("0F0,0F999999,0B0\n", ["0F1 is missing", "and more"]),
    ],
)
def test_every_fault_is_named(tmp_path, text, words):
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_schedule(path)
    said = "\n".join(caught.value.problems)
    for word in words:
        assert word in said
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)


def test_a_schedule_with_two_passes_exchanged_is_refused_or_obeys_what_passes_need(tmp_path):
    """Random exchanges: where one is not refused, each pass still comes after those that it needs."""
    drawn, refused = random.Random(3), 0
    for number in range(300):
        rows = [row.split(",") for row in written(2, 4, 2, "dualpipe_v").split()]
        row = drawn.choice(rows)
        i, j = sorted(drawn.sample(range(len(row)), 2))
        row[i], row[j] = row[j], row[i]
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join(map(",".join, rows)))
        try:
            listed = read_schedule(path)
        except ConfigError:
            refused += 1
            continue
        ends = {}
        for stage, spans in enumerate(times(2, 4, 2, listed)):
            for one, start, end in spans:
                ends[one.kind, part_of_model(one.part, stage, 2, listed), one.microbatch] = start, end
        for (kind, part, i), (start, _) in ends.items():
            before = {"forward": ("forward", part - 1, i), "backward": ("backward", part + 1, i)}.get(kind)
            before = ("backward", part, i) if kind == "weights" else before
            assert before not in ends or ends[before][1] <= start
    assert 100 < refused < 290


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ("{num_microbatches: 2, schedule: order.csv}", None),
        ("{num_microbatches: 4, schedule: order.csv}", "s.yaml:2: pipeline.num_microbatches is 4, and order.csv has 2"),
        (
            "{num_microbatches: 2, virtual_stages: 2, schedule: order.csv}",
            "pipeline.virtual_stages is 2, and order.csv has 1 parts of the model a row",
        ),
        ("{num_microbatches: 2, schedule: 1f1c}", "'1f1c' is none of 1f1b, gpipe"),
        ("{num_microbatches: 2, schedule: wrong.csv}", "wrong.csv: row 1, column 1: 'oops' is not a pass"),
        ("{num_microbatches: 2, schedule: order.csv}\nengine: mindspore", "have no schedules from files; use 1f1b"),
    ],
)
def test_a_strategy_and_its_schedule_agree(tmp_path, pipeline, words):
    (tmp_path / "order.csv").write_text(ONE_TO_ONE)
    (tmp_path / "wrong.csv").write_text("oops\n")
    path = tmp_path / "s.yaml"
    path.write_text(f"mesh: {{pp: 2}}\npipeline: {pipeline}\n")
    if words is None:
        assert load_strategy(path).pipeline.order == read_schedule(tmp_path / "order.csv")
        assert load_strategy(path, for_inference=True).pipeline.listed is None
        return
    with pytest.raises(ConfigError) as caught:
        load_strategy(path)
    assert words in str(caught.value)


def test_a_strategy_written_elsewhere_still_finds_its_schedule(tmp_path):
    (tmp_path / "order.csv").write_text(ONE_TO_ONE)
    path, other = tmp_path / "s.yaml", tmp_path / "other" / "s.yaml"
    path.write_text("mesh: {pp: 2}\nrules: decoder\npipeline: {num_microbatches: 2, schedule: order.csv}\n")
    other.parent.mkdir()
    strategy = load_strategy(path)
    other.write_text(strategy_text(strategy, "decoder"))
    assert load_strategy(other).pipeline.order == strategy.pipeline.order


def test_a_schedule_for_other_stages_is_refused(tmp_path):
    (tmp_path / "order.csv").write_text(ONE_TO_ONE)
    path = tmp_path / "s.yaml"
    path.write_text("mesh: {pp: 4}\npipeline: {num_microbatches: 4, schedule: order.csv}\n")
    with pytest.raises(ConfigError, match=r"mesh\.pp is 4, and order.csv has 2 rows"):
        load_strategy(path)
