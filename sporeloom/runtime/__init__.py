# SPDX-License-Identifier: Apache-2.0
"""Runs parallel networks: natively on Ascend and GPU, and on CPU by executing graphs partitioned for several ranks."""
