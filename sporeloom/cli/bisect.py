# SPDX-License-Identifier: Apache-2.0
"""Name the first operator, rank and tensor in which two recorded runs differ.

    sporeloom bisect out_a out_b
    sporeloom bisect out_a reference.safetensors --step 10

Both runs were made with --record. Runs of one program are compared bit for bit; those of different meshes, or a run and a
file of what a reference implementation computed, within a tolerance. Exit code 1: they differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from sporeloom.core.command_line import argument, option, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Bounds, Natural, number_problems
from sporeloom.runtime.environment import prepare_environment
from sporeloom.runtime.recorded_environment import take_over_environment


@dataclass(frozen=True, kw_only=True)
class BisectConfig:
    """Flags of `sporeloom bisect`."""

    a: Path = argument("folder of a run that was recorded with --record")
    b: Path = argument("folder of the run that it is compared with, or a .safetensors or .npz file of a reference")
    step: Natural | None = option(None, "step that is compared (default: all that both have, from the first one)")
    tolerance: Annotated[float, Bounds(0, 1)] = option(
        1e-4, "for different meshes: fraction of the largest number of a tensor by which its numbers may differ"
    )


def main(argv: Sequence[str]) -> int:
    config = parse_args(BisectConfig, __doc__, argv)
    if problems := list(number_problems(config)):
        raise ConfigError(problems)
    take_over_environment(config.a, 0)
    prepare_environment()
    kind = import_module("sporeloom.runtime.cpu.recording").Recording
    a, b = kind(config.a), None if config.b.is_file() else kind(config.b)
    for recording in (a, b) if b else (a,):
        for what in recording.other_versions():
            print(f"other version: {recording.run} was recorded with {what}")
    code, said = _with_run(config, a, b) if b else _with_reference(config, a)
    print(said)
    return code


def _with_run(config: BisectConfig, a: Any, b: Any) -> tuple[int, str]:
    module = import_module("sporeloom.runtime.cpu.differences")
    steps = module.common_steps(a, b)
    if config.step is not None:
        steps = [step for step in steps if step == config.step]
    if not steps:
        raise ConfigError(f"--step {config.step}: {a.run} and {b.run} both have steps {module.common_steps(a, b)}")
    try:
        found = module.first_difference(a, b, steps)
    except module.OtherProgramError:
        return _of_wholes(config, a, b, steps)
    if found is None:
        return 0, f"steps {steps[0]} to {steps[-1]} of all {len(a.roots)} ranks are equal bit for bit"
    return 1, f"first difference: {found}"


def _of_wholes(config: BisectConfig, a: Any, b: Any, steps: Sequence[int]) -> tuple[int, str]:
    module = import_module("sporeloom.runtime.cpu.whole_differences")
    lines = [f"{a.run} and {b.run} run different graphs: whole values are compared within {config.tolerance:g}"]
    for step in steps:
        found = module.first_difference_of_wholes(a, b, step, config.tolerance)
        if isinstance(found, str):
            return 1, "\n".join([*lines, f"first difference: step {step}, {found}"])
        lines.append(f"step {step}: {found}")
    return 0, "\n".join(lines)


def _with_reference(config: BisectConfig, a: Any) -> tuple[int, str]:
    steps = a.common_steps() if config.step is None else [config.step]
    if len(steps) != 1:
        raise ConfigError(f"{config.b}: is of one step, {a.run} has {steps}; give --step")
    reference = import_module("sporeloom.runtime.cpu.reference")
    tensors = reference.read_reference(config.b)
    own = import_module("sporeloom.runtime.cpu.whole_values").WholeStep.of(a, steps[0])
    other = reference.as_step(tensors, own, config.b)
    found = import_module("sporeloom.runtime.cpu.whole_differences").compared(own, other, config.tolerance)
    is_equal = not isinstance(found, str)
    return int(not is_equal), f"step {steps[0]}: {found}" if is_equal else f"first difference: step {steps[0]}, {found}"
