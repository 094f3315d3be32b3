# SPDX-License-Identifier: Apache-2.0
"""Apply a Strategy to any Cell. `parallelize` is the one entry point; nothing here runs a graph."""
