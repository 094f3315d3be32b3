# SPDX-License-Identifier: Apache-2.0
"""Do it: apply a Strategy to any Cell. `parallelize` is the one entrance; nothing here runs a graph."""
