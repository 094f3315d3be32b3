# SPDX-License-Identifier: Apache-2.0
"""CPU processes: transport between them, and CPU kernels for what MindSpore has only on devices."""
