# SPDX-License-Identifier: Apache-2.0
"""A server's application over a model that answers each text with one token, at once."""

from pathlib import Path
from types import SimpleNamespace

from sporeloom.inference.requests import NewToken
from sporeloom.serve.config import ServeConfig, ServedModel, ServeJob
from sporeloom.strategy.config import SINGLE_DEVICE

TOKENIZER = SimpleNamespace(
    **{
        "vocab_size": 256,
        "eod_id": 0,
        "prefix": (),
        "chat": None,
        "infill": None,
        "template": None,
        "encode": lambda text: list(text.encode()),
        "token_name": lambda token: None,
    },
    **{"decode": lambda ids: bytes(ids).decode("utf-8", "replace"), "token_bytes": lambda token: bytes([token])},
)
JSON = {"Content-Type": "application/json"}
BODY = {"prompt": "a", "max_tokens": 1}


class Service:
    """Tells one token of every text."""

    state, failure, progress, num_waiting = "ready", "", "", 0
    load = SimpleNamespace(running=0, used_slots=0.0, reused_tokens=0, drafts=0, drafted=0, accepted=0)

    def __init__(self, **flags):
        config = ServeConfig(checkpoint=Path("town"), port=0, **flags)
        models = tuple(ServedModel(name, TOKENIZER, (0,), place) for place, name in enumerate(("town", "org/helper")))
        self.job = ServeJob(config, "pangu", SimpleNamespace(seq_len=64), SINGLE_DEVICE, models)

    def submit(self, wanted, notify):
        notify(NewToken(0, 98, -1.0, 0.01, "length"))
        return 0

    def cancel(self, ticket):
        pass
