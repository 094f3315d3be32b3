# SPDX-License-Identifier: Apache-2.0
"""Training tasks: a network with its loss, its batches, and the metrics of a step. The training loop is the same
for all."""
