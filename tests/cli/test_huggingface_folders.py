# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder is taken by every command that takes a model, or refused with the command to use instead."""

import json
import shlex
import shutil

import numpy as np
import pytest
from conftest import ROOT, in_process, tool
from packed_folders import AWQ, GPTQ, quantized

from sporeloom.__main__ import main
from sporeloom.checkpoint.huggingface import export_published
from sporeloom.checkpoint.model_folder import load_config, load_weights
from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.hashes import HASHES
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig

pytestmark = pytest.mark.slow

CORPUS = ROOT / "examples" / "small_town.txt"
SHORT = ("--batch-size", 2, "--seq-len", 32, "--steps", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as it is downloaded, a converted copy, token IDs and lines of examples."""
    root = tmp_path_factory.mktemp("models")
    model = ("--size", "embedded_tiny", "--data", CORPUS, *SHORT)
    outcome = tool("tools/train.py", *model, "--output-dir", root / "run")
    assert outcome.code == 0, outcome.output
    export_published(root / "run" / "checkpoint", root / "hf")
    (root / "hf" / HASHES).unlink()
    assert main(["convert-checkpoint", "--from", "huggingface", str(root / "hf"), str(root / "converted")]) == 0
    np.save(root / "ids.npy", np.arange(10, 76).reshape(2, 33))
    lines = [{"prompt": "a b", "completion": "c", "chosen": "c", "rejected": "d"}] * 2
    (root / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


RUN = {
    "generate": ("--checkpoint", "HF", "--prompt", "小镇", "--max-new-tokens", 2),
    "score": ("--checkpoint", "HF", "--ids", "ROOT/ids.npy"),
    "sft": ("--from-checkpoint", "HF", "--data", "ROOT/lines.jsonl", *SHORT, "--output-dir", "OUT"),
    "dpo": ("--from-checkpoint", "HF", "--data", "ROOT/lines.jsonl", *SHORT, "--output-dir", "OUT"),
    "upcycle": ("--checkpoint", "HF", "--num-experts", 2, "--out", "OUT"),
}
"""Commands that take the folder as it is, besides train and dry_run, which other tests here give it to."""


def words_of(words, root, name, out):
    named = {"HF": root / name, "OUT": out}
    return [named.get(word, str(word).replace("ROOT", str(root))) for word in words]


@pytest.mark.parametrize("command", ["dpo", "upcycle"])
def test_a_command_takes_the_folder_as_it_is(command, folder, tmp_path):
    outcome = tool(f"tools/{command}.py", *words_of(RUN[command], folder, "hf", tmp_path / "out"))
    assert outcome.code == 0, outcome.output


@pytest.mark.parametrize("command", ["generate", "score"])
def test_the_output_is_that_of_the_converted_folder(command, folder, tmp_path):
    said = []
    for name in ("hf", "converted"):
        outcome = tool(f"tools/{command}.py", *words_of(RUN[command], folder, name, tmp_path))
        assert outcome.code == 0, outcome.output
        said.append([line for line in outcome.output.splitlines() if not line.startswith("[sporeloom]")])
    assert said[0] == said[1] and said[0]


@pytest.mark.parametrize("settings", [GPTQ, AWQ], ids=["GPTQ", "AWQ"])
def test_a_quantized_folder_generates_as_its_converted_copy_does(settings, folder, tmp_path):
    quantized(folder / "hf", tmp_path / "q", settings)
    for path in (folder / "hf").iterdir():
        if "model.safetensors" not in path.name and path.name != "config.json":
            shutil.copy(path, tmp_path / "q")
    assert main(["convert-checkpoint", "--from", "huggingface", str(tmp_path / "q"), str(tmp_path / "floats")]) == 0
    words = ("--prompt", "小镇", "--max-new-tokens", 3, "--json", "--logprobs")
    runs = [("floats", "float32"), ("q", "float32"), ("q", "int4")]
    runs += [("floats", "int4-g32")] if settings is GPTQ else []
    found = []
    for name, weights in runs:
        outcome = tool("tools/generate.py", "--checkpoint", tmp_path / name, *words, "--weights", weights)
        assert outcome.code == 0, outcome.output
        found.append(json.loads(next(line for line in outcome.output.splitlines() if line.startswith("{"))))
    assert found[0]["tokens"] == found[1]["tokens"] and found[0]["log_probabilities"] == found[1]["log_probabilities"]
    first = [each["log_probabilities"][0] for each in found]
    assert abs(first[2] - first[0]) < 0.02 < min((20 * abs(each - first[0]) for each in first[3:]), default=1)
    outcome = tool("tools/generate.py", "--checkpoint", tmp_path / "q", *words, "--weights", "int4-g64")
    assert outcome.code == 2 and "--weights int4 computes with them" in outcome.output


def test_four_processes_read_their_shards_of_the_folder(folder, tmp_path):
    words = ("--from-checkpoint", "HF", "--data", CORPUS, "--batch-size", 4, "--seq-len", 32, "--steps", 1)
    words = (
        *words,
        "--strategy",
        "pangu_tiny_dp2_tp2",
        "--output-dir",
        "OUT",
        "--learning-rate",
        0,
        "--min-learning-rate",
        0,
    )
    outcome = tool("tools/train.py", *words_of(words, folder, "hf", tmp_path / "out"), processes=4)
    assert outcome.code == 0, outcome.output
    start, end = load_weights(folder / "converted"), load_weights(tmp_path / "out" / "checkpoint")
    assert all(np.array_equal(end[name], value) for name, value in start.items())


REFUSED = {
    "reshard-checkpoint": ("HF", "OUT", "--strategy", "pangu_tiny_tp2"),
    "export-checkpoint": ("HF", "OUT"),
}
"""Commands of training checkpoints: each prints the command that does this with a Hugging Face folder."""


@pytest.mark.parametrize("command", REFUSED)
def test_a_command_for_training_checkpoints_prints_the_command_that_works(command, folder, tmp_path):
    script = f"tools/{command.replace('-', '_')}.py"
    outcome = in_process(script, *words_of(REFUSED[command], folder, "hf", tmp_path / "out"))
    assert outcome.code == 2 and "a Hugging Face folder, not a training checkpoint; use sporeloom" in outcome.output
    printed = shlex.split(outcome.output.partition("; use sporeloom ")[2].splitlines()[0])
    assert main(printed) == 0
    assert load_config(tmp_path / "out") == load_config(folder / "hf")


def test_what_the_folder_holds_is_shown(folder, capsys):
    assert main(["checkpoint-info", str(folder / "hf")]) == 0
    shown = capsys.readouterr().out
    assert "Hugging Face folder (llama), 1,051,264 parameters of pangu" in shown
    with pytest.raises(ConfigError, match=r"no hashes\.json"):
        main(["checkpoint-info", str(folder / "hf"), "--verify"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("serve", "HF", "--port", "99999"), "--port 99999"),
        (("evaluate", "lm-eval", "--checkpoint", "HF", "--tasks", "none.yaml", "--max-length", "0"), "--max-length"),
    ],
)
def test_a_server_and_the_benchmarks_find_nothing_wrong_with_the_folder(words, problem, folder):
    with pytest.raises(ConfigError) as caught:
        main([word.replace("HF", str(folder / "hf")) for word in words])
    assert any(problem in each for each in caught.value.problems)
    assert not [each for each in caught.value.problems if str(folder) in each]


PLAN = ("--cluster", "h100", "--devices", "8", "--global-batch-size", "8")


def test_a_plan_is_for_the_model_of_the_folder_and_names_it_in_its_command(folder, tmp_path):
    out = tmp_path / "plan.yaml"
    assert main(["plan", "--model", str(folder / "hf"), *PLAN, "--out", str(out)]) == 0
    assert f"train --strategy {out} --from-checkpoint {folder / 'hf'} --model pangu" in out.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--config", "HF/config.json", *PLAN), "of a model, not of dimensions alone; give --model HF"),
        (("plan", "--model", "HF", "--size", "tiny", *PLAN), "leave out --size and --config"),
        (("dry-run", "--model", "HF", "--size", "13b", "--strategy", "pangu_tiny_tp2"), "leave out --size"),
        (("train", "--model", "HF", "--data", str(CORPUS)), "give --from-checkpoint HF to start from its weights"),
        (("train", "--model", "HF", "--data", str(CORPUS)), "--config HF to start from random weights"),
    ],
)
def test_a_flag_that_cannot_take_the_folder_names_the_one_that_does(words, message, folder):
    hf = str(folder / "hf")
    with pytest.raises(ConfigError) as caught:
        main([word.replace("HF", hf) for word in words])
    assert message.replace("HF", hf) in str(caught.value)


def test_a_certificate_and_an_explanation_are_of_the_model_of_the_folder(folder, tmp_path):
    words = ("--model", folder / "hf", "--strategy", "pangu_tiny_tp2", "--cluster", "h100", "--fast", "--out")
    outcome = tool("tools/certify.py", *words, tmp_path / "certificate")
    assert outcome.code == 0, outcome.output
    certificate = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    model = load_config(folder / "hf")[1]
    assert certificate["covers"]["model"]["hidden_size"] == model.hidden_size
    assert certificate["covers"]["model"]["num_kv_heads"] == model.num_kv_heads == 2
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("  msrun --worker_num=2 ")]
    printed = shlex.split(line.replace(" DATA ", f" {CORPUS} "))
    assert check(parse_args(TrainConfig, "", printed[printed.index("train") + 1 :]), 2).config.certificate
    explained = tool("tools/dry_run.py", "explain", "key.weight", *words[:4])
    assert "[64, 128] -> [32, 128] on each rank" in explained.output


def test_adapters_of_the_folder_name_it_and_its_modules(folder, tmp_path):
    adapters = ("--lora-r", 2, "--lora-targets", "q_proj", "v_proj")
    outcome = tool("tools/sft.py", *words_of((*RUN["sft"], *adapters), folder, "hf", tmp_path / "out"))
    assert outcome.code == 0, outcome.output
    written = tmp_path / "out" / "checkpoint"
    config = json.loads((written / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (written / config["base_model_name_or_path"]).samefile(folder / "hf")
    merged = load_weights(written)
    assert merged.keys() == load_weights(folder / "hf").keys()
