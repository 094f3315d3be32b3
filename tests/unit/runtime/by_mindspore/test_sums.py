# SPDX-License-Identifier: Apache-2.0
"""What our code exchanges in MindSpore for a compilation is put back after it."""

import sys

from mindspore import ops

from sporeloom.runtime.by_mindspore.sums import add_by_add_n, add_by_pairs


def sums():
    """Every AddN that MindSpore's modules hold."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("mindspore.")]
    return {(m.__name__, name): v for m in modules for name, v in vars(m).items() if isinstance(v, ops.AddN)}


def test_mindspore_adds_up_by_its_own_operator_again():
    add_by_add_n()
    before = sums()
    assert before
    for pipeline in (False, True):
        add_by_pairs(pipeline)
        assert not sums()
        add_by_add_n()
        after = sums()
        assert after.keys() == before.keys()
        assert all(after[place] is value for place, value in before.items())
