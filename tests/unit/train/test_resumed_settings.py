# SPDX-License-Identifier: Apache-2.0
"""Settings of a resumed run are compared with those of its checkpoint."""

from sporeloom.train.state import differences


def test_settings_that_only_the_checkpoint_has_are_told_where_wanted():
    saved, mine = {"seed": 1, "chat_template_kwargs": {"thinking": True}}, {"seed": 2}
    assert list(differences(saved, mine, both_ways=False)) == ["seed was 1, is 2"]
    assert list(differences(saved, mine, both_ways=True)) == [
        "seed was 1, is 2",
        "chat_template_kwargs was {'thinking': True}, is None",
    ]


def test_what_earlier_releases_do_not_name_has_its_default():
    assert not list(differences({}, {"packing": "stream", "max_resamples": 0}, both_ways=True))
    assert list(differences({}, {"packing": "best-fit"}, both_ways=True)) == ["packing was stream, is best-fit"]


def test_the_kernel_of_attention_may_be_another():
    assert not list(differences({"attention": "flash"}, {"attention": "plain"}, both_ways=False))
