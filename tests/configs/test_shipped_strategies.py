# SPDX-License-Identifier: Apache-2.0
"""Every strategy we ship compiles for Ascend, and communicates what it implies: no more, no less."""

import dataclasses
import json

import pytest
from conftest import CONFIGS, call

from sporeloom.models.family import family_and_size, size_config
from sporeloom.strategy.checks import model_problems
from sporeloom.strategy.loader import load_strategy

FILES = sorted(CONFIGS.glob("*.yaml"))
WITH_EXPERTS = [path.stem for path in FILES if load_strategy(path).mesh.ep > 1]
WITH_CONTEXT_PARALLEL = [path.stem for path in FILES if load_strategy(path).mesh.cp > 1]
NAMES = [path.stem for path in FILES if path.stem not in WITH_EXPERTS]

EQUAL = ("pangu_tiny_dp2_tp2_zero", "pangu_tiny_dp2_pp2_zero")
WORKER = "tests/configs/compile_worker.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_name_says_family_size_and_degrees(path):
    family, size = family_and_size(path.stem)
    parts = path.stem.removeprefix(f"{family}_{size}_").split("_")
    mesh = load_strategy(path).mesh
    degrees = [f"{axis}{mesh.degree(axis)}" for axis in ("dp", "ep", "cp", "tp", "pp") if mesh.degree(axis) > 1]
    if mesh.ep == mesh.dp > 1:
        degrees.remove(f"dp{mesh.dp}")
    assert parts[: len(degrees)] == degrees
    beside = path.with_suffix(".json")  # what the strategy wants otherwise of the model
    changes = json.loads(beside.read_text()) if beside.exists() else {}
    assert model_problems(load_strategy(path), dataclasses.replace(size_config(family, size), **changes)) == []
    if changes:
        assert model_problems(load_strategy(path), size_config(family, size)) != []


@pytest.fixture(scope="session")
def compiled():
    """strategy name -> what the compiler made of a rank of its first, middle and last stage; of EQUAL, of every rank."""
    longest_first = sorted(FILES, key=lambda path: -load_strategy(path).mesh.pp)
    asked, found = (list(map(str, longest_first)), EQUAL), {}
    for results in call(WORKER, "compile_share", *asked, processes=2, timeout=900, fresh=True):
        for result in results:
            found.setdefault(result["strategy"].removesuffix(".yaml"), []).append(result)
    for results in found.values():
        results.sort(key=lambda result: result["rank"])
    return found


pytestmark = pytest.mark.timeout(1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank"), [("pangu_tiny_dp2_tp2_sp", 3), ("pangu_tiny_dp4_zero", 3), ("pangu_tiny_tp2_pp2", 0)]
)
def test_rules_and_what_is_derived_from_them_are_what_would_be_spelled_out(compiled, name, rank):
    spelled_out = call(
        WORKER, "compile_rank", CONFIGS / f"{name}.yaml", rank, CONFIGS / "rules/decoder_spelled_out.yaml"
    )
    assert spelled_out["counts"] == next(result for result in compiled[name] if result["rank"] == rank)["counts"]


