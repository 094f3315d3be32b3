# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
import yaml
from conftest import CONFIGS

from sporeloom.core.errors import ConfigError
from sporeloom.strategy.loader import load_strategy

RULES = "operators:\n  up.matmul: [[dp, ~], [tp, ~]]\n  norm: [[[dp, sp], ~]]\n"


@pytest.fixture
def problems(write):
    def read(text, rules=RULES):
        write("rules.yaml", rules)
        with pytest.raises(ConfigError) as caught:
            load_strategy(write("s.yaml", text))
        return [
            problem[problem.index("s.yaml") :] if "s.yaml" in problem else problem for problem in caught.value.problems
        ]

    return read


def test_a_file_becomes_a_strategy(write):
    write("rules.yaml", RULES)
    strategy = load_strategy(
        write("s.yaml", "mesh: {dp: 2, tp: 4}\nrules: rules.yaml\noptimizer_parallel: {axis: dp}\n")
    )
    assert (strategy.mesh.size, strategy.mesh.dp, strategy.mesh.tp) == (8, 2, 4)
    assert strategy.optimizer_parallel is not None
    assert strategy.rules.operators[0].inputs == ((("dp",), ()), (("tp",), ()))


@pytest.mark.parametrize(("on", "dim"), [("true", ("dp", "tp")), ("false", ("dp",))])
def test_sp_is_tp_with_sequence_parallel_and_nothing_without(write, on, dim):
    write("rules.yaml", RULES)
    strategy = load_strategy(write("s.yaml", f"mesh: {{tp: 2}}\nrules: rules.yaml\nsequence_parallel: {on}\n"))
    assert strategy.rules.operators[1].inputs[0][0] == dim


def test_rules_in_place_are_added_to_their_base_and_win(write):
    write("rules.yaml", RULES)
    text = "mesh: {tp: 2}\nrules:\n  base: rules.yaml\n  layers: [blocks.*]\n  operators:\n    up.matmul: [[~, ~], [~, ~]]\n"
    rules = load_strategy(write("s.yaml", text)).rules
    assert rules.layers == ("blocks.*",)
    assert [rule.pattern for rule in rules.operators] == ["up.matmul", "norm", "up.matmul"]


def test_several_bases_are_taken_in_order(write, problems):
    write("a.yaml", "layers: [a.*]\noperators: {up.matmul: [[dp, ~], [tp, ~]]}\n")
    write("b.yaml", "layers: [b.*]\ntied: [word.*]\noperators: {down.matmul: [[dp, tp], [~, tp]]}\n")
    write("c.yaml", "base: [a.yaml, b.yaml]\noperators: {up.matmul: [[~, ~], [~, ~]]}\n")
    rules = load_strategy(write("s.yaml", "mesh: {tp: 2}\nrules: c.yaml\n")).rules
    assert (rules.layers, rules.tied) == (("b.*",), ("word.*",))
    assert [rule.pattern for rule in rules.operators] == ["up.matmul", "down.matmul", "up.matmul"]
    assert "rules.yaml is a base of itself" in problems("rules: rules.yaml\n", "base: [a.yaml, rules.yaml]\n")[0]
    (said,) = problems("rules: rules.yaml\n", "base: {a: b}\n")
    assert "base must be a list of texts, got {'a': 'b'}" in said


def test_the_rules_of_a_decoder_are_a_page():
    text = (CONFIGS / "rules/decoder.yaml").read_text()
    assert len(yaml.safe_load(text)["operators"]) <= 33
    assert len(text.splitlines()) <= 70


