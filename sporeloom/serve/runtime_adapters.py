# SPDX-License-Identifier: Apache-2.0
"""Adapters that clients load and unload while the server runs: vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from functools import partial
from pathlib import Path

from sporeloom.checkpoint.adapters import Adapter, ranks_of_several
from sporeloom.core.errors import ConfigError
from sporeloom.core.log import milestone
from sporeloom.inference.formats import chat_format
from sporeloom.serve.adapter_slots import BUSY, AdapterLoad
from sporeloom.serve.config import ServedModel, ServeJob
from sporeloom.serve.constraint import vocabulary
from sporeloom.serve.fields import Fields, RequestError, shown
from sporeloom.serve.lora_modules import OtherBaseError, read_module
from sporeloom.serve.service import Service
from sporeloom.serve.work import Workers

MAX_NAME = 256


class RuntimeAdapters:
    """The models of a server: those that it was started with, and adapters that were loaded since.

    Its methods are called on the event loop of the server.
    """

    def __init__(self, service: Service):
        self._service, self._job = service, service.job
        self._loaded: dict[str, ServedModel] = {}
        self._numbers = itertools.count(len(service.job.models))
        self._changing = asyncio.Lock()
        self._reading = Workers(1, 16)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All models that can be named now."""
        return (*self._job.models, *self._loaded.values())

    async def load(self, fields: Fields) -> str:
        """Load the adapters of a folder under a name. Returns what to answer.

        Raises:
            RequestError: they cannot be loaded; nothing has changed.
        """
        root = self._root()
        name, path = _required(fields, "lora_name"), _required(fields, "lora_path")
        fields.refuse("load_inplace", "unload the adapter, then load the new one", False)
        if len(name) > MAX_NAME or not name.isprintable():
            raise RequestError(400, f"lora_name: up to {MAX_NAME} printable characters", "lora_name")
        async with self._changing:
            if name in {model.name for model in self.models}:
                raise RequestError(400, f"lora_name: there is a model {shown(name)} already; unload it", "lora_name")
            if len(self._loaded) >= self._job.num_reserved:
                raise RequestError(
                    400,
                    f"{len(self._loaded)} adapters are loaded, as many as --max-loras allows; unload one of "
                    f"{', '.join(map(shown, self._loaded))}",
                    "lora_name",
                )
            folder = _inside(root, path)
            model, adapter = await self._reading.run(self._read, name, path, folder)
            await self._put(model, adapter)
            self._loaded[name] = model
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, fields: Fields) -> str:
        """Remove adapters: requests that have begun keep them. Returns what to answer.

        Raises:
            RequestError: none of this name was loaded at runtime.
        """
        self._root()
        name = _required(fields, "lora_name")
        async with self._changing:
            if name in {model.name for model in self._job.models}:
                raise RequestError(
                    400, f"lora_name: the server was started with {shown(name)}, which stays", "lora_name"
                )
            if name not in self._loaded:
                known = ", ".join(map(shown, self._loaded)) or "none"
                raise RequestError(404, f"lora_name: no adapter {shown(name)} is loaded; loaded: {known}", "lora_name")
            self._service.unload_adapter(self._loaded.pop(name).adapter)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _root(self) -> Path:
        """Raises:
        RequestError: the server's user allows no such change.
        """
        root = self._job.config.runtime_lora_folder
        if root is None:
            raise RequestError(
                404, "this server loads no adapters while it runs; --runtime-lora-folder FOLDER allows those in FOLDER"
            )
        if self._service.state != "ready":
            said = self._service.failure or self._service.progress or "the server is stopping"
            raise RequestError(503, said, headers={"Retry-After": "1"})
        return root.resolve()

    def _read(self, name: str, path: str, folder: Path) -> tuple[ServedModel, Adapter]:
        """Read and check adapters, in a thread: it takes a while.

        Raises:
            RequestError: they cannot be served here.
        """
        job, base = self._job, self._job.models[0]
        try:
            tokenizer, stop_ids, adapter = read_module(
                "lora_path", folder, job.config.checkpoint, job.family, job.model, lambda: base.tokenizer
            )
            form = chat_format(tokenizer, job.config.tool_call_parser, job.config.reasoning_parser)
        except OtherBaseError as error:
            milestone(str(error))
            raise RequestError(400, "lora_path: adapters of another model than this server's", "lora_path") from None
        except ConfigError as error:
            said = "; ".join(error.problems[:3]).replace(str(folder), path)
            raise RequestError(
                400, said if said.startswith("lora_path") else f"lora_path: {said}", "lora_path"
            ) from None
        _check_ranks(job, adapter)
        vocabulary(tokenizer, stop_ids)  # takes a second, in which the first structured answer would wait
        return ServedModel(name, tokenizer, stop_ids, next(self._numbers), form), adapter

    async def _put(self, model: ServedModel, adapter: Adapter) -> None:
        """Let the service load adapters, and wait for it.

        Raises:
            RequestError: no slot is free, or the server stops.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        notify = partial(_resolve, loop, done)
        self._service.load_adapter(AdapterLoad(model.adapter, adapter, model.tokenizer.vocab_size, notify))
        reason = await done
        if reason == BUSY:
            raise RequestError(
                409,
                "requests still run with the adapters that were unloaded last; try again when they are done",
                headers={"Retry-After": "1"},
            )
        if reason:
            raise RequestError(503, reason)


def _resolve(loop: asyncio.AbstractEventLoop, done: asyncio.Future[str | None], reason: str | None) -> None:
    def put() -> None:
        if not done.done():
            done.set_result(reason)

    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
        loop.call_soon_threadsafe(put)


def _required(fields: Fields, name: str) -> str:
    value: str | None = fields.take(name, str)
    if not value:
        raise RequestError(400, f"{name} is missing", name)
    return value


def _inside(root: Path, path: str) -> Path:
    """The folder that a path in `root` names.

    Raises:
        RequestError: it is not in `root`, or not there.
    """
    try:
        folder = (root / path).resolve()
        is_inside, is_folder = folder.is_relative_to(root) and folder != root, folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # a null character, a name that is too long, links in a circle
        raise RequestError(400, f"lora_path: {shown(path)} is not a path", "lora_path") from None
    if not is_inside:
        raise RequestError(400, f"lora_path: {shown(path)} is not in the folder of --runtime-lora-folder", "lora_path")
    if not is_folder:
        raise RequestError(404, f"lora_path: there is no folder {shown(path)}", "lora_path")
    return folder


def _check_ranks(job: ServeJob, adapter: Adapter) -> None:
    """Raises:
    RequestError: no memory is reserved for so large a rank.
    """
    ranks = {path: widths[0] for path, widths in ranks_of_several([adapter]).items()}
    path = max(ranks, key=lambda each: ranks[each])
    if ranks[path] > job.max_lora_rank:
        raise RequestError(
            400,
            f"lora_path: {path} has rank {ranks[path]}; --max-lora-rank of this server is {job.max_lora_rank}",
            "lora_path",
        )
