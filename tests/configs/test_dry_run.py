# SPDX-License-Identifier: Apache-2.0
"""What a dry run reads from compiled graphs is what the closed forms say, and what users see of it."""

import dataclasses
import json
import math
from collections import Counter

import pytest
from conftest import CONFIGS, call, run, tool

from sporeloom.dry_run.config import parse_ranks
from sporeloom.errors import ConfigError
from sporeloom.models.family import size_config
from sporeloom.planner.closed_forms import collective_bytes, job_of, parameter_bytes
from sporeloom.planner.dimensions import of_decoder
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.schedule import passes

RULES = f"rules: {CONFIGS / 'rules/decoder.yaml'}\n"
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
    "ep2_tp2": "mesh: {ep: 2, tp: 2}\n",
    "pp2_ep2": "mesh: {pp: 2, ep: 2}\npipeline: {num_microbatches: 2}\n",
    "dp4_ep2_zero": "mesh: {dp: 4, ep: 2}\noptimizer_parallel: {axis: dp}\n",
    "dp2_cp2_ulysses": "mesh: {dp: 2, cp: 2}\ncontext_parallel: ulysses\noptimizer_parallel: {axis: dp}\n",
    "dp2_cp2_tp2": "mesh: {dp: 2, cp: 2, tp: 2}\nrecompute: {layers: all}\n",
    "dp2_tp2_copies": "mesh: {dp: 2, tp: 2}\nmicro_batch_interleave: 2\n",
    "pp2_tp2_copies": "mesh: {pp: 2, tp: 2}\npipeline: {num_microbatches: 2}\nmicro_batch_interleave: 2\n",
    "pp2_tp2_interleaved": "mesh: {pp: 2, tp: 2}\nsequence_parallel: true\nrecompute: {layers: [0, 3]}\n"
    "pipeline: {num_microbatches: 3, virtual_stages: 2}\n",
    "pp2_dp2_tp2_zero_bubble": "mesh: {pp: 2, dp: 2, tp: 2}\nsequence_parallel: true\noptimizer_parallel: {axis: dp}\n"
    "pipeline: {num_microbatches: 4, virtual_stages: 2, schedule: zero_bubble_v}\n",
    "dp8_tp3": "mesh: {dp: 8, tp: 3}\noptimizer_parallel: {shard_size: 4, reshard_after_forward: true}\n"
    "recompute: {layers: all}\nsequence_parallel: true\n",
    "dp2_tp2_again": "mesh: {dp: 2, tp: 2}\nrecompute: {layers: all}\n"
    "optimizer_parallel: {reshard_after_forward: true}\n",
    "dp4_again": "mesh: {dp: 4}\nrecompute: {layers: all}\n"
    "optimizer_parallel: {shard_size: 2, reshard_after_forward: true}\n",
    "pp4_tp2_sp": "mesh: {pp: 4, tp: 2}\npipeline: {num_microbatches: 4}\nsequence_parallel: true\n",
}
IN_BFLOAT16 = ("dp2_tp2_again", "dp8_tp3", "dp2_cp2_tp2", "dp4_zero2_accumulate", "pp2_dp4_tp8_zero", "pp4_tp2_sp")
PARTS = ("attention.output", "mlp.down")
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


