# SPDX-License-Identifier: Apache-2.0
"""Dry runs count what the rules imply and send no more than the closed formulas say, and what users see of it."""

import dataclasses
import json
import math
import re

import pytest
from conftest import CONFIGS, call, run, tool

from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.config import parse_ranks
from sporeloom.models.family import size_config
from sporeloom.planner.closed_forms import collective_bytes, job_of, parameter_bytes
from sporeloom.planner.dimensions import of_decoder
from sporeloom.strategy.loader import load_strategy

RULES = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
OWN_SCHEDULE = (CONFIGS.parent / "tests/parity/own_schedule.csv").resolve()
STRATEGIES = {
    "tp2": "mesh: {tp: 2}\n",
    "tp2_sp": "mesh: {tp: 2}\nsequence_parallel: true\n",
    "dp4": "mesh: {dp: 4}\n",
    "dp2_tp2_zero": "mesh: {dp: 2, tp: 2}\noptimizer_parallel: {axis: dp}\n",
    "dp4_tp2_zero2": "mesh: {dp: 4, tp: 2}\noptimizer_parallel: {axis: dp, shard_size: 2}\n",
    "pp2_tp2_recompute": "mesh: {pp: 2, tp: 2}\npipeline: {num_microbatches: 2}\nrecompute: {layers: all}\n",
    "pp2_dp4_tp8_zero": "mesh: {pp: 2, dp: 4, tp: 8}\npipeline: {num_microbatches: 4}\noptimizer_parallel: {axis: dp}\n",
    "dp2_tp2_zero_accumulate": "mesh: {dp: 2, tp: 2}\noptimizer_parallel: {axis: dp}\n",
    "dp2_accumulate": "mesh: {dp: 2}\n",
    "dp4_zero2_accumulate": "mesh: {dp: 4}\noptimizer_parallel: {axis: dp, shard_size: 2}\n",
    "pp2_dp2_zero_gradients": "mesh: {pp: 2, dp: 2}\npipeline: {num_microbatches: 4}\n"
    "optimizer_parallel: {axis: dp, shard_accumulated_gradients: true}\n",
    "dp4_zero3_accumulate": "mesh: {dp: 4}\noptimizer_parallel: {axis: dp, reshard_after_forward: true}\n",
    "ep2_tp2": "mesh: {ep: 2, tp: 2}\n",
    "ep2_tp2_dropless": "mesh: {dp: 4, ep: 2, tp: 2}\nrecompute: {layers: all}\n",
    "dp2_ep4_tp2_dropless": "mesh: {dp: 2, ep: 4, tp: 2}\nrecompute: {layers: all}\n",
    "pp2_ep2": "mesh: {pp: 2, ep: 2}\npipeline: {num_microbatches: 2}\n",
    "dp4_ep2_zero": "mesh: {dp: 4, ep: 2}\noptimizer_parallel: {axis: dp}\n",
    "dp2_cp2_ulysses": "mesh: {dp: 2, cp: 2}\ncontext_parallel: ulysses\noptimizer_parallel: {axis: dp}\n",
    "dp2_cp2_tp2": "mesh: {dp: 2, cp: 2, tp: 2}\nrecompute: {layers: all}\n",
    "pp2_tp2_interleaved": "mesh: {pp: 2, tp: 2}\nsequence_parallel: true\nrecompute: {layers: [0, 3]}\n"
    "pipeline: {num_microbatches: 3, virtual_stages: 2}\n",
    "pp2_dp2_tp2_zero_bubble": "mesh: {pp: 2, dp: 2, tp: 2}\nsequence_parallel: true\noptimizer_parallel: {axis: dp}\n"
    "pipeline: {num_microbatches: 4, virtual_stages: 2, schedule: zero_bubble_v}\n",
    "dp8_tp3": "mesh: {dp: 8, tp: 3}\noptimizer_parallel: {axis: dp}\nrecompute: {layers: all}\n"
    "sequence_parallel: true\n",
    "pp2_dp2_zero_own_schedule": "mesh: {pp: 2, dp: 2}\noptimizer_parallel: {axis: dp}\n"
    f"pipeline: {{num_microbatches: 3, virtual_stages: 2, schedule: {OWN_SCHEDULE}}}\n",
    "pp4_tp2_sp": "mesh: {pp: 4, tp: 2}\npipeline: {num_microbatches: 4}\nsequence_parallel: true\n",
}
OF_EXPERTS = re.compile(r"ep\d")
IN_BFLOAT16 = ("dp8_tp3", "dp2_cp2_tp2", "dp4_zero2_accumulate", "pp2_dp4_tp8_zero", "pp4_tp2_sp")
WHOLE_WORDS = ("dp2_cp2_ulysses",)  # whose tables the shards do not divide
OF_THREE = {
    "hidden_size": 192,
    "num_heads": 6,
    "head_dim": 48,
    "vocab_size": 768,
    "ffn_hidden_size": 768,
    "seq_len": 96,
    "attention": "plain",
}
MODEL = {"num_layers": 2, "hidden_size": 256, "num_heads": 8, "vocab_size": 512, "seq_len": 64, "dropout_rate": 0.1}

