# SPDX-License-Identifier: Apache-2.0
"""MindFormers' and Megatron's words: nothing is lost without being named."""

import ast
import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
import yaml
from conftest import CONFIGS, ROOT, run

from sporeloom.core.errors import ConfigError
from sporeloom.dialects import Settings, recognize, translate
from sporeloom.models.family import size_config
from sporeloom.strategy.checks import strategy_problems
from sporeloom.strategy.config import (
    SINGLE_DEVICE,
    Offload,
    OptimizerParallel,
    Pipeline,
    Recompute,
    Rules,
    Stages,
    Strategy,
)
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.mesh import Mesh
from sporeloom.strategy.text import strategy_text

RULES = CONFIGS / "rules" / "decoder.yaml"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
NOTHING = Settings(SINGLE_DEVICE)


def plain(strategy):
    """Without what only messages need, and without rules, which other dialects do not have."""
    return dataclasses.replace(strategy, rules=Rules(), source="", lines={})


def there_and_back(path, dialect, tmp_path, known=NOTHING, devices=None):
    """The strategy after a journey through a dialect, and what was noted on the way there."""
    there = translate(path, dialect, RULES, tmp_path / "there", known)
    suffix = ".sh" if dialect == "megatron" else ".yaml"
    (tmp_path / f"there{suffix}").write_text(there.text)
    back = translate(tmp_path / f"there{suffix}", "ours", RULES, tmp_path / "back.yaml", known, devices)
    (tmp_path / "back.yaml").write_text(back.text)
    return load_strategy(tmp_path / "back.yaml"), there, back


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_strategy_comes_back_from_mindformers_as_it_was(path, tmp_path):
    original = load_strategy(path)
    back, there, _ = there_and_back(path, "mindformers1", tmp_path)
    assert plain(back) == plain(original)
    assert [dataclasses.replace(r, source="") for r in back.rules.operators] == [
        dataclasses.replace(r, source="") for r in original.rules.operators
    ]
    selective = original.recompute is not None and original.recompute.kind == "selective"
    assert [note.key for note in there.losses] == ["recompute.kind"] * selective


