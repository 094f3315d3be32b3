# SPDX-License-Identifier: Apache-2.0
"""Partition graphs of full-size models without devices, and report what ranks hold, send and compute."""
