# SPDX-License-Identifier: Apache-2.0
"""SPMD partitioner: shards a single-device graph over a mesh, with a layout for each value and collectives between them."""
