# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API, on top of chat requests."""
