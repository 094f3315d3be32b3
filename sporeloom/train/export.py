# SPDX-License-Identifier: Apache-2.0
"""Write the model of a run, unsharded."""

from __future__ import annotations

from pathlib import Path

from sporeloom.checkpoint.adapters import Adapter, write_adapter
from sporeloom.checkpoint.contents import AVERAGES
from sporeloom.checkpoint.model_folder import load_config, save_checkpoint
from sporeloom.runtime.gather import gather_whole
from sporeloom.train.start import Training


def write_model(training: Training, folder: Path, token: int, averaged: bool = False) -> None:
    """Write the full model, or the adapters, to `folder`. `token` separates this run's files from those of one that was
    killed here. `averaged`: with the moving averages of the trained weights. All ranks take part; the first writes."""
    run, config = training.run, training.run.config
    wanted = {f"model.{name}" for name in run.trained_shapes()}
    if averaged:
        trained = {parameter.name for parameter in training.optimizer.parameters}
        wanted = {f"{AVERAGES}{name}" if name in trained else name for name in wanted}
    parts_folder = config.output_dir / f".checkpoint_parts-{token}"
    whole = gather_whole(training.step, training.engine, training.report, parts_folder, wanted.__contains__)
    if whole is None:
        return
    named = {name.removeprefix(AVERAGES).removeprefix("model."): value for name, value in whole.items()}
    if run.lora:
        assert config.from_checkpoint
        adapter, base = Adapter(run.lora, named), config.from_checkpoint
        write_adapter(folder, adapter, *load_config(base), base, training.task.add_files)
    else:
        save_checkpoint(folder, named, run.family, run.model, training.task.add_files)
