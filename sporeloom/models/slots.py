# SPDX-License-Identifier: Apache-2.0
"""How long rows of a KV cache are."""

SLOTS_MULTIPLE = 128


def num_slots_for(num_tokens: int) -> int:
    """Slots of a row that is to hold up to `num_tokens`: a multiple of 128 with one to spare, so that sizes repeat."""
    return (num_tokens // SLOTS_MULTIPLE + 1) * SLOTS_MULTIPLE
