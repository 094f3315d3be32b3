# SPDX-License-Identifier: Apache-2.0
"""A certificate: faults that compile are found and named, what is right is certified, and what changed is refused."""

import dataclasses
import json

import pytest
from conftest import CONFIGS, ROOT, TWO_LAYERS, call, run, tool

from sporeloom.certification.proof import ONE_DEVICE, compare, load
from sporeloom.certification.shrink import small_model
from sporeloom.core.errors import ConfigError
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.strategy.certificate import check_certificate, covered_settings
from sporeloom.strategy.loader import load_strategy
from sporeloom.train.tuning import DPOConfig, SFTConfig

WORKER = "tests/parity/proof_worker.py"
CLUSTER = CONFIGS / "clusters/ascend910b.yaml"
RULES = f"mesh: {{tp: 2}}\nrules:\n  base: {CONFIGS / 'rules/decoder.yaml'}\n  operators:\n    "
WRONG_RULES = {
    "no all-reduce after a product by rows": (
        "mlp.down.matmul: {in: [[dp, tp], [~, tp]], out: [[dp, ~]], local: true}",
        "loss of step 1, AdamW: ",
    ),
    "a loss over a part of the vocabulary": (
        "loss.sum: {in: [[dp, tp]], out: [[dp]], local: true}",
        "loss of step 1, AdamW: ",
    ),
    "a softmax over a part of what is attended to": (
        "attention.softmax: {in: [[dp, ~, ~, tp]], out: [[dp, ~, ~, tp]], local: true}",
        "loss of step 1, AdamW: ",
    ),
}
WRONG_ENGINES = {
    "an all-reduce is lost": "gradient of model.layers.0.mlp.up.weight: ",
}

