# SPDX-License-Identifier: Apache-2.0
"""A search is deterministic, continues where it was ended, notices other inputs, and refuses what cannot run."""

import json
from concurrent.futures.process import BrokenProcessPool

import pytest
from tuned import LIMITS, SMALL, Fakes, files, tune_config, tune_request

from sporeloom.cli.tune import check, check_network, main
from sporeloom.core.errors import ConfigError
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy_search.report import lines
from sporeloom.strategy_search.run import Limits, tune
from sporeloom.strategy_search.subjects import FamilySubject


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


def test_the_same_inputs_give_the_same_bytes(tmp_path, fakes):
    request = tune_request(tmp_path, **SMALL)
    values = tune(request, LIMITS, tmp_path / "a")
    assert tune(request, LIMITS, tmp_path / "b") == values
    one, other = ({n: t for n, t in files(tmp_path / name).items() if "certificate" not in n} for name in "ab")
    assert one == other and {"tune.json", "tune.html"} <= one.keys()


def test_a_point_has_its_strategy_and_its_certificate(tmp_path, fakes):
    request = tune_request(tmp_path, **SMALL)
    values = tune(request, LIMITS, tmp_path / "out")
    front = values["front"]
    times, sizes = [p["step_time_s"] for p in front], [p["peak_bytes"] for p in front]
    assert times == sorted(times) and sizes == sorted(sizes, reverse=True) and len(front) > 1
    assert [bool(point["certificate"]) for point in front] == [True, True] + [False] * (len(front) - 2)
    for point in front:
        assert load_strategy(tmp_path / "out" / point["strategy"]).mesh.size == 4
        found = (tmp_path / "out" / "points" / point["name"] / "certificate.json").exists()
        assert found == bool(point["certificate"])
    assert {path.name for path in (tmp_path / "out" / "points").iterdir()} == {point["name"] for point in front}


def test_a_search_that_was_ended_continues_without_evaluating_again(tmp_path, fakes):
    request = tune_request(tmp_path, **SMALL)
    expected = tune(request, LIMITS, tmp_path / "at_once")
    in_order = [*fakes.simulated]
    fakes.simulated.clear()
    fakes.killed_after = 4
    with pytest.raises(KeyboardInterrupt):
        tune(request, LIMITS, tmp_path / "ended")
    fakes.killed_after = None
    certificates = len(fakes.certified)
    assert tune(request, LIMITS, tmp_path / "ended") == expected
    assert fakes.simulated == in_order
    assert len(fakes.certified) == certificates + 2
    assert tune(request, LIMITS, tmp_path / "ended") == expected
    assert fakes.simulated == in_order and len(fakes.certified) == certificates + 2


def test_a_damaged_certificate_is_made_again(tmp_path, fakes):
    request = tune_request(tmp_path, **SMALL)
    values = tune(request, LIMITS, tmp_path / "out")
    path = tmp_path / "out" / values["front"][0]["certificate"]
    path.write_text(path.read_text().replace("certified", "Certified"))
    tune(request, LIMITS, tmp_path / "out")
    assert fakes.certified == [values["front"][0]["name"], values["front"][1]["name"], values["front"][0]["name"]]


def test_other_inputs_are_named_and_overwrite_evaluates_again(tmp_path, fakes):
    tune(tune_request(tmp_path, **SMALL), LIMITS, tmp_path / "out")
    count = len(fakes.simulated)
    faster = tune_request(tmp_path, **SMALL, cluster={"peak_tflops": 200})
    with pytest.raises(ConfigError) as refused:
        tune(faster, LIMITS, tmp_path / "out")
    assert "cluster.peak_tflops was 100, is 200" in refused.value.problems[0]
    assert "--overwrite" in refused.value.problems[-1]
    assert len(fakes.simulated) == count
    values = tune(faster, LIMITS, tmp_path / "out", overwrite=True)
    assert len(fakes.simulated) == 2 * count
    assert {path.name for path in (tmp_path / "out" / "points").iterdir()} == {p["name"] for p in values["front"]}


def test_larger_limits_evaluate_only_what_is_new(tmp_path, fakes):
    request = tune_request(tmp_path, **SMALL)
    tune(request, LIMITS, tmp_path / "out")
    tune(request, Limits(meshes=40, simulate=12, certify=2, processes=4), tmp_path / "out")
    assert len(fakes.simulated) == len(set(fakes.simulated)) < 6 + 12


def test_a_refused_certificate_leaves_the_front_to_the_others(tmp_path, fakes):
    request = tune_request(tmp_path, **SMALL)
    best = tune(request, LIMITS, tmp_path / "right")["front"][0]["name"]
    fakes.wrong = {best}
    values = tune(request, LIMITS, tmp_path / "out")
    assert best not in {point["name"] for point in values["front"]}
    assert {"name": best, "reason": "certificate refused: dp 2: loss of step 1 differs"} in values["refused"]
    assert (tmp_path / "out" / "refused" / best / "certificate.json").is_file()
    assert sum(bool(point["certificate"]) for point in values["front"]) == 2
    certificates = len(fakes.certified)
    assert tune(request, LIMITS, tmp_path / "out") == values
    assert len(fakes.certified) == certificates


