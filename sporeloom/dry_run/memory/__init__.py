# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank over a step, from the lifetimes of the values in its graphs."""