@pytest.mark.parametrize(
    ("family", "size", "name"),
    [
        *(
            ("pangu", "tiny", name)
            for name in STRATEGIES
            if "ep2" not in name and name not in ("dp2_cp2_tp2", "dp8_tp3")
        ),
        *((*model, name) for model, name in OTHER_MODELS.items()),
        ("palm", "tiny", "dp8_tp3"),  # as PaLM's 12
        ("pangu", "embedded_tiny", "dp4_again"),
        ("codegeex", "tiny", "dp4_again"),
    ],
)
def test_compiled_graphs_hold_and_send_what_the_closed_forms_say(family, size, name, write):
    layers = (
        4 if "pp4" in name or "interleaved" in name or "bubble" in name or "dp4_tp8" in name or "_ep2" in name else 2
    )
    given = {
        **MODEL,
        "num_layers": layers,
        "vocab_size": 514 if name in WHOLE_WORDS else MODEL["vocab_size"],
        "compute_dtype": "bfloat16" if name in IN_BFLOAT16 else "float32",
    }
    if size != "tiny" or family == "palm":
        given["dropout_rate"] = 0.0
    if "tp3" in name:
        given |= OF_THREE
    rules = RULES.replace("decoder", "experts") if "ep2" in name else RULES
    if "tp3" in name:  # on 24 devices MindSpore derives no layouts
        rules = RULES.replace("decoder", "decoder_spelled_out")
    path, model = write(f"{name}.yaml", rules + STRATEGIES[name]), write("model.json", json.dumps(given))
    accumulate = 2 if "accumulate" in name else 1
    asked = (
        "--model",
        family,
        "--size",
        size,
        "--strategy",
        path,
        "--config",
        model,
        "--ranks",
        "all",
        "--accumulate",
        accumulate,
    )
    values = call("tests/configs/graph_worker.py", "dry_run_values", list(map(str, asked)))
    strategy, config = load_strategy(path), dataclasses.replace(size_config(family, size), **given)
    dims, job = of_decoder(config), job_of(strategy, config, values["job"]["batch_size"], accumulate)
    assert len(values["ranks"]) == strategy.mesh.size
    for rank in values["ranks"]:
        assert rank["stage"] == strategy.mesh.coordinate(rank["rank"], "pp")
        assert rank["parameter_bytes"] == parameter_bytes(dims, job)[rank["stage"]]
        assert rank["optimizer_bytes"] == 2 * rank["parameter_bytes"]
        stage = values["job"]["stages"][rank["stage"]]
        assert (stage["parameter_bytes"], stage["layers"]) == (rank["parameter_bytes"], len(rank["layers"]))
        assert stage["total_bytes"] == pytest.approx(rank["total_bytes"], rel=0.01)
        expected = collective_bytes(dims, job, rank["stage"])
        assert rank["bytes_per_step"].keys() == expected.keys()
        for kind, size in expected.items():
            assert rank["bytes_per_step"][kind] == pytest.approx(size, rel=0.01), (rank["rank"], kind)
        for members in rank["groups"].values():
            assert rank["rank"] in members
    model_flops = sum(sum(rank["flops"].values()) - rank["flops"].get("recompute", 0) for rank in values["ranks"])
    tokens = values["job"]["batch_size"] * config.seq_len
    copies = job.tp // math.gcd(job.tp, dims.kv_heads)  # ranks that make the same keys and values
    again = 6 * tokens * layers * 2 * dims.hidden_size * dims.kv_size * (copies - 1)
    more_rows = dims.experts_per_token * (dims.expert_rows - 1)  # that experts have room for
    again += 6 * tokens * dims.expert_layers * more_rows * dims.expert_parameters
    assert model_flops == pytest.approx(dims.model_flops(tokens) + again, rel=0.01)


def compiled(path, rank, as_function=True, accumulate=1):
    env = {"SPORELOOM_CACHE": "0"}  # a cached graph would be compared with itself
    return call("tests/configs/graph_worker.py", "dry_run", path, MODEL, rank, as_function, accumulate, env=env)


def test_keeping_the_network_a_function_changes_nothing_but_compile_time(write):
    path = write("s.yaml", RULES + STRATEGIES["pp2_tp2_recompute"])
    function, inlined = compiled(path, 0), compiled(path, 0, as_function=False)
    assert function["collectives"] == inlined["collectives"]
    assert function["flops"] == inlined["flops"]


@pytest.mark.parametrize("name", ["pp2_tp2_recompute", "dp2_tp2_zero_accumulate", "pp2_dp2_tp2_sp"])
def test_what_is_derived_is_what_would_be_spelled_out(write, name):
    """With dropout, and microbatches written out: each copy takes its layouts anew."""
    text = "mesh: {pp: 2, dp: 2, tp: 2}\npipeline: {num_microbatches: 2}\nsequence_parallel: true\n"
    text, accumulate = STRATEGIES.get(name, text), 2 if "accumulate" in name else 1
    derived = compiled(write("derived.yaml", RULES + text), 0, False, accumulate)
    rules = RULES.replace("decoder.yaml", "decoder_spelled_out.yaml")
    assert derived == compiled(write("spelled_out.yaml", rules + text), 0, False, accumulate)


