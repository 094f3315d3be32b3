# SPDX-License-Identifier: Apache-2.0
"""Say it: the strategy file, its checks and its arithmetic. Pure Python; importing it loads no MindSpore."""
