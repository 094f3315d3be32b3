# SPDX-License-Identifier: Apache-2.0
"""Write a made-up town to learn (town.txt), questions with answers (answers.jsonl), and each question
in a wording that is not among them (questions.txt), with the right answers (right_answers.txt).

python examples/assistant/make_questions.py out/town
"""

import json
import random
import sys
from pathlib import Path

PLACES = (
    ("mill", "by the river", "Anna", "six"),
    ("school", "behind the church", "Mr. Brown", "eight"),
    ("bakery", "next to the fountain", "Peter", "five"),
    ("library", "on the hill", "Clara", "ten"),
    ("inn", "at the north gate", "Tom", "noon"),
    ("market", "on the square", "Rosa", "seven"),
    ("forge", "under the old bridge", "Hugo", "nine"),
    ("theatre", "opposite the town hall", "Ella", "seven in the evening"),
    ("post office", "near the station", "Martin", "eight"),
    ("garden", "at the lake", "Lucy", "nine"),
    ("museum", "in the castle", "Doctor Green", "ten"),
    ("pharmacy", "beside the school", "Nora", "nine"),
)
"""Place, where it is, who works there, and when it opens."""
KINDS = (
    (
        ("Where is the {}?", "How do I find the {}?", "How do I get to the {}?", "Where can I find the {}?"),
        "The {place} is {where}.",
    ),
    (
        ("Who works at the {}?", "Who runs the {}?", "Whom do I meet at the {}?", "Who looks after the {}?"),
        "{who} works at the {place}.",
    ),
    (
        (
            "When does the {} open?",
            "At what time does the {} open?",
            "When can I go to the {}?",
            "When is the {} open?",
        ),
        "The {place} opens at {when}.",
    ),
)
"""Of each kind of question: wordings, three of which are taught for a place and one kept for the test; and the answer."""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    text, answers, questions, right = [], [], [], []
    for place, where, who, when in PLACES:
        facts = [answer.format(place=place, where=where, who=who, when=when) for _, answer in KINDS]
        text += [" ".join(draw.sample(facts, 3)) for _ in range(30)]
        for (wordings, _), fact in zip(KINDS, facts, strict=True):
            kept, *taught = draw.sample([wording.format(place) for wording in wordings], 4)
            text += [f"{question} {fact}" for question in taught]
            answers += [conversation(question, f" {fact}") for question in taught]
            questions.append(kept)
            right.append(fact)
    draw.shuffle(text)
    draw.shuffle(answers)
    (folder / "town.txt").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers), encoding="utf-8")
    (folder / "questions.txt").write_text("\n".join(questions) + "\n", encoding="utf-8")
    (folder / "right_answers.txt").write_text("\n".join(right) + "\n", encoding="utf-8")


def conversation(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