@pytest.mark.parametrize("dialect", ["mindformers2", "megatron"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_strategy_comes_back_from_the_others_or_the_difference_is_named(path, dialect, tmp_path):
    original = load_strategy(path)
    known = Settings(SINGLE_DEVICE, {"batch_size": 2 * original.mesh.dp * original.pipeline.num_microbatches}, 40)
    back, there, _ = there_and_back(path, dialect, tmp_path, known, original.mesh.size)
    assert named(plain(original), plain(back), there), (plain(original), plain(back), there.notes)


def named(original, back, there):
    """Whether each field that differs is named in the report of what was written."""
    written = [note.key for note in there.notes if ":" not in note.place]
    different = [f.name for f in dataclasses.fields(Strategy) if getattr(original, f.name) != getattr(back, f.name)]
    return all(any(key.startswith(name) for key in written) for name in different)


def random_strategy(random):
    pp, dp, tp = (random.choice([1, 2, 4, 8]) for _ in range(3))
    cp = random.choice([1, 1, 2, 4])
    stages, pipeline, recompute, zero = "uniform", Pipeline(), None, None
    if pp > 1:
        virtual = random.choice([1, 1, 1, 2, 3])
        if random.random() < 0.4:
            weights = [random.choice([1.0, 1.5, 2.0]) for _ in range(pp * virtual)]
            layers = [random.randrange(1, 9) for _ in range(pp * virtual)]
            stages = random.choice([Stages(weights=weights), Stages(num_layers=layers)])
        pipeline = Pipeline(
            num_microbatches=pp * random.randrange(1, 5),
            stages=stages,
            virtual_stages=virtual,
            schedule=random.choice(["1f1b", "1f1b", "gpipe", "seqpipe"]) if virtual > 1 else "1f1b",
        )
    if random.random() < 0.7:
        kind = random.choice(["full", "selective"])
        recompute = random.choice(
            [
                Recompute(kind=kind),
                Recompute(kind=kind, per_stage=[random.randrange(0, 4) for _ in range(pp)]),
                Recompute(kind=kind, layers=sorted(random.sample(range(8), random.randrange(1, 8)))),
            ]
        )
    if dp > 1 and random.random() < 0.6:
        size = random.choice([None, *(d for d in (2, 4) if dp % d == 0 and d < dp)])
        zero = OptimizerParallel(
            threshold_kb=random.choice([0, 64, 24]),
            shard_size=size,
            shard_accumulated_gradients=pp > 1 and random.random() < 0.5,
            reshard_after_forward=pp == 1 and recompute == Recompute() and random.random() < 0.5,
        )
    strategy = Strategy(
        mesh=Mesh(pp=pp, dp=dp, cp=cp, tp=tp),
        pipeline=pipeline,
        recompute=recompute,
        optimizer_parallel=zero,
        sequence_parallel=tp > 1 and random.random() < 0.5,
        context_parallel=random.choice(["gather", "ulysses"]) if cp > 1 else "gather",
        micro_batch_interleave=random.choice([1, 1, 1, 1, 2]),
    )
    return dataclasses.replace(strategy, engine="mindspore") if strategy.device_problems() else strategy


@pytest.mark.parametrize("dialect", ["mindformers1", "mindformers2", "megatron"])
def test_random_strategies_come_back_or_the_difference_is_named(dialect, tmp_path):
    random, same, tried = Random(7), 0, 0
    while tried < 60:
        strategy = random_strategy(random)
        if strategy_problems(strategy):
            continue
        tried += 1
        path = tmp_path / "in.yaml"
        path.write_text(strategy_text(strategy, str(RULES)))
        original = load_strategy(path)
        assert plain(original) == plain(strategy)  # our own words lose nothing
        stages = strategy.pipeline.stages
        num_layers = (
            sum(stages.num_layers)
            if isinstance(stages, Stages) and stages.num_layers
            else random.choice([16, 17, None])
        )
        batch = 2 * strategy.mesh.dp * strategy.pipeline.num_microbatches * strategy.micro_batch_interleave
        known = Settings(
            SINGLE_DEVICE,
            {"batch_size": batch} if random.random() < 0.9 or dialect != "mindformers1" else {},
            num_layers,
        )
        try:
            back, there, _ = there_and_back(path, dialect, tmp_path, known, strategy.mesh.size)
        except ConfigError as error:
            raise AssertionError((strategy, error)) from None
        assert named(plain(original), plain(back), there), (strategy, plain(back), there.notes)
        same += plain(original) == plain(back)
    assert same > tried * 0.1  # Megatron has no order of virtual stages, nor uneven ones


MINE = """\
seed: 7
output_dir: ./out
use_parallel: True
micro_batch_interleave_num: 2
seeed: 3
trainer: {type: CausalLanguageModelingTrainer, model_name: pangualpha_13b}
parallel_config:
  data_parallel: 4
  model_parallel: 2
  pipeline_stage: 4
  micro_batch_num: 8
  optimizer_shard: True
  gradient_aggregation_group: 4
  vocab_emb_dp: True
parallel:
  enable_parallel_optimizer: True
  parallel_optimizer_config: {gradient_accumulation_shard: True}
  auto_parallel_search_mode: x
recompute_config:
  recompute: [3, 5, 5, 5]
  select_recompute: True
  mp_comm_recompute: True
model:
  model_config:
    type: PanguAlphaConfig
    num_layers: 42
    offset: [0, 1, 1, 0]
    compute_dtype: float16
    use_flash_attention: True
runner_config: {batch_size: 2, epochs: 1, stop_step: 90, gradient_accumulation_steps: 2}
optimizer: {type: AdamW, betas: [0.9, 0.99], eps: 1e-6}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 2e-5, warmup_ratio: 0.1}
runner_wrapper:
  type: MFTrainOneStepCell
  scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 65536}
callbacks:
  - type: MFLossMonitor
  - type: CheckpointMointor
    save_checkpoint_steps: 500
    integrated_save: True
"""


def fates(done):
    return {note.key: note.fate for note in done.notes}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("optimizer_level: level1", OptimizerParallel(threshold_kb=64)),
        ("optimizer_level: level2", OptimizerParallel(threshold_kb=64, shard_accumulated_gradients=True)),
        ("optimizer_level: level3", OptimizerParallel(threshold_kb=64, reshard_after_forward=True)),
    ],
)
def test_mindformers_optimizer_levels(given, expected, write, tmp_path):
    text = f"parallel: {{enable_parallel_optimizer: true, parallel_optimizer_config: {{{given}}}}}\n"
    text += "parallel_config: {data_parallel: 4}\nrecompute_config: {recompute: true}\n"
    done = translate(write("theirs.yaml", text), "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert done.settings.strategy.optimizer_parallel == expected and not done.losses
    without = write("without.yaml", text.replace("recompute: true", "recompute: false"))
    done = translate(without, "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert done.settings.strategy.optimizer_parallel == dataclasses.replace(expected, reshard_after_forward=False)
    assert fates(done)["parallel.parallel_optimizer_config.optimizer_level"] == (
        "approximated" if "level3" in given else "renamed"
    )


def test_every_key_of_a_users_file_is_in_the_report_with_its_line(write, tmp_path):
    path = write("mine.yaml", MINE)
    done = translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING)
    strategy, train = done.settings.strategy, done.settings.train
    assert plain(strategy) == Strategy(
        mesh=Mesh(pp=4, dp=4, tp=2),
        engine="mindspore",  # whose settings it has
        pipeline=Pipeline(num_microbatches=8, stages=Stages(num_layers=[10, 11, 11, 10])),
        recompute=Recompute(per_stage=[3, 5, 5, 5]),
        optimizer_parallel=OptimizerParallel(threshold_kb=64, shard_accumulated_gradients=True),
        micro_batch_interleave=2,
        source="",
    )
    expected = {"steps": 90, "seed": 7, "model": "pangu", "batch_size": 64, "adam_beta1": 0.9, "adam_beta2": 0.99}
    expected |= {"adam_epsilon": 1e-6, "learning_rate": 2e-5, "save_every": 500, "output_dir": "./out"}
    expected |= {"compute_dtype": "float16", "attention": "flash", "loss_scale": 65536}
    assert train == expected | {"config": "MODEL.json"} and done.settings.model == size_config(
        "pangu", "13b"
    ).with_layers(42)
    found = fates(done)
    assert found["micro_batch_interleave_num"] == "renamed" and done.settings.strategy.micro_batch_interleave == 2
    assert found["seeed"] == found["parallel.auto_parallel_search_mode"] == "unknown"
    assert found["parallel_config.vocab_emb_dp"] == found["recompute_config.select_recompute"] == "no effect"
    assert found["runner_config.gradient_accumulation_steps"] == "no effect"
    assert found["lr_schedule.warmup_ratio"] == "not expressible"
    assert found["model.model_config.compute_dtype"] == "same"
    assert found["runner_wrapper.scale_sense.loss_scale_value"] == "renamed"
    notes = {note.key: str(note) for note in done.notes}
    assert notes["seeed"] == f"{path}:5: seeed: unknown: no such key; did you mean seed?"
    assert "MindFormers sets it to False in a pipeline" in notes["parallel_config.vocab_emb_dp"]
    assert notes["parallel_config.vocab_emb_dp"].startswith(f"{path}:14: ")
    lines = {int(note.place.rpartition(":")[2]) for note in done.notes}
    leaves = {
        n
        for n, line in enumerate(MINE.splitlines(), 1)
        if ":" in line and not line.rstrip().endswith((":", "- type: X"))
    }
    assert leaves <= lines
    assert "--model pangu" in (command := done.text.partition("\n")[0]) and "--config MODEL.json" in command


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("data_parallel: 4", "data_paralel: 4"),
            "mine.yaml:8: parallel_config.data_paralel is not a key of MindFormers 1.x; did you mean data_parallel?",
        ),
        (("  mp_comm_recompute: True", "  recomput: True"), "mine.yaml:22: recompute_config.recomput is not a key"),
        (
            ("micro_batch_num: 8", "micro_batch_num: 3"),
            "mine.yaml:11: pipeline.num_microbatches = 3 is fewer than the 4 stages",
        ),
        (("seeed: 3", "seed: 3"), "mine.yaml:5: seed is given twice"),
        (("seeed: 3", "seeed: ["), "not YAML"),
        (("recompute: [3, 5, 5, 5]", "recompute: [3, 5]"), "recompute.per_stage has 2 entries for 4 stages"),
        (("seeed: 3", "base_config: none.yaml"), "none.yaml: cannot be read"),
        (("seeed: 3", "base_config: mine.yaml"), "inherits from itself"),
    ],
)
def test_what_mindformers_would_refuse_is_refused_with_its_line(write, tmp_path, change, message):
    path = write("mine.yaml", MINE.replace(*change))
    with pytest.raises(ConfigError) as caught:
        translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert message in str(caught.value)