def test_all_problems_come_at_once_with_file_line_and_key(problems):
    found = problems("mesh: {tpp: 2}\nrules: rules.yaml\nrecompute: {layers: some}\nsequence_paralel: true\n")
    assert found[0].startswith("s.yaml:4: sequence_paralel is unknown; did you mean sequence_parallel?")
    assert found[1].startswith("s.yaml:1: mesh.tpp is unknown; did you mean tp?")
    assert "s.yaml:3: recompute.layers must be all or a list of whole numbers, got 'some'" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh: {dp: 0}", "s.yaml:1: mesh.dp must be at least 1, got 0"),
        ("mesh: {dp: two}", "s.yaml:1: mesh.dp must be a whole number, got 'two'"),
        ("mesh: {tp: 2, pp: 2, dp: 2}", "s.yaml:1: mesh.pp must be the outermost axis: write pp first"),
        (
            "mesh: {pp: 4}\npipeline: {num_microbatches: 2}",
            "s.yaml:2: pipeline.num_microbatches = 2 is fewer than the 4 stages",
        ),
        ("mesh: {dp: 4}\npipeline: {num_microbatches: 2}", "s.yaml:2: pipeline has no effect at mesh.pp = 1"),
        ("mesh: {dp: 4}\noffload: {}", "s.yaml:2: offload moves nothing; give optimizer: true, or layers"),
        ("mesh: {dp: 4}\noffload: {layers: some}", "s.yaml:2: offload.layers"),
        (
            "mesh: {pp: 4}\npipeline: {num_microbatches: 4, virtual_stages: 3, schedule: zero_bubble_v}",
            "s.yaml:2: pipeline.virtual_stages: zero_bubble_v has 2, got 3",
        ),
        (
            "mesh: {pp: 4}\npipeline: {num_microbatches: 4, virtual_stages: 2, schedule: zero_bubble_v}",
            "s.yaml:2: pipeline.num_microbatches = 4: zero_bubble_v needs at least twice as many as the 4 stages",
        ),
        (
            "mesh: {pp: 2}\npipeline: {num_microbatches: 4, schedule: seqpipe}",
            "s.yaml:2: pipeline.schedule: seqpipe is for pipelines with virtual_stages",
        ),
        (
            "mesh: {pp: 2}\npipeline: {num_microbatches: 4, virtual_stages: 2}\nmicro_batch_interleave: 2",
            "s.yaml:3: micro_batch_interleave: interleaved microbatches and pipeline.virtual_stages cannot be combined",
        ),
        (
            "mesh: {pp: 2}\npipeline: {num_microbatches: 4, virtual_stages: 2, stages: {num_layers: [1, 1]}}",
            "s.yaml:2: pipeline.stages.num_layers has 2 entries for 2 stages x 2",
        ),
        ("mesh: {tp: 4}\noptimizer_parallel: {axis: dp}", "s.yaml:2: optimizer_parallel has no effect at mesh.dp = 1"),
        ("mesh: {dp: 4}\nsequence_parallel: true", "s.yaml:2: sequence_parallel has no effect at mesh.tp = 1"),
        ("mesh: {dp: 6}\noptimizer_parallel: {shard_size: 4}", "possible: 2, 3, 6"),
        (
            "mesh: {dp: 4}\nrecompute: {layers: all}\noptimizer_parallel: {reshard_after_forward: true}\n"
            "micro_batch_interleave: 2\nengine: mindspore",
            "s.yaml:3: optimizer_parallel.reshard_after_forward: it is not implemented for micro_batch_interleave; leave out",
        ),
        *(
            (
                f"mesh: {{pp: 2, dp: 2}}\npipeline: {{num_microbatches: 4}}\n{recompute}\n"
                "optimizer_parallel: {reshard_after_forward: true, shard_accumulated_gradients: true}\n"
                "engine: mindspore",
                f"s.yaml:4: optimizer_parallel.reshard_after_forward{message}",
            )
            for recompute, message in (
                (
                    "recompute: {kind: selective}",
                    ": weights are gathered again for layers that are recomputed; write",
                ),
                (
                    "recompute: {layers: [0, 1]}",
                    ": weights are gathered again for layers that are recomputed; write",
                ),
                ("recompute: {layers: all}", ": MindSpore does not compile it in a pipeline; leave it out, or mesh.pp"),
                ("recompute: {layers: all}", " and shard_accumulated_gradients cannot be combined; leave out one"),
            )
        ),
        ("mesh: {pp: 2}\npipeline: {num_microbatches: 4, stages: {num_layers: [3]}}", "has 1 entries for 2 stages"),
        ("mesh: {dp: 2}\nmesh: {dp: 4}", "s.yaml:2: mesh is given twice"),
        ("mesh: [2, 2]", "s.yaml:1: mesh must be a mapping of keys"),
        ("mesh: {dp: 2", "s.yaml:1: not YAML"),
        ("rules: nowhere.yaml", "rules: there is no file"),
        ("- a\n", "s.yaml: a mapping of keys is expected"),
        (
            "rules: {operators: {up: [[dpp, ~]]}}",
            "'dpp' is not a mesh axis of a layout; use dp, cp, tp, cp_tokens, cp_heads, sp, ep, edp, kv, group or ~",
        ),
    ],
)
def test_each_mistake_has_its_message(problems, text, message):
    assert any(message in problem for problem in problems(text))


def test_a_file_that_is_not_utf8_is_named(write):
    with pytest.raises(ConfigError, match=r"s\.yaml: not UTF-8"):
        load_strategy(write("s.yaml", b"mesh: \xff\xfe"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_strategy(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["dp2_tp2_sp", "dp2_tp2_zero"])
def test_for_inference_what_only_training_needs_is_left_out(name):
    strategy = load_strategy(CONFIGS / f"pangu_tiny_{name}.yaml", for_inference=True)
    plain = load_strategy(CONFIGS / "pangu_tiny_dp2_tp2.yaml")
    assert dataclasses.replace(strategy, source="", lines={}) == dataclasses.replace(plain, source="", lines={})


def test_a_local_rule_names_its_outputs(write):
    text = "mesh: {tp: 2}\nrules:\n  operators:\n    a.b: {in: [[tp]], local: true}\n"
    with pytest.raises(ConfigError, match=r"s.yaml:4: a.b: 'out' is missing"):
        load_strategy(write("s.yaml", text))
    rules = load_strategy(write("t.yaml", text.replace("local", "out: [[tp]], local"))).rules
    assert rules.operators[0].local
