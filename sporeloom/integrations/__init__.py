# SPDX-License-Identifier: Apache-2.0
"""Adapters for other projects' interfaces. Nothing else imports them."""
