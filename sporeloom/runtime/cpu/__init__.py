# SPDX-License-Identifier: Apache-2.0
"""Several processes of a machine without devices: MindSpore partitions for a virtual Ascend, its CPU kernels compute."""
