# SPDX-License-Identifier: Apache-2.0
"""Models and YAML files through MindFormers' interfaces give what our own tools give."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TWO_LAYERS, run, tool

from sporeloom.core.errors import ConfigError
from sporeloom.integrations.trainer import Trainer

TEXT = ROOT / "examples" / "small_town.txt"
CODE = ROOT / "sporeloom" / "core" / "command_line.py"
PROMPT = "\u5c0f\u57ce\u5728\u5c71\u811a\u4e0b"
WORKER = Path(__file__).with_name("mindformers_worker.py")
YAML = """\
seed: 3
output_dir: {out}
trainer: {{type: CausalLanguageModelingTrainer, model_name: pangualpha_tiny}}
parallel_config: {{data_parallel: 1, model_parallel: 1}}
model: {{model_config: {{type: PanguAlphaConfig, seq_length: 32}}}}
runner_config: {{batch_size: 4, stop_step: 6}}
optimizer: {{type: AdamW, betas: [0.9, 0.98], eps: 1.0e-7, weight_decay: 0.05}}
lr_schedule: {{type: CosineWithWarmUpLR, learning_rate: 2.0e-3, lr_end: 1.0e-4, warmup_steps: 3}}
runner_wrapper: {{type: MFTrainOneStepCell, max_grad_norm: 0.5}}
"""
needs_mindformers = pytest.mark.skipif(find_spec("mindformers") is None, reason="mindformers is not installed")
pytestmark = pytest.mark.slow


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def printed(outcome):
    """The last line of JSON."""
    return json.loads([line for line in outcome.output.splitlines() if line.startswith("{")][-1])


def script(tmp_path, *lines, timeout=300):
    """Run lines of a user's script in a folder of its own; the last one prints JSON."""
    path = tmp_path / "script.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return run(path, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=timeout)


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """A checkpoint of each family."""
    out = tmp_path_factory.mktemp("codegeex")
    outcome = tool(
        "tools/train.py",
        "--model",
        "codegeex",
        "--config",
        TWO_LAYERS,
        "--data",
        CODE,
        "--steps",
        2,
        "--seq-len",
        32,
        "--output-dir",
        out,
    )
    assert outcome.code == 0, outcome.output
    return {"pangu": checkpoint, "codegeex": out / "checkpoint"}


PROMPTS = {"pangu": PROMPT, "codegeex": "def add(a, b):\n    return"}


