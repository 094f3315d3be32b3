# SPDX-License-Identifier: Apache-2.0
"""The dense warm-up of sparse attention's indexer: it alone is trained, also where a pipeline stage then trains nothing."""

import json

import numpy as np
import pytest
from conftest import CONFIGS, ROOT, fewer_microbatches, tool
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow

MODEL = {
    "num_layers": 2,
    "experts": None,
    "num_mtp_layers": 0,
    "indexer": {"layers": [0], "top_k": 6, "num_heads": 2, "head_dim": 16},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexer")
    model, first = folder / "model.json", folder / "start"
    model.write_text(json.dumps(MODEL))

    def trained(name, *flags, processes=1):
        data = ("--data", ROOT / "examples" / "small_town.txt", "--output-dir", folder / name)
        sizes = ("--size", "ultra_moe_tiny", "--config", model, "--steps", 2, "--seq-len", 32, "--warmup-steps", 0)
        told = ("--indexer-loss-coefficient", 1, "--optimizer", "adamw", "--adam-epsilon", 1e-5)
        known = ("--tokenizer", first / "checkpoint" / "tokenizer.model") if first.exists() else ()
        outcome = tool("tools/train.py", *data, *sizes, *told, *known, *flags, processes=processes)
        assert outcome.code == 0, outcome.output
        lines = (folder / name / "metrics.jsonl").read_text().strip().split("\n")
        return load_file(folder / name / "checkpoint" / "model.safetensors"), [json.loads(line) for line in lines]

    return trained


def test_the_dense_warmup_changes_the_indexer_alone_on_every_mesh(run, tmp_path):
    start, _ = run("start", "--learning-rate", 0, "--min-learning-rate", 0)
    alone, metrics = run("alone", "--indexer-dense-warmup")
    strategy = ("--strategy", fewer_microbatches(CONFIGS / "pangu_tiny_pp2.yaml", tmp_path))
    staged, of_stages = run("staged", "--indexer-dense-warmup", *strategy, processes=2)
    for name, value in alone.items():
        assert np.array_equal(value, start[name]) != (".attention.indexer." in name), name
        np.testing.assert_allclose(staged[name], value, rtol=0, atol=1e-5, err_msg=name)
    for one, other in zip(metrics, of_stages, strict=True):
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-5)
        np.testing.assert_allclose(other["indexer_loss"], one["indexer_loss"], rtol=1e-5, atol=1e-8)
    assert metrics[-1]["indexer_loss"] < metrics[0]["indexer_loss"]
