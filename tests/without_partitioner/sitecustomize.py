# SPDX-License-Identifier: Apache-2.0
"""Takes MindSpore's own partitioner away, as versions after 2.11 do. Needs this folder on PYTHONPATH."""

import importlib
import importlib.abc
import sys

TAKEN = {
    "mindspore": ("set_auto_parallel_context", "reset_auto_parallel_context"),
    "mindspore.parallel._auto_parallel_context": ("auto_parallel_context",),
    "mindspore.parallel.nn": ("GradAccumulation", "MicroBatchInterleaved"),
    "mindspore.nn": ("PipelineCell",),
}


class Taking(importlib.abc.MetaPathFinder):
    """Finds nothing itself."""

    def find_spec(self, name, path, target=None):
        if name == "sporeloom.mindspore_compat.names":
            sys.meta_path.remove(self)
            for module, names in TAKEN.items():
                for each in names:
                    delattr(importlib.import_module(module), each)
            primitive = importlib.import_module("mindspore.ops").Primitive
            primitive.shard = property(lambda _: self.used("Primitive.shard"))
        return None

    @staticmethod
    def used(what):
        raise AssertionError(f"{what} belongs to the partitioner")


sys.meta_path.insert(0, Taking())