def test_ranks_of_one_stage_have_the_same_graph_over_the_groups_foretold(write):
    path = write("s.yaml", RULES + STRATEGIES["pp2_tp2_recompute"])
    model, options = write("m.json", json.dumps(MODEL)), ("--ranks", "0,1", "--batch-size", 4, "--json")
    text = dry_run("--strategy", path, "--config", model, *options)
    foretold = json.loads(text[text.index("{") :])["ranks"][1]
    really = compiled(path, 1)
    assert sorted(map(sorted, foretold["groups"].values())) == really["groups"]
    found = Counter()
    for c in foretold["collectives"]:
        size = "" if c["kind"] in ("Send", "Receive") else len(foretold["groups"][c["group"]])
        found[f"{c['kind']} {size} {c['bytes_each']}"] += c["count"]
    assert found == really["collectives"]


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
    assert "beaten, as an earlier one: " in text
    text = dry_run("explain", "layers.0.attention.softmax", "--strategy", path)
    assert "operator model.layers.0.attention.softmax, Softmax" in text
    outcome = tool("tools/dry_run.py", "explain", "mlp.upp.weight", "--strategy", path)
    assert outcome.code == 2
    assert "did you mean mlp.up.weight?" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "0,4"), "--ranks 0,4: '4' is no rank; give numbers from 0 to 3"),
        (("--ranks", "first"), "'first' is no rank"),
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


def test_explain_says_what_was_derived_and_from_what(write):
    rules = (CONFIGS / "rules/decoder.yaml").read_text()
    ruled = write("rules.yaml", "".join(line for line in rules.splitlines(keepends=True) if "bias_add" not in line))
    text = dry_run(
        "explain", "layers.0.mlp.up.bias", "--strategy", write("s.yaml", f"mesh: {{tp: 2}}\nrules: {ruled}\n")
    )
    assert "[512] -> [256] on each rank of stage 0, 2 different parts" in text
    assert "no rule is for it: MindSpore derived [tp]" in text
    line = 1 + ruled.read_text().splitlines().index("  mlp.up|gate.matmul?: [[[dp, cp], ~], [tp, ~]]")
    assert f"from {ruled}:{line}: mlp.up|gate.matmul, of model.layers.0.mlp.up.matmul" in text


def test_a_lookup_that_leaves_an_axis_out_is_told(write):
    rules = f"rules:\n  base: {CONFIGS / 'rules/decoder.yaml'}\n  operators:\n"
    path = write("s.yaml", "mesh: {dp: 2, cp: 2, tp: 2}\n" + rules + "    word.gather: [[tp, ~], [dp]]\n")
    outcome = tool("tools/dry_run.py", "--strategy", path)
    assert outcome.code == 2
    assert "so the indices must be sharded over cp, too: [[tp, ~], [[dp, cp]]], or not at all" in outcome.output


def test_what_is_not_for_context_parallel_is_told(write):
    def told(text, *more):
        return tool("tools/dry_run.py", "--strategy", write("s.yaml", RULES + text), *more).output

    assert "tp x cp = 8, which does not divide num_kv_heads = 4; use gather" in told(
        "mesh: {cp: 8}\ncontext_parallel: ulysses\n"
    )
    assert "sequences of 66 tokens are not divisible by cp 4" in told("mesh: {cp: 4}\n", "--seq-len", 66)
    assert "context_parallel has no effect at mesh.cp = 1" in told("mesh: {dp: 2}\ncontext_parallel: ulysses\n")
    assert "whose inputs MindSpore does not shard over cp" in told(
        "mesh: {pp: 2, cp: 2}\npipeline: {num_microbatches: 2}\n"
    )
    assert "expert capacity is counted in full sequences" in told("mesh: {cp: 2}\n", "--size", "switch_tiny")


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
    for line in ("--lora-r is for training", "--fast counts layers of a whole model", "mlp.sideways matches no matrix"):
        assert line in told.output


