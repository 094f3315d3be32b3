# SPDX-License-Identifier: Apache-2.0
"""The folder of a search: what is kept, made again and removed, and what belongs to somebody else."""

import dataclasses
import json
import shutil

import pytest
from tuned import SMALL, Fakes, tune_config, tune_request

from sporeloom.cli.tune import check
from sporeloom.core.errors import ConfigError
from sporeloom.core.shipped import FOLDER
from sporeloom.models.family import size_config
from sporeloom.planner import cluster
from sporeloom.strategy_search.report import lines
from sporeloom.strategy_search.run import Limits, tune

LIMITS = Limits(meshes=4, simulate=5, certify=2, processes=4)
NONE = dataclasses.replace(LIMITS, certify=0)


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


def names(values):
    """The points that have certificates."""
    return [point["name"] for point in values["front"] if point["certificate"]]


def test_files_of_others_stay(tmp_path, fakes):
    out = tmp_path / "out"
    values = tune(tune_request(tmp_path, **SMALL), LIMITS, out)
    point = values["front"][0]["name"]
    theirs = [out / "points/mine/data.csv", out / "points/mine/strategy.yaml", out / "refused/notes.txt"]
    theirs += [out / "points" / point / "notes.txt"]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    fakes.wrong = {point}
    tune(tune_request(tmp_path, **SMALL, cluster={"peak_tflops": 200}), LIMITS, out, overwrite=True)
    assert [path.read_text() for path in theirs] == ["mine"] * 4
    assert not (out / "points" / point / "strategy.yaml").exists()
    assert (out / "refused" / point / "strategy.yaml").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_files_but_no_search_is_refused(tmp_path, fakes, overwrite):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/data.csv").write_text("mine")
    with pytest.raises(ConfigError, match=r"has files \(data.csv\) but no search"):
        tune(tune_request(tmp_path, **SMALL), LIMITS, tmp_path / "out", overwrite)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data.csv"]


def test_a_proof_that_is_not_completed_says_nothing_about_the_strategy(tmp_path, fakes):
    request, out = tune_request(tmp_path, **SMALL), tmp_path / "out"
    expected = tune(request, LIMITS, tmp_path / "right")
    best = expected["front"][0]["name"]
    fakes.lost = {best}
    values = tune(request, LIMITS, out)
    assert values["refused"] == [] and values["front"][0]["name"] == best
    assert values["front"][0]["not_certified"] == "dp 2: did not end within 1200 s"
    assert any(line.endswith("not certified: dp 2: did not end within 1200 s") for line in lines(values))
    assert {path.name for path in (out / "points" / best).iterdir()} == {"strategy.yaml", "logs"}
    fakes.lost = set()
    assert tune(request, LIMITS, out)["front"][0] == expected["front"][0]


def test_overwrite_proves_once_more_what_was_refused(tmp_path, fakes):
    request, out = tune_request(tmp_path, **SMALL), tmp_path / "out"
    expected = tune(request, LIMITS, tmp_path / "right")
    fakes.wrong = {expected["front"][0]["name"]}
    refused = tune(request, LIMITS, out)
    fakes.wrong = set()
    assert tune(request, LIMITS, out) == refused
    values = tune(request, LIMITS, out, overwrite=True)
    assert values["refused"] == [] and names(values)[:2] == names(expected)
    assert not list((out / "refused").iterdir())


def test_the_header_has_the_command_of_a_model_folder(tmp_path, fakes):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"family": "pangu", **size_config("pangu", "tiny").to_dict()}))
    values = tune(tune_request(tmp_path, **SMALL, model=str(folder)), LIMITS, tmp_path / "out")
    text = (tmp_path / "out" / values["front"][0]["strategy"]).read_text()
    assert "# to run it:\n#   msrun --worker_num=4 --local_worker_num=4 " in text
    assert f"train --from-checkpoint '{folder}' --model pangu --data DATA --batch-size 8 --seq-len" in text
    assert "--compute-dtype bfloat16" in text and "--strategy strategy.yaml\n" in text and "--size" not in text
    with pytest.raises(ConfigError, match="leave out --size and --config"):
        check(tune_config(tmp_path, **SMALL | {"model": str(folder), "size": "13b"}))


@pytest.mark.parametrize("changed", ["fitted.chip.matmul", "versions.rules"])
def test_results_of_another_fit_or_of_other_rules_are_not_kept(tmp_path, fakes, monkeypatch, changed):
    request, out = tune_request(tmp_path, **SMALL), tmp_path / "out"
    tune(request, LIMITS, out)
    count = len(fakes.simulated)
    if changed == "versions.rules":
        shutil.copytree(FOLDER / "rules", tmp_path / "rules")
        with (tmp_path / "rules/attention.yaml").open("a") as file:
            file.write("# changed\n")
        monkeypatch.setattr("sporeloom.strategy_search.request.FOLDER", tmp_path)
    else:
        fitted = json.loads(json.dumps(cluster._fitted()))
        fitted["chips"]["ascend910b"]["matmul"] = 0.25
        monkeypatch.setattr(cluster, "_fitted", lambda: fitted)
    with pytest.raises(ConfigError, match=f"{changed} was "):
        tune(request, LIMITS, out)
    tune(request, LIMITS, out, overwrite=True)
    assert len(fakes.simulated) == 2 * count


def test_a_lower_limit_keeps_certificates(tmp_path, fakes):
    request, out = tune_request(tmp_path, **SMALL), tmp_path / "out"
    expected = tune(request, LIMITS, out)
    made = {path: path.read_bytes() for path in out.rglob("certificate.json")}
    assert len(made) == 2
    for limits in (NONE, dataclasses.replace(LIMITS, certify=1), dataclasses.replace(NONE, processes=8)):
        assert tune(request, limits, out) == expected
    assert {path: path.read_bytes() for path in out.rglob("certificate.json")} == made
    assert len(fakes.certified) == 2


def test_a_certificate_that_is_not_valid_goes_with_all_files_of_its_proof(tmp_path, fakes):
    request, out = tune_request(tmp_path, **SMALL), tmp_path / "out"
    point = out / tune(request, LIMITS, out)["front"][0]["strategy"]
    (point.parent / "certificate.json").write_text("{}")
    tune(request, NONE, out)
    assert [path.name for path in point.parent.iterdir()] == ["strategy.yaml"]


@pytest.mark.parametrize("text", ["{", "[]", '{"key": "KEY"}', '{"key": "KEY", "seconds": "1", "problem": 2}'])
def test_damaged_results_are_made_again(tmp_path, fakes, text):
    request, out = tune_request(tmp_path, **SMALL), tmp_path / "out"
    expected = tune(request, LIMITS, out)
    simulations, certificates = len(fakes.simulated), len(fakes.certified)
    best = expected["front"][0]["name"]
    for path in (out / f"candidates/{best}.json", out / f"points/{best}/result.json"):
        path.write_text(text.replace("KEY", json.loads(path.read_text())["key"]))
    assert tune(request, LIMITS, out) == expected
    assert fakes.simulated[simulations:] == fakes.certified[certificates:] == [best]


def test_an_edited_strategy_is_written_again(tmp_path, fakes):
    request, out = tune_request(tmp_path, **SMALL), tmp_path / "out"
    path = out / tune(request, LIMITS, out)["front"][0]["strategy"]
    text = path.read_text()
    path.write_text(text.replace("4 ascend", "5 ascend"))
    assert path.read_text() != text
    tune(request, LIMITS, out)
    assert path.read_text() == text and len(fakes.certified) == 2