pytestmark = pytest.mark.slow


def dry_run(*arguments):
    outcome = tool("tools/dry_run.py", *arguments)
    assert outcome.code == 0, outcome.output
    return outcome.output


OTHER_MODELS = {  # parts that PanGu-alpha has not, each on a mesh where it shows
    ("codegeex", "4_tiny"): "pp2_dp4_tp8_zero",
    ("palm", "tiny"): "pp2_tp2_recompute",
    ("pangu", "embedded_tiny"): "dp2_cp2_tp2",  # with FlashAttention
    ("pangu", "pro_moe_tiny"): "ep2_tp2",
    ("pangu", "gshard_tiny"): "pp2_ep2",  # the last stage has no experts
    ("pangu", "switch_tiny"): "dp4_ep2_zero",
}


MORE = {
    "dp2_tp2_zero": 0.02,
    "dp2_tp2_zero_accumulate": 0.02,
    "pp2_dp4_tp8_zero": 0.19,  # measured; tables are a large part of what small models send
    "pp2_ep2": 0.02,
}
"""Bytes that a strategy sends beyond the closed formulas of MindSpore's partitioner, as a fraction."""
OWN_STAGES = ("pp2_dp2_zero_own_schedule",)
"""Schedules that assign parts to stages as no closed formula does."""


