# SPDX-License-Identifier: Apache-2.0
"""`sporeloom runs` on folders that the test writes."""

import json
import os
import re
import xml.etree.ElementTree as ET

import pytest

from sporeloom.cli.runs import main
from sporeloom.core.errors import ConfigError
from sporeloom.core.locks import one_writer
from sporeloom.train.recorded import find_runs
from sporeloom.train.run_plots import HEIGHT, MARKS, WIDTH, plot, thinned

CONFIG = {
    "train": {"model": "pangu", "size": "tiny", "config": None, "steps": 4, "run_name": None},
    "strategy": {"mesh": {"pp": 1, "dp": 2, "cp": 1, "ep": 1, "tp": 4, "order": ["pp", "dp", "cp", "tp"]}},
}


def write_run(folder, losses, began=1_000_000.0, is_finished=True, **train):
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "loss": loss, "tokens_per_s": 100.0 * step, "learning_rate": 1e-3}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "train": {**CONFIG["train"], **train}}))
    starts = [{"time": began, "steps_done": 0}]
    (folder / "history.json").write_text(json.dumps({"id": "00c0ffee", "starts": starts, "rewinds": []}))
    if is_finished:
        (folder / "summary.json").write_text("{}")
    return folder


def columns(said):
    """Rows of the table, split at two spaces or more."""
    rows = said.split("\n\n")[0].splitlines()
    return [re.split(r"\s{2,}", row.strip()) for row in rows]


def test_each_run_has_a_line_the_oldest_first(tmp_path, capsys):
    write_run(tmp_path / "second", [5.0, 3.0], began=2_000_000, is_finished=False, steps=9)
    write_run(tmp_path / "first", [4.0, 3.0, 2.5, 2.25], config="small/two_layers.json")
    assert main([str(tmp_path)]) == 0
    head, *rows = columns(capsys.readouterr().out)
    assert head == [
        "run",
        "model",
        "mesh",
        "steps",
        "loss",
        "validation",
        "tokens/s",
        "comp/comm/data",
        "status",
        "started",
    ]
    assert [row[:-1] for row in rows] == [
        ["a", "first", "pangu two_layers", "dp2 tp4", "4", "2.2500", "-", "250", "-", "finished"],
        ["b", "second", "pangu tiny", "dp2 tp4", "2 of 9", "3.0000", "-", "150", "-", "stopped"],
    ]


