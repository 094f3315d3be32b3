# SPDX-License-Identifier: Apache-2.0
"""The lm-evaluation-harness on our models: its numbers are those of our own scorer, on any mesh, from local files."""

import json

import numpy as np
import pytest
from conftest import call, in_process, tool

pytestmark = pytest.mark.slow
WORKER = "tests/cli/lm_eval_worker.py"
CHOICES = """task: town
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """task: long_texts
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""
LINES = [
    {"question": "小城在山脚下，一条", "choices": ["河", "桥", "燕子"], "answer": 0},
    {"question": "河上有三座" * 12, "choices": ["桥", "河从城中穿过"], "answer": 0},
    {"question": "春天燕子", "choices": ["回来", "槐树"], "answer": 0},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "town.jsonl"
    data.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES))
    for name, text in (("town", CHOICES), ("long_texts", ROLLING)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


def test_its_numbers_are_our_scorers(checkpoint, tasks, tmp_path):
    done = tool(
        *("tools/evaluate.py", "lm-eval", "--checkpoint", checkpoint, "--tasks", tasks / "town.yaml"),
        *(tasks / "long_texts.yaml", "--output", tmp_path / "found.json"),
    )
    assert done.code == 0, done.output
    assert "town" in done.output and "byte_perplexity" in done.output
    found = json.loads((tmp_path / "found.json").read_text())
    expected = call(WORKER, "score", str(checkpoint), LINES)
    for document, sample in enumerate(found["samples"]["town"]):
        for (wanted, is_greedy), (answer,) in zip(expected["choices"][document], sample["resps"], strict=True):
            np.testing.assert_allclose(float(answer[0]), wanted, rtol=1e-6, atol=1e-5)
            assert str(answer[1]) == str(is_greedy)
    for wanted, sample in zip(expected["rolling"], found["samples"]["long_texts"], strict=True):
        np.testing.assert_allclose(float(sample["resps"][0][0]), wanted, rtol=1e-6)


def test_a_mesh_says_the_same_and_two_results_are_compared(checkpoint, tasks, tmp_path):
    asked = ("tools/evaluate.py", "lm-eval", "--checkpoint", checkpoint, "--tasks", tasks / "town.yaml")
    assert tool(*asked, "--output", tmp_path / "one.json").code == 0
    on_mesh = tool(
        *(
            *asked,
            "--strategy",
            "pangu_tiny_tp2",
            "--output",
            tmp_path / "two.json",
            "--compare",
            tmp_path / "one.json",
        ),
        processes=2,
    )
    assert on_mesh.code == 0, on_mesh.output
    assert "+0.0000 +-" in on_mesh.output
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for alone, together in zip(one["samples"]["town"], two["samples"]["town"], strict=True):
        for (first,), (second,) in zip(alone["resps"], together["resps"], strict=True):
            np.testing.assert_allclose(float(first[0]), float(second[0]), rtol=1e-5)


def test_what_is_wrong_is_told_in_a_line(checkpoint, tmp_path):
    asked = ("tools/evaluate.py", "lm-eval", "--checkpoint", checkpoint)
    told = in_process(*asked, "--tasks", tmp_path / "none.yaml", "--compare", tmp_path / "none.json")
    assert told.code == 2
    assert "none.yaml: there is no such file" in told.output and "none.json" in told.output
    told = tool(*asked, "--tasks", "helaswag_of_mine")
    assert told.code == 2
    assert "--tasks helaswag_of_mine: the harness has no such task" in told.output


def test_tasks_of_our_own_read_published_files(checkpoint, tmp_path):
    pairs = [
        {"sentence1": "河上有桥", "sentence2": "桥在河上", "label": "entailment", "gold_label": "entailment"},
        {"sentence1": "河上有桥", "sentence2": "没有河", "label": "contradiction", "gold_label": "non-entailment"},
        {"sentence1": "春天", "sentence2": "燕子", "label": "-", "gold_label": "entailment"},
    ]
    for path in ("data/hans/heuristics_evaluation_set.jsonl", "data/clue/ocnli/dev.json"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
    done = tool(
        *(
            "tools/evaluate.py",
            "lm-eval",
            "--checkpoint",
            checkpoint,
            "--tasks",
            "hans",
            "clue_ocnli",
            "--output",
            "found.json",
        ),
        cwd=tmp_path,
    )
    assert done.code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())["samples"]
    assert [sample["target"] for sample in found["hans"]] == [0, 1, 0]
    assert [sample["target"] for sample in found["clue_ocnli"]] == [0, 2]  # without the pair nobody agreed on
    choices = [continuation for _, continuation in found["clue_ocnli"][0]["arguments"]]
    assert choices == ["河上有桥？对，桥在河上", "河上有桥？也许，桥在河上", "河上有桥？错，桥在河上"]
