# SPDX-License-Identifier: Apache-2.0
"""Measure what a model can do: HumanEval-X, programs written in six languages and run against their tests.

mindloom evaluate humaneval-x --data humaneval-x --checkpoint out/checkpoint --language python cpp \\
    --num-samples 20 --temperature 0.8 --top-p 0.95 --output-dir out/humaneval --allow-execution
mindloom evaluate humaneval-x --data humaneval-x --language cpp --translate-from python --checkpoint ...
mindloom evaluate humaneval-x --data humaneval-x --language all --canonical --output-dir out/canonical \\
    --allow-execution

Programs a model wrote run only with --allow-execution, and isolated: no network, a folder of their own that vanishes,
limits on time, memory, processes and output. Prints pass@k of each language in percent; the folder gets every sample,
what became of it, and the summary.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from mindloom.cli import parse_args
from mindloom.evaluation.config import EvaluateConfig, Evaluation, check
from mindloom.locks import one_writer
from mindloom.runtime.environment import is_first_process, launched_processes, prepare_environment
from mindloom.runtime.launch import launch_verb
from mindloom.scratch import scratch_folder


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    config = parse_args(EvaluateConfig, __doc__, argv)
    evaluation = check(config, None if config.launch else launched_processes())
    with one_writer(config.output_dir) if is_first_process() else nullcontext():
        return evaluate(config, evaluation, argv)


def evaluate(config: EvaluateConfig, evaluation: Evaluation, argv: Sequence[str]) -> int:
    if evaluation.job and config.launch:
        generates = [word for word in argv if word != "--allow-execution"]
        with scratch_folder() as folder:
            if code := launch_verb("evaluate", generates, evaluation.job.strategy.mesh, folder):
                return code
    elif evaluation.job and not import_module("mindloom.evaluation.generation").make_samples(evaluation).is_log_rank:
        return 0
    if not config.allow_execution:
        return 0
    scores = import_module("mindloom.evaluation.scores")
    print(scores.table(scores.judge_samples(evaluation)))
    return 0
