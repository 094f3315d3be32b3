# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model on HumanEval-X, programs in six languages run against their tests, or on lm-evaluation-harness
tasks.

sporeloom evaluate humaneval-x --data humaneval-x --checkpoint out/latest/checkpoint --language python cpp \
    --num-samples 20 --temperature 0.8 --top-p 0.95 --output-dir out/humaneval --allow-execution
sporeloom evaluate humaneval-x --data humaneval-x --language cpp --translate-from python --checkpoint ...
sporeloom evaluate humaneval-x --data humaneval-x --language all --canonical --output-dir out/canonical \
    --allow-execution

sporeloom evaluate lm-eval --tasks hellaswag piqa --checkpoint out/latest/checkpoint --strategy ... --launch
sporeloom evaluate lm-eval --tasks mine.yaml --checkpoint out/latest/checkpoint --output now.json --compare before.json

Programs a model wrote run only with --allow-execution, and isolated: no network, a folder of their own that vanishes,
limits on time, memory, processes and output. Prints pass@k of each language in percent; the folder gets every sample,
what became of it, and the summary.

lm-eval runs tasks of the lm-evaluation-harness (pip install -e '.[eval]'): its own, or YAML files that name data of
yours. Their own data come from the network unless HF_DATASETS_OFFLINE=1 and they are there already. A YAML file of tasks
may name Python code (`!function`), which runs with all your rights: only with --trust-remote-code.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.locks import one_writer
from sporeloom.core.log import print_report
from sporeloom.core.scratch import scratch_folder
from sporeloom.evaluation.config import EvaluateConfig, Evaluation, check
from sporeloom.evaluation.harness_config import HarnessConfig, as_json, table
from sporeloom.evaluation.harness_config import check as check_harness
from sporeloom.runtime.environment import is_first_process, launched_processes, prepare_environment
from sporeloom.runtime.launch import launch_verb


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    if "lm-eval" in argv:
        return run_harness(argv)
    config = parse_args(EvaluateConfig, __doc__, argv, lambda config: check(config, None))
    evaluation = check(config, None if config.launch else launched_processes())
    with one_writer(config.output_dir) if is_first_process() else nullcontext():
        return evaluate(config, evaluation, argv)


def evaluate(config: EvaluateConfig, evaluation: Evaluation, argv: Sequence[str]) -> int:
    if evaluation.job and config.launch:
        generates = [word for word in argv if word != "--allow-execution"]
        with scratch_folder() as folder:
            if code := launch_verb("evaluate", generates, evaluation.job.strategy.mesh, folder):
                return code
    elif evaluation.job and not import_module("sporeloom.evaluation.generation").make_samples(evaluation).is_log_rank:
        return 0
    if not config.allow_execution:
        return 0
    scores = import_module("sporeloom.evaluation.scores")
    print(scores.table(scores.judge_samples(evaluation)))
    return 0


def run_harness(argv: Sequence[str]) -> int:
    config = parse_args(HarnessConfig, __doc__, argv, lambda config: check_harness(config, None))
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed: pip install -e '.[eval]'")
    harness = check_harness(config, None if config.launch else launched_processes())
    if config.launch:
        with scratch_folder() as folder:
            return launch_verb("evaluate", argv, harness.job.strategy.mesh, folder)
    found = import_module("sporeloom.evaluation.harness").evaluate(harness)
    if found is None:
        return 0
    if config.output:
        write_text_atomically(config.output, as_json(found["results"], found.get("samples", {}), config))
    print_report(table(found["results"], harness.earlier))
    return 0
