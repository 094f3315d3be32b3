# SPDX-License-Identifier: Apache-2.0
"""Certificates: prove scaled-down strategies against one device, partition the full size, estimate time and memory."""
