# SPDX-License-Identifier: Apache-2.0
"""The lm-evaluation-harness on our models: its numbers are those of our own scorer, on any mesh, from local files."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, call, in_process, tool

pytestmark = pytest.mark.slow
WORKER = "tests/cli/lm_eval_worker.py"
CHOICES = Path(__file__).with_name("town_task.yaml").read_text(encoding="utf-8")
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


def test_single_tasks_are_where_the_harness_has_them_and_found_without_its_index(tasks, write):
    folders = ("aclue", "blimp", "ceval", "hellaswag", "lambada", "mmlu", "piqa", "winogrande")
    names = ["piqa", "hans", str(tasks / "town.yaml"), "aclue_poetry_appreciate", "winogrande"]
    own = write("further/mine.yaml", "task: winogrande\noutput_type: generate_until\n")  # in place of the harness's
    elsewhere, count, asked, known = call(WORKER, "places", folders, names, own.parent)
    assert elsewhere == [] and count > 400
    assert (asked[1:3], asked[4]) == (names[1:3], names[4])
    assert [path.rpartition("/lm_eval/tasks/")[2] for path in (asked[0], asked[3])] == [
        "piqa/piqa.yaml",
        "aclue/aclue_poetry_appreciate.yaml",
    ]
    assert known < 100  # of ours alone; the next test's wants all


def test_what_is_wrong_is_told_in_a_line(checkpoint, tmp_path):
    asked = ("tools/evaluate.py", "lm-eval", "--checkpoint", checkpoint)
    told = in_process(*asked, "--tasks", tmp_path / "none.yaml", "--compare", tmp_path / "none.json")
    assert told.code == 2
    assert "none.yaml: there is no such file" in told.output and "none.json" in told.output
    told = tool(*asked, "--tasks", "helaswag_of_mine")
    assert told.code == 2
    assert "--tasks helaswag_of_mine: the harness has no such task" in told.output


IDIOMS = [
    "一心一意",
    "三心二意",
    "四面八方",
    "五光十色",
    "六神无主",
    "七上八下",
    "九牛一毛",
    "十全十美",
    "百发百中",
    "千军万马",
]
PUBLISHED = {  # as CLUE publishes them
    "clue/tnews/dev.json": [
        {"label": "102", "label_desc": "news_entertainment", "sentence": "歌手自拍", "keywords": ""}
    ],
    "clue/wsc/dev.json": [
        {
            "target": {"span1_text": noun, "span1_index": 0, "span2_text": "他", "span2_index": 3},
            "label": label,
            "text": text,
        }
        for noun, label, text in (("小明", "true", "小明说他饿了。"), ("小红", "false", "小明对小红说他饿了。"))
    ],
    "clue/c3/m-dev.json": [
        [
            ["河上有桥。", "桥边有树。"],
            [{"question": "哪里有桥？", "choice": ["山上", "河上", "树上"], "answer": "河上"}],
            "m1",
        ]
    ],
    "clue/c3/d-dev.json": [
        [["女：去哪儿？", "男：学校。"], [{"question": "去哪儿？", "choice": ["学校", "家"], "answer": "学校"}], "d1"]
    ],
    "clue/chid/dev.json": [{"content": ["他做事#idiom000001#，从不#idiom000002#。"], "candidates": IDIOMS}],
    "clue/chid/dev_answer.json": {"#idiom000001#": 0, "#idiom000002#": 1},
    "clue/cmrc2018/dev.json": {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": "桥在河上，建于1998年。",
                        "qas": [{"question": "桥建于哪年？", "answers": [{"text": "1998年", "answer_start": 7}]}],
                    }
                ]
            }
        ]
    },
    "perplexity.jsonl": [{"text": "河上有桥。"}],
}
ONE_DOCUMENT = ("clue/c3/m-dev.json", "clue/c3/d-dev.json", "clue/chid/dev_answer.json", "clue/cmrc2018/dev.json")
OF_PUBLISHED = [  # task, target, choices, one of what is asked
    ("clue_wsc", 1, 2, "小明说他饿了。其中“他”指的是“小明”。"),
    ("clue_c3", 1, 3, "河上有桥。\n桥边有树。\n问：哪里有桥？\n答：河上"),
    ("clue_chid", 0, 10, "他做事四面八方，从不三心二意。"),
    ("clue_cmrc2018", "1998年", 1, "阅读文章：桥在河上，建于1998年。\n问：桥建于哪年？\n答："),
    ("perplexity", "河上有桥。", 1, "河上有桥。"),
]


def test_tasks_of_our_own_read_published_files(checkpoint, tmp_path):
    pairs = [
        {"sentence1": "河上有桥", "sentence2": "桥在河上", "label": "entailment", "gold_label": "entailment"},
        {"sentence1": "河上有桥", "sentence2": "没有河", "label": "contradiction", "gold_label": "non-entailment"},
        {"sentence1": "春天", "sentence2": "燕子", "label": "-", "gold_label": "entailment"},
    ]
    files = {"hans/heuristics_evaluation_set.jsonl": pairs, "clue/ocnli/dev.json": pairs, **PUBLISHED}
    for name, rows in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = name in ONE_DOCUMENT
        path.write_text(json.dumps(rows) if whole else "".join(json.dumps(row) + "\n" for row in rows))
    names = ("hans", "clue_ocnli", "clue_tnews", "clue_wsc", "clue_c3", "clue_chid", "clue_cmrc2018", "perplexity")
    done = tool(
        *("tools/evaluate.py", "lm-eval", "--checkpoint", checkpoint, "--tasks", *names, "--output", "found.json"),
        cwd=tmp_path,
    )
    assert done.code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())["samples"]
    assert [sample["target"] for sample in found["hans"]] == [0, 1, 0]
    assert [sample["target"] for sample in found["clue_ocnli"]] == [0, 2]  # without the pair nobody agreed on
    choices = [continuation for _, continuation in found["clue_ocnli"][0]["arguments"]]
    assert choices == ["河上有桥？对，桥在河上", "河上有桥？也许，桥在河上", "河上有桥？错，桥在河上"]
    for name, target, count, asked in OF_PUBLISHED:
        sample = found[name][0]
        assert (sample["target"], len(sample["arguments"])) == (target, count), name
        assert any(asked in "".join(map(str, argument)) for argument in sample["arguments"]), name
    labels = {choice.split("的")[0] for _, choice in found["clue_tnews"][0]["arguments"]}
    assert len(labels) == 4
    assert [sample["target"] for sample in found["clue_wsc"]] == [1, 0]
    assert [sample["target"] for sample in found["clue_c3"]] == [1, 0]
    assert [sample["target"] for sample in found["clue_chid"]] == [0, 1]
    (tmp_path / "data/clue/c3/d-dev.json").unlink()
    told = tool("tools/evaluate.py", "lm-eval", "--checkpoint", checkpoint, "--tasks", "clue_c3", cwd=tmp_path)
    assert told.code == 2
    assert "--tasks clue_c3" in told.output and "data/clue/c3/d-dev.json" in told.output


def test_answers_in_words_are_scored_as_cmrc_scores_them():
    spec = importlib.util.spec_from_file_location("documents", ROOT / "sporeloom/evaluation/tasks/documents.py")
    documents = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(documents)

    def score(said, *answers):
        return documents.score_answer({"answers": answers}, [said])

    assert score("1998年。", "1998年", "1998") == {"em": 1.0, "f1": 1.0}
    assert score("建于1998年", "1998年") == {"em": 0.0, "f1": 2 * 2 / (4 + 2)}  # 1998 is one word
    assert score("New York", "new york city") == {"em": 0.0, "f1": 2 * 2 / (2 + 3)}
    assert score("", "桥") == {"em": 0.0, "f1": 0.0}