def test_a_file_inherits_from_another(write, tmp_path):
    write("base.yaml", "seed: 1\nparallel_config: {data_parallel: 2, model_parallel: 4}\n")
    path = write("mine.yaml", "base_config: base.yaml\nparallel_config:\n  data_parallel: 8\n")
    done = translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert done.settings.strategy.mesh == Mesh(dp=8, tp=4)
    assert {note.key: Path(note.place.rpartition(":")[0]).name for note in done.notes} == {
        "seed": "base.yaml",
        "parallel_config.model_parallel": "base.yaml",
        "parallel_config.data_parallel": "mine.yaml",
    }


@pytest.mark.parametrize("name", ["pangualpha_2.6b", "pangualpha_13b", "codegeex_13b"])
def test_the_ready_files_are_our_strategies_in_mindformers_words(name, tmp_path):
    path = CONFIGS / "mindformers" / f"{name}.yaml"
    ours = {
        "pangualpha_2.6b": "pangu_2.6b_dp64_tp8",
        "pangualpha_13b": "pangu_13b_dp128_tp8",
        "codegeex_13b": "codegeex_13b_dp192_tp8",
    }[name]
    assert recognize(path) == "mindformers1"
    done = translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert plain(done.settings.strategy) == plain(load_strategy(CONFIGS / f"{ours}.yaml"))
    assert not done.losses
    assert (
        done.settings.train["batch_size"] == {"pangualpha_2.6b": 256, "pangualpha_13b": 256, "codegeex_13b": 3072}[name]
    )


