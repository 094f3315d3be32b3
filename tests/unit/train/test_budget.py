# SPDX-License-Identifier: Apache-2.0
"""What `--data-budget` tells is what the steps read."""

from collections import Counter

import pytest

from sporeloom.core.command_line import parse_args
from sporeloom.data.sources import DocumentSource
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.models.family import family_module
from sporeloom.train.budget import data_budget
from sporeloom.train.checks import check
from sporeloom.train.data import prepare_data
from sporeloom.train.plain_text import TrainConfig


@pytest.fixture
def blend(tmp_path):
    texts = {name: [f"{name} {i} " * 20 for i in range(30)] for name in ("web", "books")}
    model = tmp_path / "tokenizer.model"
    model.write_bytes(family_module("pangu", "tokenizer").train_tokenizer([*texts["web"], *texts["books"]], 300))
    for name, documents in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(documents))
        tokenize(TokenizeJob(DocumentSource((tmp_path / f"{name}.txt",)), "pangu", model), tmp_path / name, 0, False)
    path = tmp_path / "blend.yaml"
    path.write_text("datasets:\n  - {path: web, weight: 0.75}\n  - {path: books, weight: 0.25}\n")
    return path


def test_tokens_of_each_dataset_are_those_of_the_steps_that_are_done(blend, tmp_path):
    words = f"--data {blend} --seq-len 32 --steps 12 --batch-size 8 --batch-size-ramp 4 4 20 --skip-steps 3-4 9"
    words += f" --random-ltd-min-value 16 --output-dir {tmp_path / 'out'}"
    run = check(parse_args(TrainConfig, "", words.split()), num_processes=None)
    _, loader = prepare_data(run, 0)
    done = [step for step in range(12) if step + 1 not in (3, 4, 9)]
    seen = Counter(int(number) for step in done for number in loader.drawn(step).datasets)
    head, web, books, everything, steps, dropped = data_budget(run)
    assert head.split()[:2] == ["dataset", "weight"]
    for number, line in enumerate((web, books)):
        name, _, own, tokens, epochs = line.split()
        assert name == ("web", "books")[number]
        assert int(own.replace(",", "")) == loader.datasets[number].tokens.info.num_tokens
        assert int(tokens.replace(",", "")) == 32 * seen[number] > 0
        assert float(epochs) == pytest.approx(seen[number] / loader.num_samples[number], abs=1e-3)
    assert everything.split()[-1].replace(",", "") == str(32 * seen.total())
    assert steps == "9 steps of 4 x 32 or 8 x 32 tokens"
    layer_tokens = sum(len(loader.batch(step).tokens) * (2 * run.random_ltd.kept(step, 32) + 2 * 32) for step in done)
    assert dropped.startswith(f"random-LTD: {layer_tokens:,} layer-tokens, ")
