# SPDX-License-Identifier: Apache-2.0
"""What our own scorer says of the harness' requests, for test_lm_eval."""

from pathlib import Path

import lm_eval.tasks
import mindspore as ms
import numpy as np

from sporeloom.checkpoint.model_folder import load_config
from sporeloom.data.tokenizer import find_tokenizer, load_tokenizer
from sporeloom.evaluation.harness import find_tasks, shipped_tasks
from sporeloom.inference.score import Scorer
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE


def score(folder, lines):
    """{choices: [[(log-probability, whether greedy)]], rolling: [log-probability]}."""
    ms.set_device("CPU")
    family, config = load_config(Path(folder))
    tokenizer = load_tokenizer(family, find_tokenizer(family, Path(folder)), config)
    scorer = Scorer(Engine.start(SINGLE_DEVICE), Path(folder), family, config)

    def of(context, continuation):
        tokens = [*context, *continuation]
        logits = scorer.logits(np.asarray([tokens[:-1]]), None)[0, -len(continuation) :].astype(np.float64)
        shifted = logits - logits.max(1, keepdims=True)
        each = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        picked = each[np.arange(len(continuation)), continuation]
        return float(picked.sum()), bool((logits.argmax(1) == continuation).all())

    choices, rolling = [], []
    for line in lines:
        context = tokenizer.encode(line["question"])
        whole = [tokenizer.encode(f"{line['question']} {choice}") for choice in line["choices"]]
        choices.append([of(context, tokens[len(context) :]) for tokens in whole])
        tokens, window, total = context, config.seq_len, 0.0
        before = tokenizer.eod_id
        for start in range(0, len(tokens), window):  # each window reads the token in front of it
            part = tokens[start : start + window]
            seen = [before] if start == 0 else tokens[max(0, start - (window - len(part)) - 1) : start]
            total += of(seen, part)[0]
        rolling.append(total)
    return {"choices": choices, "rolling": rolling}


def places(folders, names, include_path):
    """Of the single tasks in folders of the harness, those that its own index has elsewhere than we, and how many there are;
    what `names` are asked for by, and how many tasks the index knows that is asked."""
    root, shipped = Path(lm_eval.tasks.__file__).parent, shipped_tasks()
    index = lm_eval.tasks.TaskManager(include_path=[root / folder for folder in folders], include_defaults=False)
    entries = {name: str(index.task_index[name].yaml_path) for name in index.all_subtasks}
    elsewhere = [name for name, path in entries.items() if str(shipped.get(name)) != path]
    manager, asked = find_tasks(names, Path(include_path))
    return elsewhere, len(entries), asked, len(manager.all_tasks)
