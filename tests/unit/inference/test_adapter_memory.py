# SPDX-License-Identifier: Apache-2.0
"""Adapters in memory: what ranks write of one that is loaded later is what they would have read at the start."""

from types import SimpleNamespace

import numpy as np
import pytest

from sporeloom.checkpoint.adapters import Adapter, empty_adapter, put_side_by_side, ranks_of_several
from sporeloom.inference.adapter_memory import AdapterMemory
from sporeloom.models.adapters import LORA_MASK, LoRAConfig
from sporeloom.models.family import size_config
from sporeloom.strategy.tensor_slice import TensorSlice

MODEL = size_config("pangu", "tiny")


def drawn(lora, seed):
    draw = np.random.default_rng(seed)
    return Adapter(lora, {n: draw.normal(0, 1, s).astype(np.float32) for n, s in lora.shapes(MODEL).items()})


FIXED = drawn(LoRAConfig(r=3, target_modules=("attention.query", "mlp.up")), 0)
FIRST = drawn(LoRAConfig(r=4, target_modules=("*",), lora_alpha=24.0), 1)
SECOND = drawn(LoRAConfig(r=2, target_modules=("mlp.up", "mlp.down"), use_rslora=True), 2)


@pytest.mark.parametrize(("dim", "count"), [(0, 1), (0, 2), (1, 4)])
def test_a_slot_holds_the_last_adapter_written_on_every_rank_its_part(dim, count):
    start = (FIXED, empty_adapter(MODEL, 4), empty_adapter(MODEL, 4))
    found, widths = put_side_by_side(start), ranks_of_several(start)
    shapes = {name: value.shape for name, value in found.items()}
    net = SimpleNamespace(parallel_report=SimpleNamespace(of=lambda name: SimpleNamespace(global_shape=shapes[name])))
    for rank in range(count):
        parts = {name: held(shape, dim, rank, count) for name, shape in shapes.items()}
        local = {name: found[name][part.slices].copy() for name, part in parts.items()}
        parameters = [SimpleNamespace(name=name, asnumpy=lambda value=value: value) for name, value in local.items()]
        net.get_parameters = lambda parameters=parameters: parameters
        sent = []
        engine = SimpleNamespace(
            target="CPU",
            held_slice=lambda name, shape, parts=parts: parts[name],
            broadcast=lambda value, source, sent=sent: sent.append(value) or value,
        )
        memory = AdapterMemory(engine, net, widths)
        for slot, adapter in ((2, SECOND), (3, SECOND), (2, FIRST)):
            ranks = {path: widths[0] for path, widths in ranks_of_several([adapter]).items()}
            memory.write(slot, ranks, adapter, 0)
        expected = put_side_by_side((FIXED, FIRST, SECOND))
        for name, value in local.items():
            if not name.endswith(LORA_MASK):
                np.testing.assert_array_equal(value, padded_to(expected, name, shapes)[parts[name].slices], name)
        assert sent


def held(shape, dim, rank, count):
    """The part of a rank; of what does not divide, all."""
    if shape[dim] % count:
        return TensorSlice.full(shape)
    counts = [count if each == dim else 1 for each in range(len(shape))]
    return TensorSlice.shard(shape, [rank if each == dim else 0 for each in range(len(shape))], counts)


def padded_to(expected, name, shapes):
    """What adapters of exact ranks are in slots of rank 4: followed by zeros."""
    value = expected.get(name)
    result = np.zeros(shapes[name], np.float32)
    if value is None:
        return result
    result[tuple(slice(length) for length in value.shape)] = value
    return result