@needs_mindformers
def test_auto_classes_generate_and_pipeline_equal_our_tools(trained, tmp_path):
    words = []
    for family, prompt in PROMPTS.items():
        np.save(tmp_path / f"{family}.npy", np.random.RandomState(0).randint(10, 900, (2, 20)))
        words += [trained[family], tmp_path / f"{family}.npy", prompt]
    outcome = run(WORKER, *words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 0, outcome.output
    assert not any(word in outcome.output for word in ("WARNING", "ERROR", "Traceback")), outcome.output
    assert "INFO" not in outcome.output, outcome.output  # least of all the whole configuration
    lines = [json.loads(line) for line in outcome.output.splitlines() if line.startswith("{")]
    for (family, prompt), found in zip(PROMPTS.items(), lines, strict=True):
        equals_our_tools(family, prompt, found, trained[family], tmp_path)


def equals_our_tools(family, prompt, found, folder, tmp_path):
    ids_file = tmp_path / f"{family}.npy"
    assert found["config"] == [{"pangu": "PanGuConfig", "codegeex": "CodeGeeXConfig"}[family], 2, 128]
    assert found["round_trip"] == prompt

    scored = tool(
        "tools/score.py", "--checkpoint", folder, "--ids", ids_file, "--logits-out", tmp_path / f"{family}.ours.npy"
    )
    assert scored.code == 0, scored.output
    assert np.load(tmp_path / f"{family}.ours.npy").tobytes() == np.load(f"{ids_file}.logits.npy").tobytes()

    generate = ("tools/generate.py", "--checkpoint", folder, "--max-new-tokens", 6, "--json", "--prompt", prompt)
    ours = printed(tool(*generate))
    assert found["generated"][0] == found["prompt"] + ours["tokens"]
    assert found["generated"][1][:2] == found["prompt"][:2]
    assert found["pipeline"] == found["by_folder"] == [prompt + ours["text"]]
    masks = found["batch"]["attention_mask"]
    assert masks[0] == [1] * len(found["prompt"])
    assert sum(masks[1]) < len(masks[1])


def test_a_yaml_trains_as_our_tool_does_and_goes_on_from_there(tmp_path):
    (tmp_path / "mine.yaml").write_text(YAML.format(out=tmp_path / "theirs"))
    code = (
        "import json",
        "from sporeloom.integrations.trainer import Trainer",
        f"trainer = Trainer('mine.yaml', train_dataset={str(TEXT)!r}, config={str(TWO_LAYERS)!r})",
        "folder = trainer.train()",
        f"text = trainer.predict({PROMPT!r}, max_new_tokens=6)",
        f"more = Trainer('mine.yaml', train_dataset={str(TEXT)!r}, config={str(TWO_LAYERS)!r}, output_dir='more', steps=1)",
        "more.finetune(folder)",
        "print(json.dumps({'folder': str(folder), 'text': text}))",
    )
    outcome = script(tmp_path, *code)
    assert outcome.code == 0, outcome.output
    found = printed(outcome)
    flags = (
        *(
            "--seed",
            3,
            "--seq-len",
            32,
            "--batch-size",
            4,
            "--config",
            TWO_LAYERS,
            "--steps",
            6,
            "--adam-beta1",
            0.9,
            "--adam-beta2",
            0.98,
        ),
        *("--adam-epsilon", 1e-7, "--weight-decay", 0.05, "--learning-rate", 2e-3, "--min-learning-rate", 1e-4),
        *("--warmup-steps", 3, "--max-grad-norm", 0.5),
    )
    ours = tool("tools/train.py", "--data", TEXT, *flags, "--output-dir", tmp_path / "ours")
    assert ours.code == 0, ours.output
    assert len(losses(tmp_path / "ours")) == 6
    np.testing.assert_allclose(losses(tmp_path / "theirs"), losses(tmp_path / "ours"), rtol=1e-5)
    generate = (
        "tools/generate.py",
        "--checkpoint",
        found["folder"],
        "--max-new-tokens",
        6,
        "--json",
        "--prompt",
        PROMPT,
    )
    assert found["text"] == [printed(tool(*generate))["text"]]
    more = tool(
        *("tools/train.py", "--data", TEXT, *flags, "--steps", 1, "--from-checkpoint", found["folder"]),
        *("--output-dir", tmp_path / "more_of_ours"),
    )
    assert more.code == 0, more.output
    np.testing.assert_allclose(losses(tmp_path / "more"), losses(tmp_path / "more_of_ours"), rtol=1e-5)
    assert losses(tmp_path / "more")[0] < losses(tmp_path / "ours")[0] - 0.2


def test_evaluate_is_the_loss_of_our_tool(checkpoint, tmp_path):
    (tmp_path / "mine.yaml").write_text(YAML.format(out=tmp_path / "out"))
    tokens = tmp_path / "tokens"
    made = tool("tools/preprocess.py", "tokenize", TEXT, "--tokenizer", checkpoint / "tokenizer.model", "--out", tokens)
    assert made.code == 0, made.output
    code = (
        "import json",
        "from sporeloom.integrations.trainer import Trainer",
        "import sporeloom.integrations.trainer as module",
        f"trainer = Trainer('mine.yaml', eval_dataset={str(tokens)!r})",
        f"found = trainer.evaluate({str(checkpoint)!r})",
        "module.LOGITS_BYTES = 30 * 4 * 32 * 2048  # batches of 30, 30 and what is left",
        f"found['in_parts'] = trainer.evaluate({str(checkpoint)!r})",
        "print(json.dumps(found))",
    )
    outcome = script(tmp_path, *code)
    assert outcome.code == 0, outcome.output
    ids = np.lib.stride_tricks.sliding_window_view(np.fromfile(tokens / "tokens.bin", np.uint16), 33)[::32].astype(int)
    np.save(tmp_path / "ids.npy", ids)
    scored = tool("tools/score.py", "--checkpoint", checkpoint, "--ids", tmp_path / "ids.npy", "--eod-id", 9)
    found = printed(outcome)
    # The tool also runs the last id of a row: products of another shape, which round otherwise.
    assert found["loss"] == pytest.approx(printed(scored)["loss"], rel=1e-6)
    assert found["in_parts"]["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert found["in_parts"]["num_tokens"] == found["num_tokens"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Trainer('mine.yaml').train()", "train needs train_dataset"),
        ("Trainer('mine.yaml', stepz=3)", "stepz is not a field"),
        ("Trainer('none.yaml')", "none.yaml: cannot be read"),
        ("Trainer('mine.yaml').finetune()", "finetune needs a checkpoint folder"),
        ("Trainer('mine.yaml').predict('x', temprature=1)", "temprature is unknown"),
        ("Trainer('mine.yaml').evaluate()", "there is no such checkpoint folder"),
    ],
)
def test_a_mistake_in_a_script_is_named(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(YAML.format(out=tmp_path / "out"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        exec(line, {"Trainer": Trainer})


def test_nothing_else_imports_mindformers_and_its_absence_is_said(tmp_path):
    for path in [*(ROOT / "sporeloom").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
        assert not any(name.split(".")[0] == "mindformers" for name in names), path
    outcome = script(
        tmp_path,
        "import sys",
        "sys.modules['mindformers'] = None",
        "import sporeloom.train.trainer, sporeloom.inference.terminal, sporeloom.integrations.trainer",
        "import sporeloom.integrations.mindformers",
    )
    assert "ConfigError: mindformers is not installed: pip install -e '.[mindformers]'" in outcome.output