def test_no_key_of_mindformers_own_template_is_unknown(write, tmp_path):
    package = find_spec("mindformers")
    if package is None:
        pytest.skip("mindformers is not installed")
    source = Path(package.submodule_search_locations[0]) / "tools" / "register" / "template.py"
    classes = {n.name: n for n in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)}
    sections = {"GeneralConfig": "", "ParallelConfig": "parallel_config.", "RecomputeConfig": "recompute_config."}
    sections |= {"SwapConfig": "swap_config.", "MoEConfig": "moe_config.", "RunnerConfig": "runner_config."}
    sections |= {"MsParallelConfig": "parallel.", "ContextConfig": "context.", "MonitorConfig": "monitor_config."}
    keys = [
        prefix + target.id
        for name, prefix in sections.items()
        for statement in classes[name].body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if not target.id.startswith("_")
    ]
    assert len(keys) > 120
    two = {"parallel_config.data_parallel", "parallel_config.model_parallel"}
    text = "".join(f"{key}: 1\n" for key in keys if "." not in key)
    for prefix in dict.fromkeys(key.partition(".")[0] for key in keys if "." in key):
        text += f"{prefix}:\n" + "".join(
            f"  {key.partition('.')[2]}: {1 + (key in two)}\n" for key in keys if key.startswith(prefix + ".")
        )
    done = translate(write("all.yaml", text), "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert {note.key for note in done.notes} >= set(keys) - {"base_config"}
    assert [note.key for note in done.notes if note.fate == "unknown"] == []


def test_what_has_no_effect_on_such_a_mesh_is_left_out_of_our_file(write, tmp_path):
    text = "parallel_config: {data_parallel: 1, model_parallel: 4}\nparallel: {enable_parallel_optimizer: True}\n"
    done = translate(write("mine.yaml", text), "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert done.settings.strategy.optimizer_parallel is None
    assert fates(done)["parallel.enable_parallel_optimizer"] == "no effect"


def test_mindformers_2_needs_the_devices_for_its_data_parallel_degree(write, tmp_path):
    text = (
        "parallelism: {tensor_parallel: 2, pipeline_parallel: 2, hsdp_shard_size: 2, pipeline_parallel_microbatch_size: 2}\n"
        "recompute: {select_recompute: True}\ntraining: {global_batch_size: 64, steps: 10}\n"
    )
    path = write("mine.yaml", text)
    done = translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING, devices=16)
    assert plain(done.settings.strategy) == Strategy(
        mesh=Mesh(pp=2, dp=4, tp=2),
        pipeline=Pipeline(num_microbatches=8),
        recompute=Recompute(kind="selective"),
        optimizer_parallel=OptimizerParallel(threshold_kb=64, shard_size=2),
        source="",
    )
    assert done.settings.train == {"batch_size": 64, "steps": 10}
    for devices, message in ((None, "give --devices"), (6, "6 devices are not a multiple of 4")):
        with pytest.raises(ConfigError, match=message):
            translate(path, "ours", RULES, tmp_path / "out.yaml", NOTHING, devices=devices)
    with pytest.raises(
        ConfigError, match=r"tensor_paralel is not a key of MindFormers 2\.x; did you mean tensor_parallel"
    ):
        translate(
            write("b.yaml", text.replace("tensor_parallel", "tensor_paralel")), "ours", RULES, tmp_path / "o", NOTHING
        )


MEGATRON_DEFAULTS = {
    **{"optimizer": "adamw", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.01},
    **{"max_grad_norm": 1.0, "min_learning_rate": 0.0, "warmup_steps": 0},
}
"""Of its arguments, as its documentation lists them."""


def test_a_megatron_script_is_read(write, tmp_path):
    script = """#!/bin/bash
# a comment with --not-a-flag
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size=2 \\
    --num-layers 40 --decoder-last-pipeline-num-layers 18 \\
    --micro-batch-size 2 --global-batch-size 64 --rampup-batch-size 16 16 1000 \\
    --sequence-parallel --use-distributed-optimizer --recompute-activations \\
    --lr 1.5e-4 --bf16 --num-layers-per-virtual-pipeline-stage 2 --made-up 3
"""
    done = translate(write("pretrain.sh", script), "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert plain(done.settings.strategy) == Strategy(
        mesh=Mesh(pp=2, dp=4, tp=8),
        pipeline=Pipeline(num_microbatches=8, stages=Stages(num_layers=[22, 18])),
        recompute=Recompute(kind="selective"),
        optimizer_parallel=OptimizerParallel(),
        sequence_parallel=True,
        source="",
    )
    train = {"batch_size": 64, "learning_rate": 1.5e-4, "compute_dtype": "bfloat16", "batch_size_ramp": (16, 16, 1000)}
    assert done.settings.train == {**MEGATRON_DEFAULTS, **train}
    found = fates(done)
    assert found["--made-up"] == "unknown"
    assert found["--num-layers-per-virtual-pipeline-stage"] == "not expressible"
    assert "--not-a-flag" not in found


def test_the_tool_prints_the_report_and_writes_the_file(tmp_path):
    source = CONFIGS / "mindformers" / "pangualpha_13b.yaml"
    out = tmp_path / "mine.yaml"
    outcome = run("tools/translate.py", source, "--to", "ours", "--out", out)
    assert outcome.code == 0, outcome.output
    assert "parallel_config.model_parallel: renamed: mesh.tp" in outcome.output
    assert load_strategy(out).mesh == Mesh(dp=128, tp=8)
    assert "is there already" in run("tools/translate.py", source, "--to", "ours", "--out", out).output
    selective = CONFIGS / "pangu_tiny_tp2_pp2_selective.yaml"
    outcome = run(
        "tools/translate.py", selective, "--to", "mindformers1", "--out", tmp_path / "x.yaml", "--json", "--strict"
    )
    assert outcome.code == 1
    assert json.loads(outcome.output)["losses"] == 1
    outcome = run("tools/translate.py", ROOT / "none.yaml", "--to", "ours")
    assert (outcome.code, "cannot be read" in outcome.output) == (2, True)


def test_what_is_moved_to_the_host_is_translated(write, tmp_path):
    swap = (
        "swap_config:\n  swap: True\n  layer_swap:\n    - {layers: [0, 2], backward_prefetch: 1}\n    - {layers: [5]}\n"
    )
    text = f"parallel_config:\n  data_parallel: 4\n{swap}  op_swap: [{{op_name: matmul}}]\n"
    done = translate(write("mf.yaml", text), "ours", RULES, tmp_path / "out.yaml", NOTHING)
    assert done.settings.strategy.offload == Offload(layers=[0, 2, 5])
    found = fates(done)
    assert (found["swap_config.layer_swap"], found["swap_config.op_swap"]) == ("renamed", "not expressible")
    assert load_strategy(write("out.yaml", done.text)).offload == Offload(layers=[0, 2, 5])
    flags = "torchrun --nproc_per_node 4 x.py --optimizer-cpu-offload\n"
    done = translate(write("m.sh", flags), "ours", RULES, tmp_path / "m.yaml", NOTHING)
    assert done.settings.strategy.offload == Offload(optimizer=True)
    ours = write("ours.yaml", f"mesh: {{dp: 4}}\nrules: {RULES}\noffload: {{optimizer: true, layers: all}}\n")
    for dialect, lost, said in (
        ("mindformers1", "offload.optimizer", "layer_swap: [{layers: true"),
        ("mindformers2", "offload", "parallelism:"),
        ("megatron", "offload.layers", "--optimizer-cpu-offload"),
    ):
        done = translate(ours, dialect, RULES, tmp_path / dialect, NOTHING)
        assert fates(done)[lost] == "not expressible" and said in done.text


def test_what_is_written_for_mindformers_is_what_it_builds(tmp_path):
    """Sections that MindFormers builds by their type name one, and numbers are numbers to YAML."""
    train = {"loss_scale": 65536.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "learning_rate": 1e-4}
    train |= {"save_every": 5, "keep_last": 2}
    done = translate(
        CONFIGS / "pangu_tiny_tp2_pp2.yaml", "mindformers1", RULES, tmp_path / "x", Settings(SINGLE_DEVICE, train)
    )
    written = yaml.safe_load(done.text)
    assert written["runner_wrapper"] == {
        "type": "MFTrainOneStepCell",
        "scale_sense": {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 65536.0},
    }
    assert written["optimizer"] == {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8}
    assert written["lr_schedule"] == {"type": "CosineWithWarmUpLR", "learning_rate": 1e-4}
    assert written["callbacks"] == [{"type": "CheckpointMonitor", "save_checkpoint_steps": 5, "keep_checkpoint_max": 2}]


@pytest.mark.parametrize("dialect", ["mindformers1", "mindformers2", "megatron"])
@pytest.mark.parametrize(
    "pipeline",
    [
        "{num_microbatches: 4, schedule: zero_bubble_h1}",
        "{num_microbatches: 4, schedule: gpipe}",
        "{num_microbatches: 4, virtual_stages: 2, schedule: dualpipe_v}",
        "{num_microbatches: 2, schedule: own.csv}",
    ],
)
def test_a_schedule_that_the_others_lack_is_a_loss(tmp_path, dialect, pipeline):
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    path = tmp_path / "s.yaml"
    path.write_text(f"mesh: {{pp: 2}}\nrules: decoder\npipeline: {pipeline}\n")
    known = Settings(SINGLE_DEVICE, {"batch_size": 4}, 8)
    done = translate(path, dialect, RULES, tmp_path / "theirs", known)
    assert "pipeline.schedule" in {note.key for note in done.losses}
    assert not any(name in done.text for name in ("zero_bubble", "gpipe", "dualpipe", "own.csv"))
