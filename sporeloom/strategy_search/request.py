# SPDX-License-Identifier: Apache-2.0
"""Input of a search for strategies: everything on which its result depends, apart from its limits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.json_text import json_text
from sporeloom.core.shipped import FOLDER, RULES, shipped_names
from sporeloom.models.config import AttentionKernel, ComputeDtype, ModelConfig
from sporeloom.planner.cluster import Overlap
from sporeloom.planner.dimensions import Dimensions, of_decoder
from sporeloom.planner.search import PlanRequest
from sporeloom.simulation.faults import FaultRates
from sporeloom.strategy.certificate import about_versions


@dataclass(frozen=True)
class TunedModel:
    """The model, by the flags that dry runs and certificates take, and as they compile it."""

    family: str
    size: str
    config: Path | None
    compute_dtype: ComputeDtype
    attention: AttentionKernel | None
    values: ModelConfig


@dataclass(frozen=True, kw_only=True)
class FaultModel:
    """Faults of the job whose goodput is an objective, and its recovery."""

    rates: FaultRates
    about: Mapping[str, Any]
    """The same as data."""
    steps: int
    checkpoint_pause_s: float
    restart_s: float
    repair_s: float


@dataclass(frozen=True)
class TuneRequest:
    """A search: model, cluster, job and faults."""

    plan: PlanRequest
    model: TunedModel
    cluster_file: Path
    """File or name of the cluster, for certificates."""
    faults: FaultModel | None = None

    @property
    def batch_size(self) -> int:
        """Sequences of a step over all devices."""
        return self.plan.global_batch_size

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.plan.dims.seq_len

    @property
    def dims(self) -> Dimensions:
        """Dimensions of the model for closed forms."""
        return of_decoder(self.model.values, self.seq_len, has_drops=True)

    def about(self) -> dict[str, Any]:
        """All inputs as data."""
        plan, model, faults = self.plan, self.model, self.faults
        return {
            "model": {"family": model.family, "size": model.size, **model.values.to_dict()},
            "cluster": dataclasses.asdict(plan.cluster),
            "job": {"devices": plan.devices, "batch_size": self.batch_size, "seq_len": self.seq_len},
            "faults": faults and dict(faults.about),
            "fitted": {
                "chip": dataclasses.asdict(plan.cluster.fitted),
                "experts": dataclasses.asdict(plan.cluster.fitted_experts),
                "overlap": dataclasses.asdict(Overlap.fitted()),
            },
            "versions": {**about_versions(), "rules": _rules_hash()},
        }

    def key(self, strategy_text: str, accumulate: int) -> str:
        """Hash of all on which the evaluation of a strategy depends."""
        inputs = {name: value for name, value in self.about().items() if name != "faults"}
        text = json_text({**inputs, "strategy": strategy_text, "accumulate": accumulate}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _rules_hash() -> str:
    """Hash of the rules that strategy files name."""
    texts = {name: (FOLDER / RULES / f"{name}.yaml").read_text(encoding="utf-8") for name in shipped_names(RULES)}
    return hashlib.sha256(json_text(texts, sort_keys=True).encode()).hexdigest()