def test_rules_that_leave_layouts_to_mindspore_are_refused_where_it_derives_none(write):
    outcome = tool("tools/dry_run.py", "--strategy", write("s.yaml", RULES + "mesh: {dp: 24}\n"), "--batch-size", 24)
    assert outcome.code == 2
    assert "on stages of 2^n ranks only, and no rule is for" in outcome.output
    assert "use rules/decoder_spelled_out.yaml" in outcome.output


@pytest.mark.parametrize(
    "pipeline",
    [
        "pp: 2}\npipeline: {num_microbatches: 3}",
        "pp: 2}\npipeline: {num_microbatches: 5, virtual_stages: 2}",
        "pp: 4}\npipeline: {num_microbatches: 4, virtual_stages: 2, schedule: gpipe}",
        "pp: 4}\npipeline: {num_microbatches: 10, virtual_stages: 2, schedule: seqpipe}",
        "pp: 2}\npipeline: {num_microbatches: 5, virtual_stages: 2, schedule: zero_bubble_v}",
        "pp: 4}\npipeline: {num_microbatches: 9, virtual_stages: 2, schedule: zero_bubble_v}",
    ],
)
def test_stages_work_in_the_order_that_is_drawn(write, pipeline):
    path = write("s.yaml", f"{RULES}mesh: {{{pipeline}\n")
    settings = load_strategy(path).pipeline
    stages = call("tests/configs/graph_worker.py", "order_of_passes", path)
    for stage, found in enumerate(stages):
        drawn = passes(stage, len(stages), settings.num_microbatches, settings.virtual_stages, settings.schedule)
        assert [tuple(one) for one in found] == drawn


def test_what_lies_on_the_host_is_counted_there(write):
    text = f"{RULES}mesh: {{dp: 2, tp: 2}}\n"
    plain, moved = write("p.yaml", text), write("m.yaml", text + "offload: {optimizer: true, layers: [1, 2]}\n")
    given = ["--model", "pangu", "--size", "tiny", "--ranks", "0", "--strategy"]
    without, with_host = (
        call("tests/configs/graph_worker.py", "dry_run_values", [*given, str(path)])["ranks"][0]
        for path in (plain, moved)
    )
    assert with_host["host_optimizer_bytes"] == without["optimizer_bytes"] > 0 == with_host["optimizer_bytes"]
    kept = without["activation_bytes"] - with_host["activation_bytes"]
    # One layer is at work on the device. What the compiler moves is what the model of memory says of a layer, roughly.
    assert with_host["host_activation_bytes"] / 2 <= kept <= with_host["host_activation_bytes"]
    assert with_host["moved_bytes"] == pytest.approx(with_host["host_activation_bytes"], rel=0.35)
    assert with_host["total_bytes"] < without["total_bytes"] and without["moved_bytes"] == 0
    assert with_host["bytes_per_step"] == without["bytes_per_step"]


def test_copies_take_turns(write):
    path = write("s.yaml", f"{RULES}{STRATEGIES['dp2_tp2_copies']}")
    outcome = dry_run("--model", "pangu", "--size", "tiny", "--ranks", "0", "--strategy", path)
    (line,) = [line for line in outcome.splitlines() if "copies take turns" in line]
    turns = [tuple(word.split(":")) for word in line.partition("forward: ")[2].split()]
    places = ["embedding.word", *(f"{layer}.{part}" for layer in ("layers.0", "query_layer") for part in PARTS)]
    for copy in "01":
        assert [place for mine, place in turns if mine == copy][:5] == places
    # The second copy is a collective behind: each is computed while the other's are under way.
    assert [copy for copy, place in turns if place != "loss"] == list("0010101011")


