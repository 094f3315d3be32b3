# SPDX-License-Identifier: Apache-2.0
"""CPU processes without devices: MindSpore partitions graphs for a virtual Ascend, and its CPU kernels execute them."""
