# SPDX-License-Identifier: Apache-2.0
"""Simulation of long training jobs whose devices fail."""
