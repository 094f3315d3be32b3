# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: checkpoint folders, and conversion between naming schemes."""
