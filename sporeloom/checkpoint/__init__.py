# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: our folders, and the names other code gave the same weights."""
