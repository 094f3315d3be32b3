# SPDX-License-Identifier: Apache-2.0
"""What a run trains: a network with its loss, its batches, what to tell of a step. The loop is the same for all."""
