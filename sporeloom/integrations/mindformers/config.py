# SPDX-License-Identifier: Apache-2.0
"""A family's ModelConfig with MindFormers' interface."""

from __future__ import annotations

import dataclasses
from typing import Any

from sporeloom.core.document import Document
from sporeloom.core.reader import fields_from
from sporeloom.integrations.mindformers.library import mindformers
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import size_config

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


class FamilyConfig(mindformers.PretrainedConfig):
    """A ModelConfig with MindFormers' interface; its fields are attributes."""

    family = ""

    def __init__(self, **values: Any):
        values.pop("family", None)
        mine = {name: values.pop(name) for name in FIELDS if name in values}
        config = fields_from(ModelConfig, Document("config.json", mine), size_config(self.family, "tiny"))
        for name in FIELDS:
            setattr(self, name, getattr(config, name))
        self.seq_length = config.seq_len
        super().__init__(**{"eos_token_id": config.eod_id, **values})

    def decoder_config(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in FIELDS})


class PanGuConfig(FamilyConfig):
    model_type, family = "pangu", "pangu"


class CodeGeeXConfig(FamilyConfig):
    model_type, family = "codegeex", "codegeex"


class PaLMConfig(FamilyConfig):
    model_type, family = "palm", "palm"
