# SPDX-License-Identifier: Apache-2.0
"""The data budget of a run: how much of each dataset it reads until its end."""

from __future__ import annotations

from collections.abc import Iterator

from sporeloom.train.config import Run
from sporeloom.train.data import prepare_data
from sporeloom.train.spikes import parse_steps


def data_budget(run: Run) -> Iterator[str]:
    """Format a table of the tokens in each dataset and those that the run trains on. Text is tokenized first.

    Raises:
        ConfigError: the data do not fit the model.
    """
    config, (_, loader) = run.config, prepare_data(run, 0)
    left_out = {step for steps in parse_steps(config.skip_steps) for step in steps if step <= config.steps}
    samples = loader.shares.before(config.steps).copy()
    for step in sorted(left_out):
        samples -= loader.shares.before(step) - loader.shares.before(step - 1)
    each = [dataset.arrangement.num_trained for dataset in loader.datasets]
    seen, width = (samples * each).round().astype(int), max(len(dataset.name) for dataset in loader.datasets)
    yield f"{'dataset':{width}}  {'weight':>7}  {'its tokens':>17}  {'tokens seen':>17}  {'epochs':>8}"
    for dataset, weight, tokens, count, size in zip(
        loader.datasets, loader.shares.weights, seen, samples, loader.num_samples, strict=True
    ):
        have = dataset.tokens.info.num_tokens
        yield f"{dataset.name:{width}}  {weight:7.2%}  {have:17,}  {tokens:17,}  {count / size:8.3f}"
    all_of_them = sum(dataset.tokens.info.num_tokens for dataset in loader.datasets)
    yield f"{'all':{width}}  {1:7.2%}  {all_of_them:17,}  {seen.sum():17,}"
    steps = f"{config.steps - len(left_out):,} steps"
    yield f"{steps} of {' or '.join(f'{batch} x {length}' for batch, length in run.sizes.shapes())} tokens"
    if dropping := run.random_ltd:
        done = [step for step in range(config.steps) if step + 1 not in left_out]
        dropped = sum(dropping.layer_tokens(step, run.sizes) for step in done)
        everything = samples.sum() * loader.sizes.longest * run.model.num_layers
        yield f"random-LTD: {dropped:,} layer-tokens, {dropped / everything:.1%} of all"