def total(counts, *words):
    return sum(count for key, count in counts.items() if all(word in key.split() for word in words))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_first_middle_and_last_stage_compile_as_predicted(compiled, name):
    mesh = load_strategy(CONFIGS / f"{name}.yaml").mesh
    assert len(compiled[name]) == (mesh.size if name in EQUAL else min(3, mesh.pp))
    for result in compiled[name]:
        assert result["predicted_wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_ranks_of_one_stage_are_equal(compiled, name):
    """So that the others need one rank of each stage only."""
    pp = load_strategy(CONFIGS / f"{name}.yaml").mesh.pp
    of_stage = len(compiled[name]) // pp
    for rank, result in enumerate(compiled[name]):
        first = compiled[name][rank // of_stage * of_stage]
        assert {**result, "rank": 0} == {**first, "rank": 0}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_costs_two_forward_reductions_a_layer(compiled, name):
    strategy = load_strategy(CONFIGS / f"{name}.yaml")
    for result in compiled[name]:
        counts, each = result["counts"], result["layers"] * result["microbatches"]
        kind = "ReduceScatter" if strategy.sequence_parallel else "AllReduce"
        forward = total(counts, kind, "forward", "layer")
        repeated = strategy.recompute and strategy.recompute.kind == "full"
        # Recomputing a layer repeats the attention's reduction; nothing needs the MLP's again, or a parallel block's.
        again = 0 if result["block"] == "parallel" else 1
        assert forward == (0 if strategy.mesh.tp == 1 else (2 + again * bool(repeated)) * each)
        if strategy.context_parallel == "gather":
            assert total(counts, "AlltoAll") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CONTEXT_PARALLEL)
def test_context_parallel_gathers_keys_and_values_or_swaps_heads_and_tokens(compiled, name):
    """Of one sequence a replica: nothing else moves. Once more where layers are computed again."""
    strategy = load_strategy(CONFIGS / f"{name}.yaml")
    for result in compiled[name]:
        counts, layers, size = result["counts"], result["layers"], str(strategy.mesh.cp)
        forward = (2 if strategy.recompute else 1) * layers
        if strategy.context_parallel == "ulysses":
            assert total(counts, "AlltoAll", "forward", size) == 4 * forward
            assert total(counts, "AlltoAll", "backward", size) == 4 * layers
        else:
            assert total(counts, "AllGather", "forward", "layer", size) == 2 * forward
            assert total(counts, "ReduceScatter", "backward", "layer", size) == 2 * layers


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_layer_of_experts_costs_two_all_to_alls_and_no_all_gather(compiled, name):
    """Forward, and two backward; what sequence parallel and optimizer parallel gather aside."""
    strategy = load_strategy(CONFIGS / f"{name}.yaml")
    for result in compiled[name]:
        assert result["predicted_wrong"] == []
        counts, each = result["counts"], result["expert_layers"] * result["microbatches"]
        assert result["expert_layers"] > 0
        assert total(counts, "AlltoAll", "forward") == (4 if strategy.recompute else 2) * each
        assert total(counts, "AlltoAll", "backward") == 2 * each
        if not strategy.sequence_parallel:
            assert total(counts, "AllGather", "layer") <= result["cut_by_optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_reduced_once_each(compiled, name):
    strategy = load_strategy(CONFIGS / f"{name}.yaml")
    for result in compiled[name]:
        counts = result["counts"]
        reduced, scattered = total(counts, "AllReduce", "gradient"), total(counts, "ReduceScatter", "gradient")
        if strategy.optimizer_parallel:  # a tied parameter of a pipeline stays whole
            whole = result["parameters"] - result["cut_by_optimizer"]
            # One head of keys and values has fewer rows than ranks that hold it.
            short = 2 * result["layers"] if result["block"] == "parallel" else 0
            assert whole <= (1 if strategy.mesh.pp > 1 else 0) + short
            assert scattered == result["cut_by_optimizer"]
            if strategy.optimizer_parallel.shard_size:  # the groups that hold the same part add theirs up
                assert reduced == result["parameters"]
            else:
                assert reduced <= 1 + short if strategy.mesh.pp > 1 else reduced == 0
        else:
            assert scattered == 0
            assert reduced <= result["parameters"]
            assert reduced == result["parameters"] or strategy.mesh.dp == 1 or strategy.mesh.pp > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "pp" in name])
def test_a_pipeline_sends_each_microbatch_forward_and_its_gradient_back(compiled, name):
    first, *_, last = compiled[name]
    for result in (first, last):  # and once a step a tied embedding and its gradient
        sent = result["microbatches"] * (2 * result["virtual_stages"] - 1) + result["tied"]
        assert total(result["counts"], "Send") == total(result["counts"], "Receive") == sent
