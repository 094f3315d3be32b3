# SPDX-License-Identifier: Apache-2.0
"""Run it: natively on Ascend and GPU, and on CPU by executing the graph MindSpore partitioned for a virtual Ascend."""
