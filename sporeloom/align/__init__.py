# SPDX-License-Identifier: Apache-2.0
"""What learning from rewards needs besides networks: advantages, weights, divergences; rewards from functions."""