@pytest.mark.parametrize(
    ("family", "size", "name"),
    [
        *(
            ("pangu", "tiny", name)
            for name in STRATEGIES
            if not OF_EXPERTS.search(name) and name not in ("dp2_cp2_tp2", "dp8_tp3")
        ),
        *((*model, name) for model, name in OTHER_MODELS.items()),
        ("pangu", "pro_moe_tiny", "ep2_tp2_dropless"),
        ("pangu", "gshard_tiny", "dp2_ep4_tp2_dropless"),  # rows of experts with biases over tp
        ("palm", "tiny", "dp8_tp3"),  # as PaLM's 12
        ("codegeex", "tiny", "dp4_zero2_accumulate"),  # with its top query layer
    ],
)
def test_graphs_hold_what_is_implied_and_send_no_more(family, size, name, write):
    """One compilation for all ranks. The closed formulas describe MindSpore's partitioner: ours sends at most as much."""
    layers = (
        4 if any(part in name for part in ("pp4", "interleaved", "bubble", "own", "dp4_tp8", "_ep2", "_ep4")) else 2
    )
    given = {
        **MODEL,
        "num_layers": layers,
        "vocab_size": 514 if name in WHOLE_WORDS else MODEL["vocab_size"],
        "compute_dtype": "bfloat16" if name in IN_BFLOAT16 else "float32",
    }
    if size != "tiny" or family != "pangu":
        given["dropout_rate"] = 0.0
    if "tp3" in name:
        given |= OF_THREE
    if "dropless" in name:
        given["experts"] = {**size_config(family, size).to_dict()["experts"], "capacity_factor": None}
    rules = RULES.replace("decoder", "experts") if OF_EXPERTS.search(name) else RULES
    path, model = write(f"{name}.yaml", rules + STRATEGIES[name]), write("model.json", json.dumps(given))
    accumulate = 2 if "accumulate" in name else 1
    asked = ("--model", family, "--size", size, "--strategy", path, "--config", model, "--ranks", "all")
    asked = list(map(str, (*asked, "--accumulate", accumulate)))
    values = call("tests/configs/graph_worker.py", "dry_run_values", asked)
    strategy, config = load_strategy(path), dataclasses.replace(size_config(family, size), **given)
    dims, job = of_decoder(config), job_of(strategy, config, values["job"]["batch_size"], accumulate)
    sizes, is_shared = parameter_bytes(dims, job), config.tied_embedding and job.pp > 1 and job.zero
    tied = 4 * config.vocab_size // job.tp * config.hidden_size  # on two stages: ours shards it, the formulas do not
    assert values["job"]["engine"] == "spmd" and len(values["ranks"]) == strategy.mesh.size
    compiled = {rank["stage"]: rank for rank in values["ranks"] if rank["rank"] == rank["compiled_as"]}
    for rank in values["ranks"]:
        assert rank["stage"] == strategy.mesh.coordinate(rank["rank"], "pp")
        implied, held = sizes[rank["stage"]], rank["parameter_bytes"]
        assert held == implied or name in OWN_STAGES or (is_shared and implied - tied < held < implied)
        assert rank["optimizer_bytes"] == 2 * held
        assert (rank["gradient_bytes"] == held) == (job.zero != 1)  # whole where those of microbatches add up
        stage = values["job"]["stages"][rank["stage"]]
        assert stage["layers"] == len(rank["layers"])
        for group, members in rank["groups"].items():
            assert rank["rank"] in members and len(members) > 1
            of_compiled = compiled[rank["stage"]]["groups"][group]
            assert len(of_compiled) == len(members)
            axes = [{strategy.mesh.coordinate(r, axis) for r in members} for axis in strategy.mesh.order]
            assert math.prod(map(len, axes)) >= len(members)
    for rank in compiled.values() if name not in OWN_STAGES else ():
        sent, most = sum(rank["bytes_per_step"].values()), sum(collective_bytes(dims, job, rank["stage"]).values())
        assert sent <= (1 + MORE.get(name, 0)) * most + 64, (name, rank["stage"], sent / most)  # a few numbers
    model_flops = sum(sum(rank["flops"].values()) - rank["flops"].get("recompute", 0) for rank in values["ranks"])
    tokens = values["job"]["batch_size"] * config.seq_len
    copies = job.tp // math.gcd(job.tp, dims.kv_heads)  # ranks that make the same keys and values
    again = 6 * tokens * layers * 2 * dims.hidden_size * dims.kv_size * (copies - 1)
    more_rows = dims.experts_per_token * (job.expert_rows(dims) - 1)  # that experts have room for
    again += 6 * tokens * dims.expert_layers * more_rows * dims.expert_parameters
    assert model_flops == pytest.approx(dims.model_flops(tokens) + again, rel=0.01)


def test_ranks_of_one_stage_have_the_same_graph_over_the_groups_predicted(write):
    path = write("s.yaml", RULES + STRATEGIES["pp2_dp2_tp2_zero_bubble"])
    given, options = {**MODEL, "num_layers": 4}, ("--ranks", "all", "--batch-size", "8", "--json")
    asked = ["--strategy", str(path), "--config", str(write("m.json", json.dumps(given))), *options]
    predicted = call("tests/configs/graph_worker.py", "dry_run_values", asked)["ranks"]
    counted = call("tests/configs/graph_worker.py", "every_rank", path, given, [8, MODEL["seq_len"]])
    assert len(predicted) == len(counted) == 8
    for one, other in zip(predicted, counted, strict=True):
        assert {name: sorted(members) for name, members in one["groups"].items()} == other["groups"]
        assert [{**c, "bytes_per_step": c["count"] * c["bytes_each"]} for c in other["collectives"]] == one[
            "collectives"
        ]


def test_the_report_says_what_fits_and_the_page_stands_alone(write, tmp_path):
    path, page = write("s.yaml", RULES + STRATEGIES["pp2_tp2_recompute"]), tmp_path / "report.html"
    arguments = ("--strategy", path, "--ranks", "0,last", "--jobs", 2, "--html", page, "--fast")
    outcome = run("tools/dry_run.py", *arguments, "--memory-gb", 1)
    assert outcome.code == 0, outcome.output
    text = outcome.output
    assert (
        "rank 3: stage 1, 2 layers model.layers.2 .. model.query_layer, 2 recomputed; from 2 of them, compiled in"
        in text
    )
    assert "rank 0: stage 0, 2 layers model.layers.0 .. model.layers.1, 2 recomputed; from 1 and 2 of them" in text
    assert "  fits" in text
    outcome = tool("tools/dry_run.py", *arguments, "--memory-gb", 0.001, "--overwrite")
    assert outcome.code == 1
    assert "DOES NOT FIT" in outcome.output
    html = page.read_text()
    assert "<svg" in html
    assert "attention.query.weight" in html
    assert "http" not in html.replace("http://www.w3.org", "")
    assert not [word for word in ("<link", "src=") if word in html]