def test_what_does_not_fit_when_simulated_is_refused_with_its_reason(tmp_path, fakes):
    request = tune_request(tmp_path, **SMALL)
    best = tune(request, LIMITS, tmp_path / "right")["front"][0]["name"]
    fakes.too_large = {best}
    values = tune(request, LIMITS, tmp_path / "out")
    assert values["refused"] == [{"name": best, "reason": "does not fit: rank 0"}]
    assert best not in {point["name"] for point in values["front"]}
    assert f"  {best}: does not fit: rank 0" in lines(values)


def test_a_process_that_was_ended_is_no_refusal(tmp_path, monkeypatch):
    def killed(*_):
        try:
            raise BrokenProcessPool
        except BrokenProcessPool:
            raise ConfigError("a process was ended from outside") from None

    def refused(*_):
        raise ConfigError("rule 3: no")

    request = tune_request(tmp_path, **SMALL)
    monkeypatch.setattr(FamilySubject, "step_cost", killed)
    with pytest.raises(ConfigError, match="ended from outside"):
        tune(request, LIMITS, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("candidates/*.json"))
    monkeypatch.setattr(FamilySubject, "step_cost", refused)
    values = tune(request, LIMITS, tmp_path / "out")
    assert values["front"] == [] and {one["reason"] for one in values["refused"]} == {
        "cannot be partitioned: rule 3: no"
    }


def test_goodput_is_an_objective_with_faults(tmp_path, fakes):
    flags = {
        "faults": "llama3_h100",
        "steps": 1000,
        "checkpoint_pause_s": 20.0,
        "restart_s": 600.0,
        "repair_hours": 24.0,
    }
    values = tune(tune_request(tmp_path, **SMALL, **flags), LIMITS, tmp_path / "out")
    assert all(0 < point["goodput"] <= 1 for point in values["front"])
    assert "goodput" in "\n".join(lines(values))


def test_nothing_fits_says_by_how_much(tmp_path):
    request = tune_request(tmp_path, size="13b", devices=2, batch=2, cluster={"memory_gb": 2})
    with pytest.raises(ConfigError, match=r"nothing fits: the nearest .* needs [\d.]+ GB on a device that has 1.9 GB"):
        tune(request, LIMITS, tmp_path / "out")


def test_all_problems_of_the_flags_are_reported_at_once(tmp_path):
    config = tune_config(tmp_path, devices=6, processes=3, steps=5)
    with pytest.raises(ConfigError) as refused:
        check(config)
    text = "\n".join(refused.value.problems)
    assert "--processes 3" in text and "--steps has no effect without --faults" in text
    assert "--devices 6: strategies are for several devices; give 2, 4 or a multiple of 8" in text
    with pytest.raises(ConfigError, match="--restart-s has no effect without --faults"):
        check(tune_config(tmp_path, restart_s=0.0))
    with pytest.raises(ConfigError, match="goodput needs --steps, --checkpoint-pause-s, --restart-s"):
        check(tune_config(tmp_path, faults="llama3_h100"))


def test_flags_of_a_network_and_of_a_model_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError) as refused:
        check_network(tune_config(tmp_path, network="net.py:Net"))
    text = "\n".join(refused.value.problems)
    assert "--network needs --inputs" in text
    assert "--size is for a model" in text and "--global-batch-size is for a model" in text
    with pytest.raises(ConfigError, match="--inputs are those of a --network"):
        check(tune_config(tmp_path, inputs=("8x8:float32",)))
    with pytest.raises(ConfigError, match="--global-batch-size is needed"):
        check(tune_config(tmp_path, batch=None))


def test_the_table_has_short_names_and_an_empty_front(tmp_path, fakes):
    values = tune(tune_request(tmp_path, **SMALL), LIMITS, tmp_path / "out")
    values["front"] = [{**values["front"][0], "name": "dp4_m1"}]
    head, row = list(lines(values))[3:5]
    assert head.index("step s") + len("step s") == row.index(f"{values['front'][0]['step_time_s']:.4g}") + len(
        f"{values['front'][0]['step_time_s']:.4g}"
    )
    values["front"] = []
    assert any(line.startswith("Pareto front") for line in lines(values))


@pytest.mark.slow
def test_a_real_search_proves_its_points(tmp_path, capsys):
    path = tune_config(tmp_path).cluster
    words = ["--model", "pangu", "--size", "tiny", "--cluster", str(path), "--devices", "2", "--global-batch-size", "8"]
    out = tmp_path / "out"
    words += ["--simulate", "3", "--certify", "1", "--processes", "2", "--out", str(out), "--json"]
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    point = values["front"][0]
    certificate = json.loads((out / point["certificate"]).read_text())
    assert certificate["verdict"] == "certified" and certificate["proof"]["meshes"]
    assert (out / "points" / point["name"] / "certificate.html").is_file()
    kept = files(out)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == values
    assert files(out) == kept
