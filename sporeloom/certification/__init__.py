# SPDX-License-Identifier: Apache-2.0
"""Prove a strategy before a cluster is booked."""