SMALL = ("--config", TWO_LAYERS, "--batch-size", 4, "--seq-len", 64, "--processes", 2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One device's numbers, once for all."""
    folder = tmp_path_factory.mktemp("proof")
    config = dataclasses.replace(size_config("pangu", "tiny"), dropout_rate=0.0)
    small = small_model(config, load_strategy(CONFIGS / "pangu_tiny_dp2_tp2.yaml"), 2)
    (folder / "model.json").write_text(json.dumps(small.to_dict()))
    (folder / "subject.json").write_text(json.dumps({"family": "pangu", "accumulate": 1}))
    call(WORKER, "train", folder, ONE_DEVICE)
    return folder


def failure(folder, strategy, fault=None):
    subject = {"family": "pangu", "strategy": str(strategy), "num_layers": 2, "processes": 2, "accumulate": 1}
    (folder / "subject.json").write_text(json.dumps(subject))
    call(WORKER, "train", folder, "0", fault, processes=2, env={"SPORELOOM_CACHE": "0"})
    return compare("mesh", load(folder, ONE_DEVICE), load(folder, "0")).failure


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_rule_that_compiles_and_is_wrong_is_found(folder, write, name):
    rule, first = WRONG_RULES[name]
    assert failure(folder, write("s.yaml", RULES + rule)).startswith(first)


@pytest.mark.parametrize("name", WRONG_ENGINES)
def test_an_engine_that_is_wrong_is_found(folder, name):
    assert failure(folder, CONFIGS / "pangu_tiny_dp2.yaml", name).startswith(WRONG_ENGINES[name])


def certify(strategy, out, *more):
    return tool("tools/certify.py", "--strategy", strategy, "--cluster", CLUSTER, "--out", out, *more)


def test_what_is_right_is_certified_and_trains_until_something_changes(tmp_path):
    strategy, out = CONFIGS / "pangu_tiny_dp2.yaml", tmp_path / "out"
    outcome = certify(strategy, out, "--batch-size", 4, "--seq-len", 64)
    assert outcome.code == 0, outcome.output
    path, page = out / "certificate.json", (out / "certificate.html").read_text()
    values = json.loads(path.read_text())
    assert list(values["proof"]["meshes"][0]["differences"]) == ["losses", "gradients", "norms", "weights"]
    assert max(values["proof"]["meshes"][0]["differences"].values()) < 1e-4
    assert values["estimate"]["step_time_interval_s"] is None  # computed in float32, as no published run is
    assert "s (no interval known), " in outcome.output
    assert "no interval is known: none of the published runs computes in float32" in page
    assert (page.count("<svg"), page.count("<div class='bars'>")) == (2, 2), "losses of two optimizers; memory and time"
    assert "http" not in page
    assert not list(out.glob(".proof*"))
    config, loaded = size_config("pangu", "tiny"), load_strategy(strategy)
    check_certificate(path, covered_settings("pangu", config, loaded, 4, 64, 1))
    arguments = ("--data", ROOT / "examples/small_town.txt", "--batch-size", 8, "--seq-len", 64, "--certificate", path)
    refused = tool("tools/train.py", *arguments, "--strategy", CONFIGS / "pangu_tiny_tp2.yaml", "--launch")
    assert refused.code == 2
    assert "batch.batch_size was 4, is 8" in refused.output
    assert "strategy.mesh.tp was 1, is 2" in refused.output
    path.write_text(path.read_text().replace('"batch_size": 4', '"batch_size": 8'))
    with pytest.raises(ConfigError, match="was changed after it was made"):
        check_certificate(path, covered_settings("pangu", config, loaded, 8, 64, 1))


def test_a_pipeline_is_certified_and_one_with_a_list_of_ones_own_is_not(tmp_path, write):
    """With a schedule that MindSpore's pipelines do not have. A run of the other engine is refused."""
    rules = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
    pipeline = "mesh: {pp: 2}\npipeline: {num_microbatches: 4, schedule: dualpipe_v, virtual_stages: 2}\n"
    right, asked = write("right.yaml", f"{pipeline}{rules}"), ("--seq-len", 64, "--processes", 2)
    outcome = certify(right, tmp_path / "right", *asked)
    assert outcome.code == 0, outcome.output
    path = tmp_path / "right/certificate.json"
    values = json.loads(path.read_text())
    assert {rank["stage"] for rank in values["full_size"]["ranks"]} == {0, 1}
    loaded = load_strategy(right)
    assert values["covers"]["strategy"]["engine"] == "spmd"
    assert values["checks"]["shards"] == []
    for_mindspore = covered_settings(
        "pangu", size_config("pangu", "tiny"), dataclasses.replace(loaded, engine="mindspore"), 4, 64, 1
    )
    with pytest.raises(ConfigError, match=r'strategy.engine was "spmd", is "mindspore"'):
        check_certificate(path, for_mindspore)
    file = ROOT / "tests/parity/own_schedule.csv"
    listed = f"mesh: {{pp: 2}}\npipeline: {{num_microbatches: 3, virtual_stages: 2, schedule: {file}}}\n"
    outcome = certify(write("listed.yaml", f"{listed}{rules}"), tmp_path / "listed", *asked)
    assert outcome.code == 2
    assert "certify with a named schedule, and dry-run with this one" in outcome.output


def test_faults_that_are_planted_in_the_program_under_proof_are_caught(tmp_path):
    out = tmp_path / "out"
    asked = ("--batch-size", 4, "--seq-len", 64, "--processes", 2, "--mutate", 1, "--fast")
    outcome = certify(CONFIGS / "pangu_tiny_tp2.yaml", out, *asked)
    assert outcome.code == 0, outcome.output
    faults = json.loads((out / "certificate.json").read_text())["faults"]
    planted = {row["kind"] for row in faults["kinds"] if row["planted"]}
    assert planted >= {"a sum over ranks is left out", "a maximum over ranks is left out"}
    assert [each for each in faults["faults"] if each["outcome"] != "caught"] == []
    assert f"planted faults: {len(faults['faults'])} of {len(faults['faults'])} caught" in outcome.output
    assert "<h2>Planted faults<" in (out / "certificate.html").read_text()


def test_a_certificate_of_an_earlier_release_is_refused_by_name(write):
    for engine, what in (
        ("mindspore", "for engine mindspore, which is not certified"),
        ("spmd", "by an earlier release"),
    ):
        old = {"verdict": "certified", "vouched_for": {"strategy": {"engine": engine}}, "sha256": "0"}
        with pytest.raises(
            ConfigError, match=f"certificate.json: was made {what}.*; make it again with sporeloom certify"
        ):
            check_certificate(write("certificate.json", json.dumps(old)), {})


def test_graphs_of_mindspores_partitioner_are_not_certified(tmp_path, write):
    path = write("s.yaml", f"mesh: {{dp: 2}}\nrules: {CONFIGS / 'rules/decoder.yaml'}\nengine: mindspore\n")
    outcome = certify(path, tmp_path / "out")
    assert outcome.code == 2
    assert (
        f"{path}:3: engine: mindspore lets MindSpore partition, whose graphs are neither counted nor" in outcome.output
    )


def test_a_task_with_adapters_is_certified_and_a_wrong_rule_of_theirs_is_not(tmp_path, write):
    asked = ("--task", "dpo", "--lora-r", 4, "--lora-targets", "mlp.down", *SMALL)
    wrong = "mlp.down.lora_down: {in: [[dp, tp], [~, tp]], out: [[dp, ~]], local: true}"
    refused = certify(write("s.yaml", RULES + wrong), tmp_path / "wrong", *asked)
    assert refused.code == 1, refused.output
    assert "refused: pp 1 x dp 1 x tp 2 = 2: loss of step 1, AdamW: " in refused.output
    outcome = certify(CONFIGS / "pangu_tiny_tp2.yaml", tmp_path / "out", *asked)
    assert outcome.code == 0, outcome.output
    config = dataclasses.replace(size_config("pangu", "tiny"), num_layers=2, dropout_rate=0.0)
    loaded, lora = load_strategy(CONFIGS / "pangu_tiny_tp2.yaml"), LoRAConfig(r=4, target_modules=("mlp.down",))
    run = DPOConfig(data=tmp_path, from_checkpoint=None, batch_size=2, lora_r=4, lora_targets=("mlp.down",))
    path = tmp_path / "out/certificate.json"
    check_certificate(path, covered_settings("pangu", config, loaded, 4, 64, 1, run.about_task(lora)))
    other = SFTConfig(data=tmp_path, from_checkpoint=None).about_task(lora)
    with pytest.raises(ConfigError, match=r"task.name was \"dpo\", is \"sft\""):
        check_certificate(path, covered_settings("pangu", config, loaded, 4, 64, 1, other))
    with pytest.raises(ConfigError, match=r"task was .*, is null"):
        check_certificate(path, covered_settings("pangu", config, loaded, 4, 64, 1))


def test_preferences_are_certified(tmp_path, write):
    mesh, rules = "mesh: {pp: 2}\npipeline: {num_microbatches: 2}", CONFIGS / "rules/decoder.yaml"
    outcome = certify(write("s.yaml", f"{mesh}\nrules: {rules}\n"), tmp_path / "out", "--task", "orpo", *SMALL)
    assert outcome.code == 0, outcome.output
    values = json.loads((tmp_path / "out/certificate.json").read_text())
    assert values["covers"]["task"] == {"name": "orpo", "lora": None, "reference": False, "reward_model": None}
    assert values["full_size"]["ranks"][0]["auxiliary"] == {}


def test_a_loss_of_preferences_over_a_part_of_the_texts_is_refused(tmp_path, write):
    rule = "loss.add_up: {in: [[dp]], out: [[]], local: true}"
    strategy = write("s.yaml", RULES.replace("tp: 2", "dp: 2") + rule)
    outcome = certify(strategy, tmp_path / "out", "--task", "kto", *SMALL)
    assert outcome.code == 1, outcome.output
    assert "refused: pp 1 x dp 2 x tp 1 = 2: loss of step 1, AdamW: " in outcome.output


OWN = """
import sys
sys.path.insert(0, sys.argv[1])
from own_networks import Mlp, data
from sporeloom import certify

if __name__ == "__main__":
    inputs = data("mlp")
    right = [["dp", "tp"], [None, "tp"]]
    wrong = {"in": right, "out": [["dp", None]], "local": True}
    for name, mesh, rule in (("right", {"dp": 8, "tp": 4}, right), ("wrong", {"tp": 2}, wrong)):
        rules = {"up.matmul": [["dp", None], ["tp", None]], "down.matmul": rule}
        values = certify(Mlp, inputs, mesh=mesh, rules=rules, out=name, cluster="ascend910b")
        print(values["verdict"], values["reasons"])
    pipeline = {"pipeline": {"num_microbatches": 2}}
    values = certify(Mlp, inputs, mesh={"pp": 2, "dp": 2}, **pipeline, out="stages", cluster="ascend910b", processes=2)
    print("stages", values["verdict"], values["reasons"])
"""


def test_a_network_of_ones_own_is_certified_from_python(tmp_path):
    (tmp_path / "net.py").write_text(OWN)
    outcome = run(tmp_path / "net.py", ROOT / "tests/parity", cwd=tmp_path, timeout=200)
    assert outcome.code == 0, outcome.output
    assert "certified []" in outcome.output
    assert "refused ['pp 1 x dp 1 x tp 2 = 2: loss of step 1, AdamW: " in outcome.output
    assert "stages certified []" in outcome.output
    stages = json.loads((tmp_path / "stages/certificate.json").read_text())["ranks"]
    held = {rank["stage"]: {p["name"] for p in rank["parameters"]} for rank in stages}
    assert held == {0: {"up.weight", "up.bias"}, 1: {"down.weight", "down.bias"}}
    found = json.loads((tmp_path / "right/certificate.json").read_text())
    assert max(found["proof"]["meshes"][0]["differences"].values()) < 1e-5
    assert [rank["rank"] for rank in found["ranks"]] == [0, 16, 31]
    up = next(p for p in found["ranks"][2]["parameters"] if p["name"].endswith("up.weight"))
    assert up["global_shape"][0] == 4 * up["local_shape"][0]
    assert {len(rank["groups"][c["group"]]) for rank in found["ranks"] for c in rank["collectives"]} >= {4, 8}
    page = (tmp_path / "right/certificate.html").read_text()
    assert "Ranks of the full mesh" in page
    assert "were never compared with measured runs" in page
    # 2 rows of this rank: 12 -> 8 forward and its weight's gradient; 8 -> 5 forward and both gradients.
    assert {sum(rank["flops"].values()) for rank in found["ranks"]} == {2 * (2 * 2 * 12 * 8) + 3 * (2 * 2 * 8 * 5)}
    assert all(rank["in_float32"] and rank["passed_bytes"] > 0 for rank in found["ranks"])
    seconds = found["estimate"]["seconds"]
    assert found["estimate"]["step_time_s"] == pytest.approx(sum(seconds.values()))
    assert found["checks"]["memory"] == []


def test_a_batch_that_is_not_divided_is_counted_in_full():
    stages = call("tests/parity/own_networks.py", "cnn_in_stages", fresh=True)
    assert [count for *_, count in stages] == [1, 1]
    for gradients, parameters, _, _ in stages:
        trained = sum(size for name, size in parameters.items() if not name.startswith("norm.moving"))
        assert gradients == trained > 0
    convolution, head = 2 * 16 * (8 * 6 * 6) * (3 * 3 * 3), 2 * 16 * 288 * 5
    found = [{phase: sum(flops.get(phase, 0) for _, _, flops, _ in stages)} for phase in ("forward", "backward")]
    assert found == [{"forward": convolution + head}, {"backward": convolution + 2 * head}]


def test_products_of_convolutions_are_counted():
    # 8 of 16 rows: filters of 3 x 3 x 3 at 6 x 6 places for 8 channels, twice; 288 -> 5, three times.
    convolution, head = 2 * 8 * (8 * 6 * 6) * (3 * 3 * 3), 2 * 8 * 288 * 5
    assert call("tests/parity/own_networks.py", "flops_of_cnn", fresh=True) == 2 * convolution + 3 * head
