# SPDX-License-Identifier: Apache-2.0
from sporeloom.train.loss_scale import LossScale


def test_a_scale_is_halved_until_there_is_no_smaller_one():
    scale = LossScale(4.0, window=0)
    assert [(scale.follow(False), scale.value) for _ in range(3)] == [(True, 2.0), (True, 1.0), (False, 1.0)]


def test_so_many_steps_in_a_row_are_skipped_without_a_smaller_scale():
    scale = LossScale(2.0, window=0, max_skipped=2)
    assert [scale.follow(fine) for fine in (False, False, False, True, False, False, False)] == [
        *(True, True, True),  # the first lowers the scale
        True,
        *(True, True, False),
    ]


def test_a_restored_one_goes_on_counting():
    scale, other = LossScale(1.0, max_skipped=2), LossScale(1.0, max_skipped=2)
    assert scale.follow(False) and scale.follow(False)
    other.restore(scale.state())
    assert not other.follow(False)


def test_what_layers_count_stays_finite_however_far_the_scale_rises():
    scale = LossScale(2.0**62, window=1)
    assert [scale.follow(True) and scale.value for _ in range(4)] == [2.0**63, 2.0**64, 2.0**64, 2.0**64]
