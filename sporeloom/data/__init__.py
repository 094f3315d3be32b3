# SPDX-License-Identifier: Apache-2.0
"""Data: from text files to the batch of a step."""
