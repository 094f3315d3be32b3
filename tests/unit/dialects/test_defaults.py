# SPDX-License-Identifier: Apache-2.0
"""What a configuration leaves out has the value it has there, where ours is another."""

import pytest
from conftest import CONFIGS

from sporeloom.dialects.settings import Settings
from sporeloom.dialects.translate import translate
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.train.plain_text import TrainConfig

RULES = CONFIGS / "rules" / "decoder.yaml"
MEGATRON = "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 4 {}\n"
DEEPSPEED = '{{"train_batch_size": 8{}}}'
MINDFORMERS_2 = "parallelism: {{tensor_parallel: 2}}\ntraining: {{steps: 10, global_batch_size: 8}}\n{}\n"
MEGATRON_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.01}
MEGATRON_ANY = {"max_grad_norm": 1.0, "min_learning_rate": 0.0, "warmup_steps": 0}
DEEPSPEED_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0}
MINDFORMERS_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.01}
CASES = {
    "megatron": ("x.sh", MEGATRON, "--lr 1e-4", {"optimizer": "adamw", **MEGATRON_ADAM, **MEGATRON_ANY}),
    "megatron adam": ("x.sh", MEGATRON, "--lr 1e-4 --optimizer adam", {"optimizer": "adamw", **MEGATRON_ADAM}),
    "megatron given": (
        "x.sh",
        MEGATRON,
        "--lr 1e-4 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 0 --lr-warmup-iters 7 --min-lr 1e-5",
        {"weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.0, "warmup_steps": 7, "min_learning_rate": 1e-5},
    ),
    "megatron warm-up of its own": ("x.sh", MEGATRON, "--lr 1e-4 --lr-warmup-fraction 0.1", {"warmup_steps": None}),
    "megatron sgd": ("x.sh", MEGATRON, "--lr 1e-4 --optimizer sgd", {"max_grad_norm": 1.0, "weight_decay": None}),
    "megatron, no training": ("x.sh", MEGATRON, "", {"optimizer": None, "weight_decay": None, "warmup_steps": None}),
    "deepspeed": (
        "x.json",
        DEEPSPEED,
        ', "optimizer": {"type": "Adam"}',
        {"optimizer": "adamw", "learning_rate": 1e-3, "max_grad_norm": 0.0, **DEEPSPEED_ADAM},
    ),
    "deepspeed given": (
        "x.json",
        DEEPSPEED,
        ', "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 1, "weight_decay": 0.3}}',
        {"learning_rate": 1, "max_grad_norm": 0.5, "weight_decay": 0.3},
    ),
    "deepspeed sgd": (
        "x.json",
        DEEPSPEED,
        ', "optimizer": {"type": "SGD", "params": {"lr": 1}}',
        {"max_grad_norm": 0.0},
    ),
    "deepspeed, no training": ("x.json", DEEPSPEED, "", {"max_grad_norm": None, "weight_decay": None}),
    "mindformers 2": ("x.yaml", MINDFORMERS_2, "optimizer: {type: AdamW}", {"optimizer": "adamw", **MINDFORMERS_ADAM}),
    "mindformers 2 given": (
        "x.yaml",
        MINDFORMERS_2,
        "optimizer: {type: AdamW, weight_decay: 0.1, betas: [0.8, 0.9]}",
        {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9},
    ),
    "mindformers 2, no training": ("x.yaml", MINDFORMERS_2, "", {"optimizer": None, "weight_decay": None}),
}


def known(**train):
    return Settings(SINGLE_DEVICE, train, 4)


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_out_has_its_own_default(tmp_path, case):
    name, form, text, wanted = CASES[case]
    (tmp_path / name).write_text(form.format(text))
    done = translate(tmp_path / name, "ours", RULES, tmp_path / "o.yaml", known(), devices=4)
    assert {field: done.settings.train.get(field) for field in wanted} == wanted
    defaults = {field.name: field.default for field in TrainConfig.__dataclass_fields__.values()}
    told = " ".join(note.text for note in done.notes)
    for field, value in wanted.items():
        is_left_out = "given" not in case and value is not None and value != defaults[field]
        assert not is_left_out or f"--{field.replace('_', '-')} {value}" in told


def test_flags_of_the_call_win(tmp_path):
    (tmp_path / "x.sh").write_text(MEGATRON.format("--lr 1e-4"))
    flags = known(weight_decay=0.2, optimizer="sgd")
    train = translate(tmp_path / "x.sh", "ours", RULES, tmp_path / "o", flags).settings.train
    assert train["weight_decay"] == 0.2 and train["optimizer"] == "sgd"