def test_inference_keeps_no_gradients(write):
    text = dry_run("--strategy", write("s.yaml", RULES + STRATEGIES["tp2"]), "--ranks", "0", "--inference", "--json")
    rank = json.loads(text[text.index("{") :])["ranks"][0]
    assert (rank["gradient_bytes"], rank["optimizer_bytes"]) == (0, 0)
    assert set(rank["flops"]) == {"forward"}


def test_explain_names_the_rule_and_those_it_beat(write):
    rules = f"rules:\n  base: {CONFIGS / 'rules/decoder.yaml'}\n  operators:\n    mlp.up.matmul: [[dp, ~], [~, ~]]\n"
    path = write("s.yaml", "mesh: {dp: 2, tp: 2}\n" + rules)
    text = dry_run("explain", "layers.0.mlp.up.weight", "--strategy", path)
    assert "parameter model.layers.0.mlp.up.weight: [512, 128] -> [512, 128]" in text
    assert f"rule {path}:5: mlp.up.matmul: [~, ~]" in text
    assert "overridden by a later rule: " in text
    text = dry_run("explain", "layers.0.attention.softmax", "--strategy", path)
    assert "operator model.layers.0.attention.softmax, Softmax" in text
    outcome = tool("tools/dry_run.py", "explain", "mlp.upp.weight", "--strategy", path)
    assert outcome.code == 2
    assert "did you mean mlp.up.weight?" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "0,4"), "--ranks 0,4: '4' is not a rank; give numbers from 0 to 3"),
        (("--ranks", "first"), "'first' is not a rank"),
        (("--batch-size", "3"), "a batch of 3 sequences is not divisible by"),
        (("--seq-len", "129"), "--seq-len 129 is outside 1 .. 128"),
        (("--jobs", "0"), "--jobs must be at least 1"),
        (("--memory-gb", "0"), "--memory-gb must be above 0"),
        (("--accumulate", "0"), "--accumulate must be at least 1"),
        (("--accumulate", "2"), "a pipeline accumulates over its num_microbatches"),
        (("--html", "no_such_folder/report.html"), "no file can be written there"),
        (("--size", "14b"), "14b"),
    ],
)
def test_mistakes_are_one_line_each(arguments, words):
    outcome = tool("tools/dry_run.py", "--strategy", CONFIGS / "pangu_tiny_tp2_pp2.yaml", *arguments)
    assert outcome.code == 2
    assert words in outcome.output
    assert "Traceback" not in outcome.output


def test_ranks_are_read():
    assert parse_ranks("0, 2,last", 4) == [0, 2, 3]
    assert parse_ranks("all", 3) == [0, 1, 2]
    with pytest.raises(ConfigError):
        parse_ranks("-1", 3)


def test_explain_says_what_no_rule_shards_and_which_rules_are_near(write):
    rules = (CONFIGS / "rules/decoder.yaml").read_text()
    ruled = write("rules.yaml", "".join(line for line in rules.splitlines(keepends=True) if "bias_add" not in line))
    path = write("s.yaml", f"mesh: {{tp: 2}}\nrules: {ruled}\n")
    text = dry_run("explain", "layers.0.mlp.up.bias", "--strategy", path)
    assert "[512] -> [512] on each rank of stage 0, 1 different shards" in text
    assert "no rule is for it, and nothing shards it: replicated on every rank" in text
    line = 1 + ruled.read_text().splitlines().index("  mlp.up|gate.matmul?: [[[dp, cp], ~], [tp, ~]]")
    assert f"nearby rule {ruled}:{line}: mlp.up|gate.matmul, of model.layers.0.mlp.up.matmul" in text


