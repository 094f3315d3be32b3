# SPDX-License-Identifier: Apache-2.0
"""Measure this machine and write what the planner reads of a cluster."""
