# SPDX-License-Identifier: Apache-2.0
"""Length of the rows of a KV cache."""

SLOTS_MULTIPLE = 128


def num_slots_for(num_tokens: int) -> int:
    """Number of slots of a row for up to `num_tokens`: a multiple of 128 with one to spare, so that sizes repeat."""
    return (num_tokens // SLOTS_MULTIPLE + 1) * SLOTS_MULTIPLE