@pytest.mark.parametrize("verb", [(), ("explain", "mlp.up.weight")])
def test_graphs_of_mindspores_partitioner_are_not_described(write, verb):
    path = write("s.yaml", f"mesh: {{tp: 2}}\n{RULES}engine: mindspore\n")
    outcome = tool("tools/dry_run.py", *verb, "--strategy", path)
    assert outcome.code == 2
    assert (
        f"{path}:3: engine: mindspore lets MindSpore partition, whose graphs are neither counted nor" in outcome.output
    )
    assert "remove the line" in outcome.output


def test_what_is_not_for_context_parallel_is_told(write):
    def told(text, *more):
        return tool("tools/dry_run.py", "--strategy", write("s.yaml", RULES + text), *more).output

    assert "tp x cp = 8, which does not divide num_kv_heads = 4; use gather" in told(
        "mesh: {cp: 8}\ncontext_parallel: ulysses\n"
    )
    assert "sequences of 66 tokens are not divisible by cp 4" in told("mesh: {cp: 4}\n", "--seq-len", 66)
    assert "context_parallel has no effect at mesh.cp = 1" in told("mesh: {dp: 2}\ncontext_parallel: ulysses\n")
    experts = told("mesh: {cp: 2}\n", "--size", "switch_tiny", "--seq-len", 64, "--batch-size", 1)
    assert "which do not divide the 32 that a rank has of a microbatch; write experts.capacity_group 32" in experts


def test_of_adapters_alone_there_are_gradients_and_moments(write):
    strategy = write("dp2_tp2.yaml", f"mesh: {{dp: 2, tp: 2}}\n{RULES}")
    model = write("model.json", json.dumps(MODEL))
    asked = ("--strategy", strategy, "--config", model, "--ranks", "0", "--lora-r", 4)
    found = json.loads(dry_run(*asked, "--lora-targets", "attention.query", "mlp.down", "--json"))
    (rank,) = found["ranks"]
    hidden, tp = MODEL["hidden_size"], 2
    query = 4 * hidden + hidden // tp * 4  # A whole, B sharded as the columns of the matrix
    down = 4 * 4 * hidden // tp + hidden * 4  # A sharded as the rows of the matrix, B whole
    adapters = 4 * MODEL["num_layers"] * (query + down)
    assert rank["optimizer_bytes"] == 2 * adapters and rank["gradient_bytes"] == adapters
    assert found["job"]["num_adapter_parameters"] == MODEL["num_layers"] * (
        2 * 4 * hidden + 4 * 4 * hidden + 4 * hidden
    )
    told = tool("tools/dry_run.py", *asked, "--fast", "--inference", "--lora-targets", "mlp.sideways")
    assert told.code == 2
    for line in (
        "--lora-r is for training",
        "--fast extrapolates models without adapters",
        "mlp.sideways matches no matrix",
    ):
        assert line in told.output


def test_moments_on_the_host_are_counted_there(write):
    text = f"{RULES}mesh: {{dp: 2, tp: 2}}\n"
    plain, moved = write("p.yaml", text), write("m.yaml", text + "offload: {optimizer: true}\n")
    given = ["--model", "pangu", "--size", "tiny", "--ranks", "0", "--strategy"]
    without, with_host = (
        call("tests/configs/graph_worker.py", "dry_run_values", [*given, str(path)])["ranks"][0]
        for path in (plain, moved)
    )
    assert with_host["host_optimizer_bytes"] == without["optimizer_bytes"] > 0 == with_host["optimizer_bytes"]
    assert with_host["total_bytes"] == without["total_bytes"] - without["optimizer_bytes"]
    assert with_host["bytes_per_step"] == without["bytes_per_step"]


def test_weights_are_gathered_once_a_step_whatever_the_number_of_microbatches(write):
    """And gradients added up once."""
    found = []
    for accumulate in (2, 4):
        text = "mesh: {dp: 2}\noptimizer_parallel: {axis: dp}\nrecompute: {layers: all}\n"
        path = write(f"{accumulate}.yaml", RULES + text)
        asked = [
            "--strategy",
            str(path),
            "--ranks",
            "0",
            "--compute-dtype",
            "bfloat16",
            "--accumulate",
            str(accumulate),
        ]
        (rank,) = call("tests/configs/graph_worker.py", "dry_run_values", asked)["ranks"]
        assert "ReduceScatter backward" not in rank["bytes_per_step"]
        found.append([rank["bytes_per_step"][kind] for kind in ("AllGather forward", "ReduceScatter optimizer")])
    assert found[0] == found[1]
