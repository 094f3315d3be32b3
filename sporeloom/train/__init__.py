# SPDX-License-Identifier: Apache-2.0
"""Train a model: optimizer, learning rate schedule, training loop, metrics and checkpoints."""
