# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning without the networks: advantages, weights, divergences; rewards from functions."""
