# SPDX-License-Identifier: Apache-2.0
"""Predict the cost of a training step from numbers alone: memory, time, and the fastest strategy. No MindSpore."""
