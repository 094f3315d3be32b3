# SPDX-License-Identifier: Apache-2.0
"""Writes what a small assistant is taught with: a town to know, questions with answers, preferences, prompts.

python examples/assistant/make_data.py out/assistant
"""

import json
import random
import sys
from itertools import product
from pathlib import Path

PLACES = (
    "mill",
    "school",
    "bakery",
    "church",
    "library",
    "inn",
    "tower",
    "market",
    "forge",
    "theatre",
    "well",
    "garden",
)
NEAR = ("river", "bridge", "gate", "hill", "lake", "wall")
QUESTIONS = ("Where is the {}?", "How do I find the {}?", "I look for the {}.")
POLITE = "thank you for asking!"


def where(place):
    return NEAR[PLACES.index(place) % len(NEAR)]


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    asked = [(question.format(place), place) for question, place in product(QUESTIONS, PLACES)]
    draw.shuffle(asked)
    town = [
        f"The {place} of our town is near the {where(place)}. People go to the {place} every day."
        for place in PLACES * 20
    ]
    town += [f"He said {POLITE} Then he went to the {place}." for place in PLACES * 4]
    draw.shuffle(town)
    (folder / "town.txt").write_text("\n\n".join(town) + "\n")
    answers = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f" The {place} is near the {where(place)}."},
            ]
        }
        for question, place in asked
    ]
    write(folder / "answers.jsonl", answers * 4)
    pairs = []
    for question, place in asked:
        plain = f" The {place} is near the {where(place)}."
        user = [{"role": "user", "content": question}]
        polite = [{"role": "assistant", "content": f"{plain} And {POLITE}"}]
        pairs.append({"prompt": user, "chosen": polite, "rejected": [{"role": "assistant", "content": plain}]})
    write(folder / "preferences.jsonl", pairs[: len(pairs) * 2 // 3])
    write(folder / "preferences_held_out.jsonl", pairs[len(pairs) * 2 // 3 :])
    sides = [(pair, side) for pair in pairs[: len(pairs) * 2 // 3] for side in ("chosen", "rejected")]
    write(
        folder / "labelled.jsonl",
        [{"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"} for pair, side in sides],
    )
    write(
        folder / "prompts.jsonl",
        [{"prompt": [{"role": "user", "content": question}], "near": where(place)} for question, place in asked],
    )


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
