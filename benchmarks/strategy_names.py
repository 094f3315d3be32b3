# SPDX-License-Identifier: Apache-2.0
"""The model that the name of a built-in strategy begins with."""

import re


def family_and_size(name):
    """`pangu_13b_tp8` is for the size 13b of pangu."""
    return re.fullmatch(r"([a-z]+)_(.+?)_(?:dp|tp|pp|cp|ep)\d+(?:_.*)?", name).groups()
