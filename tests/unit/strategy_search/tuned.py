# SPDX-License-Identifier: Apache-2.0
"""Requests of searches on small clusters, and stand-ins for partitioning and proving."""

import json
from pathlib import Path

from sporeloom.cli.tune import TuneConfig, check
from sporeloom.strategy.certificate import write_certificate
from sporeloom.strategy_search import simulated, subjects
from sporeloom.strategy_search.run import Limits

LIMITS = Limits(meshes=40, simulate=6, certify=2, processes=4)
SMALL = {"size": "tiny", "devices": 4, "batch": 8}

CLUSTER = {
    "chip": "ascend910b",
    "peak_tflops": 100,
    "memory_gb": 64,
    "memory_gb_per_s": 1000,
    "devices_per_node": 4,
    "intra_node_gb_per_s": 100,
    "inter_node_gb_per_s": 25,
    "reserved_gb": 0.1,
}


def tune_config(folder: Path, devices=8, batch=16, model=None, cluster=None, **flags) -> TuneConfig:
    """The flags of a search on a cluster file, whose fields are those of CLUSTER and `cluster`. `model`: a folder."""
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({**CLUSTER, **(cluster or {})}))
    given = {"model": model or "pangu", "size": "2.6b", "out": folder / "tuned", **flags}
    return TuneConfig(cluster=path, devices=devices, global_batch_size=batch, **given)


def tune_request(folder: Path, **flags):
    """The request of `tune_config`."""
    return check(tune_config(folder, **flags))


class Fakes:
    """Stands for partitioning and proving: the closed form is the simulation, and some certificates are refused."""

    def __init__(self, monkeypatch):
        self.simulated, self.certified = [], []
        self.wrong, self.too_large, self.lost, self.killed_after = set(), set(), set(), None
        monkeypatch.setattr(simulated, "simulate", self.simulate)
        monkeypatch.setattr(subjects, "certify_decoder", self.certify)

    def simulate(self, request, candidate, path):
        if self.killed_after == len(self.simulated):
            raise KeyboardInterrupt
        self.simulated.append(candidate.name)
        number = sum(map(ord, candidate.name))
        problem = "does not fit: rank 0" if candidate.name in self.too_large else ""
        return {"seconds": 1 + number % 97 / 100, "peak_bytes": 1000 + number % 89, "problem": problem}

    def certify(self, certification):
        out = certification.config.out
        self.certified.append(out.name)
        failure = "loss of step 1 differs" if out.name in self.wrong else ""
        failure = "did not end within 1200 s" if out.name in self.lost else failure
        reasons = [f"dp 2: {failure}"] if failure else []
        values = {
            "verdict": "refused" if reasons else "certified",
            "reasons": reasons,
            "checks": {"strategy": [], "proof": reasons},
            "proof": {
                "meshes": [
                    {"mesh": "dp 2", "failure": failure, "differences": {} if out.name in self.lost else {"losses": 1}}
                ]
            },
            "covers": subjects.covered_by(certification),
        }
        write_certificate(out / "certificate.json", values)
        (out / "certificate.html").write_text("page")
        (out / "logs").mkdir()
        return values


def files(out):
    """Contents of all files of a search."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
