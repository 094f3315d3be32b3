# SPDX-License-Identifier: Apache-2.0
"""Input of a search for strategies: everything on which its result depends, apart from its limits."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from sporeloom.core.json_text import json_text
from sporeloom.core.shipped import FOLDER, RULES, shipped_names
from sporeloom.models.config import AttentionKernel, ComputeDtype, ModelConfig
from sporeloom.planner.cluster import Cluster, Overlap
from sporeloom.planner.dimensions import Dimensions, of_decoder
from sporeloom.planner.search import PlanRequest
from sporeloom.simulation.faults import FaultRates
from sporeloom.strategy.certificate import about_versions

if TYPE_CHECKING:
    from sporeloom.strategy_search.candidates import Candidate


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


class SearchRequest(ABC):
    """A search: model, cluster, job and faults."""

    cluster_file: Path
    """File or name of the cluster, for certificates."""
    faults: FaultModel | None

    @property
    @abstractmethod
    def cluster(self) -> Cluster: ...

    @property
    @abstractmethod
    def devices(self) -> int: ...

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Sequences, or rows, of a step over all devices."""

    @property
    @abstractmethod
    def seq_len(self) -> int:
        """Tokens of a sequence; 1 of a row."""

    @abstractmethod
    def about_model(self) -> dict[str, Any]:
        """The model as data."""

    @abstractmethod
    def text(self, candidate: Candidate, head: Sequence[str] = ()) -> str:
        """The strategy file of a candidate. `head`: comments at its top."""

    def about(self) -> dict[str, Any]:
        """All inputs as data."""
        cluster, faults = self.cluster, self.faults
        return {
            "model": self.about_model(),
            "cluster": dataclasses.asdict(cluster),
            "job": {"devices": self.devices, "batch_size": self.batch_size, "seq_len": self.seq_len},
            "faults": faults and dict(faults.about),
            "fitted": {
                "chip": dataclasses.asdict(cluster.fitted),
                "experts": dataclasses.asdict(cluster.fitted_experts),
                "overlap": dataclasses.asdict(Overlap.fitted()),
            },
            "versions": {**about_versions(), "rules": _rules_hash()},
        }

    def key(self, candidate: Candidate) -> str:
        """Hash of all on which the evaluation of a candidate depends."""
        inputs = {name: value for name, value in self.about().items() if name != "faults"}
        values = {**inputs, "strategy": self.text(candidate), "accumulate": candidate.accumulate}
        return hashlib.sha256(json_text(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class TuneRequest(SearchRequest):
    """A search for a model of a family."""

    plan: PlanRequest
    model: TunedModel
    cluster_file: Path
    faults: FaultModel | None = None

    @property
    def cluster(self) -> Cluster:
        return self.plan.cluster

    @property
    def devices(self) -> int:
        return self.plan.devices

    @property
    def batch_size(self) -> int:
        return self.plan.global_batch_size

    @property
    def seq_len(self) -> int:
        return self.plan.dims.seq_len

    @property
    def dims(self) -> Dimensions:
        """Dimensions of the model for closed forms."""
        return of_decoder(self.model.values, self.seq_len, has_drops=True)

    def about_model(self) -> dict[str, Any]:
        return {"family": self.model.family, "size": self.model.size, **self.model.values.to_dict()}

    def text(self, candidate: Candidate, head: Sequence[str] = ()) -> str:
        return candidate.text(self.model.values, head)


@dataclass(frozen=True)
class NetworkJob:
    """The job of a custom network."""

    cluster: Cluster
    devices: int
    inputs: Sequence[NDArray[Any]]
    """A batch; dim 0 of the first one is the rows."""
    file: Path
    name: str
    """Name of the class or function in the file, called without arguments."""


@dataclass(frozen=True)
class NetworkRequest(SearchRequest):
    """A search for a custom network, which returns its loss."""

    network: Any
    """A `networks.Network`; that module loads MindSpore."""
    job: NetworkJob
    cluster_file: Path
    faults: FaultModel | None = None

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    @property
    def devices(self) -> int:
        return self.job.devices

    @property
    def batch_size(self) -> int:
        return self.network.rows

    @property
    def seq_len(self) -> int:
        return 1

    def about_model(self) -> dict[str, Any]:
        source = hashlib.sha256(self.job.file.read_bytes()).hexdigest()
        return {"network": f"{self.job.file.name}:{self.job.name}", "source": source, **self.network.about}

    def text(self, candidate: Candidate, head: Sequence[str] = ()) -> str:
        return self.network.text(candidate, head)


def _rules_hash() -> str:
    """Hash of the rules that strategy files name."""
    texts = {name: (FOLDER / RULES / f"{name}.yaml").read_text(encoding="utf-8") for name in shipped_names(RULES)}
    return hashlib.sha256(json_text(texts, sort_keys=True).encode()).hexdigest()
