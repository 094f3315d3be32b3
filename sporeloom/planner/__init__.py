# SPDX-License-Identifier: Apache-2.0
"""What a training step would cost, from numbers alone: memory, time, and the strategy that costs least. No MindSpore."""
