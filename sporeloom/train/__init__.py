# SPDX-License-Identifier: Apache-2.0
"""Train a model: optimizer, schedule, loop, what is written on the way."""
