# SPDX-License-Identifier: Apache-2.0
"""Shards the graph of one device over a mesh: layouts of all values, and the collectives between them."""
