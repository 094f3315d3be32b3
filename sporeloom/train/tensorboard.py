# SPDX-License-Identifier: Apache-2.0
"""Scalars for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping

import mindspore as ms  # noqa: F401  before TensorBoard: it chooses the implementation of protobuf for the process
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from sporeloom.train.trackers import TrackedRun, Tracker

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Event files in a folder that is named as the run: TensorBoard shows it by that name."""

    def __init__(self, run: TrackedRun):
        self._events = EventFileWriter(str(run.folder / FOLDER / run.name))
        if run.steps_done:  # what was recorded of later steps is hidden
            start = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(wall_time=time.time(), step=run.steps_done + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def finish(self, has_failed: bool) -> None:
        self._events.close()
