# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from sporeloom.inference.cache import CacheFullError, SlotTable, cache_bytes
from sporeloom.models.config import ModelConfig
from sporeloom.models.slots import num_slots_for
from sporeloom.strategy.mesh import Mesh


def test_a_row_is_appended_to_trimmed_and_reset_apart_from_the_others():
    books = SlotTable(num_rows=2, num_kv_heads=1, num_slots=8, mesh=Mesh())
    assert books.append(0, 3).tolist() == [0, 1, 2]
    assert books.append(1, 1).tolist() == [0]
    assert books.append(0, 2).tolist() == [3, 4]
    books.trim(0, 4)
    assert books.append(0, 1).tolist() == [4]
    books.trim(0, 0)
    assert books.lengths.tolist() == [0, 1]


def test_the_last_slot_is_spare():
    books = SlotTable(num_rows=1, num_kv_heads=1, num_slots=8, mesh=Mesh())
    books.append(0, 7)
    with pytest.raises(CacheFullError, match="holds 7 tokens, capacity 7: 1 more do not fit"):
        books.append(0, 1)


def test_indices_count_within_the_part_of_a_device():
    books = SlotTable(num_rows=4, num_kv_heads=4, num_slots=8, mesh=Mesh(dp=2, tp=2))
    indices = books.indices(range(4), np.asarray([[1, 2], [3, 4], [5, 6], [7, 0]]))
    assert indices.shape == (4, 4, 2, 3)
    assert indices[3, 2, 0].tolist() == [1, 0, 7]  # row 3 is the second of its replica, head 2 the first of its rank
    assert indices[..., 0].max() == indices[..., 1].max() == 1
    assert books.indices([1, 3], np.zeros((2, 1), np.int64))[..., 0].tolist() == [[[1]] * 4] * 2


@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 128), (127, 128), (128, 256), (1000, 1024), (1023, 1024), (1024, 1152)]
)
def test_slots_are_a_few_sizes_with_room_for_all_and_one_more(tokens, slots):
    assert num_slots_for(tokens) == slots


def test_bytes_are_those_of_keys_and_values_of_all_layers():
    config = ModelConfig(vocab_size=100, hidden_size=8, num_layers=3, num_heads=2)
    assert cache_bytes(config, num_rows=2, num_slots=64) == 2 * 3 * 2 * 64 * 8 * 4
