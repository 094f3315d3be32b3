# SPDX-License-Identifier: Apache-2.0
"""The graph of a deep network, from compilations of the same network with fewer layers."""
