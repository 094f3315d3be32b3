# SPDX-License-Identifier: Apache-2.0
"""Runs graphs that `sporeloom.partition` shards: compiles them once for one device, and schedules their passes."""