def test_the_table_and_the_page_divide_the_time_of_steps(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [4.0, 3.0])
    times = [(1.0, 0.5, 0.0), (5.0, 2.5, 1.0)]
    steps = [
        {"step": n, "loss": 4.0, "compute_s": compute, "communication_s": communication, "data_s": data}
        for n, (compute, communication, data) in enumerate(times, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert main([str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert columns(capsys.readouterr().out)[1][8] == "60%/30%/10%"
    assert "Exposed communication in a step, seconds" in (tmp_path / "page.html").read_text()


def test_a_run_is_named_as_it_was_asked_to_be(tmp_path):
    folder = write_run(tmp_path / "folder", [1.0], run_name="town")
    assert [run.name for run in find_runs([folder])] == ["town"]


def test_a_folder_twice_and_a_link_are_one_run(tmp_path):
    folder = write_run(tmp_path / "run", [1.0])
    (tmp_path / "latest").symlink_to("run")
    assert len(find_runs([tmp_path, folder, folder])) == 1


def test_a_run_that_somebody_writes_is_running(tmp_path):
    folder = write_run(tmp_path / "run", [1.0])
    with one_writer(folder):
        assert find_runs([folder])[0].status == "running"
    assert find_runs([folder])[0].status == "finished"


def test_a_run_that_was_resumed_and_killed_is_not_finished(tmp_path):
    folder = write_run(tmp_path / "run", [1.0])
    os.utime(folder / "summary.json", (1, 1))
    assert find_runs([folder])[0].status == "stopped"


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run", [2.0, 1.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert find_runs([folder])[0].points("loss") == [(1, 2.0), (2, 1.0)]


def test_a_damaged_line_is_named(tmp_path):
    folder = write_run(tmp_path / "run", [2.0])
    (folder / "metrics.jsonl").write_text('{"loss": 1}\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1: not the metrics of a step"):
        find_runs([folder])


def test_folders_without_runs_are_all_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        find_runs([tmp_path / "empty", tmp_path / "absent"])
    assert [problem.rpartition("/")[2] for problem in caught.value.problems] == [
        "empty: holds no run: neither it nor a folder in it has metrics.jsonl",
        "absent: no folder with metrics.jsonl",
    ]


def test_a_metric_that_no_run_has_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", [2.0])
    with pytest.raises(ConfigError, match=r"--metric los: no run has it; did you mean loss\?; there are loss, tok"):
        main([str(folder), "--metric", "los"])


def test_the_plot_has_each_value_where_it_belongs(tmp_path):
    falling = write_run(tmp_path / "falling", [4.0, 3.0, 2.0, 1.0])
    constant = write_run(tmp_path / "constant", [4.0, None, 4.0, 4.0], began=2_000_000)
    lines = plot(find_runs([falling, constant]), "loss").splitlines()
    rows = [line[12:].ljust(WIDTH) for line in lines[1 : 1 + HEIGHT]]
    at = [(step * (WIDTH - 1)) // 3 for step in range(4)]
    assert rows[0][at[0]] == "*" and rows[0][at[2]] == rows[0][at[3]] == "b"
    assert [rows[round(n * (HEIGHT - 1) / 3)][at[n]] for n in (1, 2, 3)] == ["a", "a", "a"]
    assert sum(len(row.split()) for row in rows) == 6  # and nothing else
    assert lines[1].split("|")[0].strip() == "4" and lines[HEIGHT].split("|")[0].strip() == "1"
    assert lines[-1].split() == ["1", "4"]


def test_many_steps_are_averaged():
    points = [(step, float(step)) for step in range(1, 1001)]
    found = thinned(points, 10, 1, 1000)
    assert sorted(found) == list(range(10))
    members = {n: [s for s in range(1, 1001) if (s - 1) * 9 // 999 == n] for n in range(10)}
    assert found == {n: sum(each) / len(each) for n, each in members.items()}


def test_the_page_is_complete_and_fetches_nothing(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a<b>&c", [4.0, 2.0])
    write_run(tmp_path / "runs" / "other", [5.0, 1.0], began=2_000_000)
    assert main([str(tmp_path / "runs"), "--html", str(tmp_path / "runs.html")]) == 0
    text = (tmp_path / "runs.html").read_text()
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    body = text[text.index("<body>") : text.index("</html>")]
    tree = ET.fromstring(body)
    assert [cell.text for cell in tree.findall(".//tbody/tr/td[2]")] == ["a<b>&c", "other"]
    charts = {figure.find("figcaption").text: figure for figure in tree.iter("figure")}
    assert list(charts) == ["Loss", "Tokens per second", "Learning rate"]
    first, second = charts["Loss"].findall(".//polyline")
    points = [[tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in (first, second)]
    high, low = points[1][0][1], points[1][1][1]  # of 5 and of 1
    assert points[0][0][1] == pytest.approx(low + (high - low) * 3 / 4, abs=0.1)
    assert points[0][1][1] == pytest.approx(low + (high - low) * 1 / 4, abs=0.1)
    assert first.get("stroke") != second.get("stroke")


def test_a_page_is_not_replaced_unasked(tmp_path):
    folder = write_run(tmp_path / "run", [2.0])
    (tmp_path / "runs.html").write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        main([str(folder), "--html", str(tmp_path / "runs.html")])
    assert main([str(folder), "--html", str(tmp_path / "runs.html"), "--overwrite"]) == 0


def test_the_newest_runs_have_marks_and_are_drawn(tmp_path):
    for number in range(len(MARKS) + 2):
        write_run(tmp_path / f"run{number:02}", [1.0, 2.0], began=1000.0 + number)
    runs = find_runs([tmp_path])
    drawn = plot(runs, "loss")
    assert drawn.endswith("the oldest 2 runs are not drawn")
    lines = (tmp_path / f"run{len(MARKS) + 1}" / "metrics.jsonl").read_text().splitlines()
    newest = [{**json.loads(line), "mfu": 0.5} for line in lines]
    (tmp_path / f"run{len(MARKS) + 1}" / "metrics.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in newest)
    )
    assert MARKS[-1] in plot(find_runs([tmp_path]), "mfu")
    assert plot(find_runs([tmp_path])[:-1], "mfu") == f"none of the newest {len(MARKS)} runs has mfu"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", json.dumps({"train": [], "strategy": []})),
        ("config.json", json.dumps({"train": {"config": 5}, "strategy": {"mesh": [1]}})),
        ("config.json", json.dumps({"train": {"run_name": "a\nb  forged  row"}})),
        ("config.json", '{"train": {"run_name": "\\ud800"}}'),
        ("config.json", "[" * 100_000),
        ("history.json", '{"id": "a", "starts": [{"time": 1e300}]}'),
        ("metrics.jsonl", '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n'),
        ("metrics.jsonl", '{"step": 1, "loss": ' + "9" * 400 + "}\n"),
        ("metrics.jsonl", '{"step": 1, "loss": 1.0}\n' + "[" * 100_000),
    ],
)
def test_files_of_others_end_no_listing_and_forge_no_row(tmp_path, capsys, name, text):
    write_run(tmp_path / "good", [1.0, 2.0])
    (write_run(tmp_path / "odd", [3.0]) / name).write_text(text)
    assert main([str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert len(columns(said)) == 3 and "good" in said
    assert "good" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_fine_tuned_model_is_named_by_its_checkpoint(tmp_path):
    folder = write_run(tmp_path / "tuned", [1.0], from_checkpoint="models/pangu_13b")
    assert [run.model for run in find_runs([folder])] == ["models/pangu_13b"]