OWN_SCHEDULE = (CONFIGS.parent / "tests/parity/own_schedule.csv").resolve()
BY_SPMD = {  # strategy, bytes that may be sent above the closed forms of MindSpore's partitioner
    "tp2_sp": (STRATEGIES["tp2_sp"], 0.0),
    "dp2_tp2_zero": (STRATEGIES["dp2_tp2_zero"], 0.02),
    "dp4_tp2_zero2": (STRATEGIES["dp4_tp2_zero2"], 0.02),
    "dp4_zero2_accumulate": (STRATEGIES["dp4_zero2_accumulate"], 0.0),
    "dp4_ep2_zero": (STRATEGIES["dp4_ep2_zero"], 0.0),
    "pp2_dp2_tp2_zero_bubble": (STRATEGIES["pp2_dp2_tp2_zero_bubble"], 0.0),
    "pp2_tp2_recompute": (STRATEGIES["pp2_tp2_recompute"], 0.0),
    "pp2_dp2_zero_own_schedule": (
        f"mesh: {{pp: 2, dp: 2}}\noptimizer_parallel: {{axis: dp}}\npipeline: {{num_microbatches: 3, virtual_stages: 2, "
        f"schedule: {OWN_SCHEDULE}}}\n",
        None,  # MindSpore has none
    ),
}


@pytest.mark.parametrize("name", BY_SPMD)
def test_graphs_of_engine_spmd_hold_what_is_implied_and_send_no_more(write, name):
    """One compilation for all ranks. The closed forms are of MindSpore's partitioner: ours sends at most as much."""
    text, more = BY_SPMD[name]
    family = ("pangu", "switch_tiny") if "ep2" in name else ("pangu", "tiny")
    layers = 4 if "pp2" in name or "ep2" in name else 2
    given = {
        **MODEL,
        "num_layers": layers,
        "dropout_rate": 0.1 if "recompute" in name else 0.0,
        "compute_dtype": "bfloat16" if "zero2" in name else "float32",
    }
    rules = RULES.replace("decoder", "experts") if "ep2" in name else RULES
    path, model = write(f"{name}.yaml", f"{rules}{text}engine: spmd\n"), write("model.json", json.dumps(given))
    accumulate = 2 if "accumulate" in name else 1
    asked = ("--model", family[0], "--size", family[1], "--strategy", path, "--config", model, "--ranks", "all")
    values = call(
        "tests/configs/graph_worker.py", "dry_run_values", [*map(str, asked), "--accumulate", str(accumulate)]
    )
    strategy, config = load_strategy(path), dataclasses.replace(size_config(*family), **given)
    dims, job = of_decoder(config), job_of(strategy, config, values["job"]["batch_size"], accumulate)
    assert values["job"]["engine"] == "spmd" and len(values["ranks"]) == strategy.mesh.size
    compiled = {rank["stage"]: rank for rank in values["ranks"] if rank["rank"] == rank["compiled_as"]}
    for rank in values["ranks"]:
        if more is not None:  # rows that several stages share are sharded here, too
            assert rank["parameter_bytes"] == parameter_bytes(dims, job)[rank["stage"]]
        assert rank["optimizer_bytes"] == 2 * rank["parameter_bytes"]
        for group, members in rank["groups"].items():
            assert rank["rank"] in members and len(members) > 1
            of_compiled = compiled[rank["stage"]]["groups"][group]
            assert len(of_compiled) == len(members)
            axes = [{strategy.mesh.coordinate(r, axis) for r in members} for axis in strategy.mesh.order]
            assert math.prod(map(len, axes)) == len(members)
    for rank in compiled.values():
        if more is not None:
            sent = sum(rank["bytes_per_step"].values())
            assert sent <= (1 + more) * sum(collective_bytes(dims, job, rank["stage"]).values()) + 64  # a few numbers
    model_flops = sum(sum(rank["flops"].values()) - rank["flops"].get("recompute", 0) for rank in values["ranks"])
    tokens = values["job"]["batch_size"] * config.seq_len
    more_rows = dims.experts_per_token * (dims.expert_rows - 1)
    again = 6 * tokens * dims.expert_layers * more_rows * dims.expert_parameters
    assert model_flops == pytest.approx(dims.model_flops(tokens) + again, rel=0.01)


def test_weights_are_gathered_once_a_step_whatever_the_number_of_microbatches(write):
    """And gradients added up once."""
    found = []
    for accumulate in (2, 4):
        text = "mesh: {dp: 2}\noptimizer_parallel: {axis: dp}\nrecompute: {layers: all}\nengine: spmd\n"
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
