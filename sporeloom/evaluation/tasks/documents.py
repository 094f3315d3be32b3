# SPDX-License-Identifier: Apache-2.0
"""Documents of the tasks in this folder, from published files below data/; and the score of an answer in words."""

import hashlib
import json
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from datasets import Dataset

from sporeloom.core.lines import file_lines

NLI = ("entailment", "neutral", "contradiction")
CLUE = Path("data/clue")
NEWS = {
    **{"news_story": "故事", "news_culture": "文化", "news_entertainment": "娱乐", "news_sports": "体育"},
    **{"news_finance": "财经", "news_house": "房产", "news_car": "汽车", "news_edu": "教育", "news_tech": "科技"},
    **{"news_military": "军事", "news_travel": "旅游", "news_world": "国际", "news_stock": "证券"},
    **{"news_agriculture": "农业", "news_game": "电竞"},
}
NEGATIVE_LABELS = 3
BLANK = re.compile(r"#idiom\d+#")
WORD = re.compile(r"[a-z0-9]+|[^\W_]")


def with_label(dataset: Any) -> Any:
    """Pairs whose annotators agreed; where they did not the label is -."""
    return dataset.filter(lambda document: document["label"] in NLI)


def with_candidates(dataset: Any) -> Any:
    """News with their label among three others, which its text draws: the same in every run."""

    def add(document: dict[str, Any]) -> dict[str, Any]:
        right = NEWS[document["label_desc"]]
        others = sorted((label for label in NEWS.values() if label != right), key=lambda label: _drawn(document, label))
        labels = sorted((right, *others[:NEGATIVE_LABELS]), key=lambda label: _drawn(document, label + label))
        return {"candidates": labels, "target": labels.index(right)}

    return dataset.map(add)


def _drawn(document: dict[str, Any], label: str) -> bytes:
    return hashlib.sha256((document["sentence"] + label).encode()).digest()


def c3(**_: Any) -> dict[str, Dataset]:
    """Questions about texts (m-) and dialogues (d-), each with up to four answers."""
    rows = [
        {
            "passage": "\n".join(lines),
            "question": asked["question"],
            "choices": asked["choice"],
            "answer": asked["answer"],
        }
        for name in ("m-dev.json", "d-dev.json")
        for lines, questions, *_ in _read("c3", name)
        for asked in questions
    ]
    return {"validation": Dataset.from_list(rows)}


def chid(**_: Any) -> dict[str, Dataset]:
    """A document for each blank: the text with each of ten idioms in it, the right ones in its other blanks."""
    answers = _read("chid", "dev_answer.json")
    lines = file_lines(CLUE / "chid" / "dev.json")
    return {"validation": Dataset.from_list([row for line in lines for row in _blanks(json.loads(line), answers)])}


def _blanks(document: dict[str, Any], answers: dict[str, int]) -> Iterator[dict[str, Any]]:
    idioms = document["candidates"]
    right = {tag: idioms[place] for tag, place in answers.items() if place < len(idioms)}
    for text in document["content"]:
        for blank in dict.fromkeys(BLANK.findall(text)):
            filled = [_filled(text, {**right, blank: idiom}) for idiom in idioms]
            yield {"texts": filled, "target": answers[blank]}


def _filled(text: str, idioms: dict[str, str]) -> str:
    return BLANK.sub(lambda tag: idioms[tag[0]], text)


def cmrc(**_: Any) -> dict[str, Dataset]:
    """Questions whose answer is a part of the text."""
    rows = [
        {
            "context": part["context"],
            "question": asked["question"],
            "answers": [each["text"] for each in asked["answers"]],
        }
        for article in _read("cmrc2018", "dev.json")["data"]
        for part in article["paragraphs"]
        for asked in part["qas"]
    ]
    return {"validation": Dataset.from_list(rows)}


def _read(task: str, name: str) -> Any:
    return json.loads((CLUE / task / name).read_text(encoding="utf-8"))


def score_answer(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """CMRC's exact match and F1 of the longest common part, the best over all right answers; case and punctuation aside."""
    said = WORD.findall(results[0].lower())
    right = [WORD.findall(answer.lower()) for answer in document["answers"]]
    return {"em": float(said in right), "f1": max(_overlap(said, answer) for answer in right)}


def _overlap(said: list[str], right: list[str]) -> float:
    common = SequenceMatcher(None, said, right, autojunk=False).find_longest_match().size
    return 2 * common / (len(said) + len(right)) if common else 0.0
