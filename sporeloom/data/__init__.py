# SPDX-License-Identifier: Apache-2.0
"""From text to the exact batch."""
