# SPDX-License-Identifier: Apache-2.0
"""Use a trained model: score texts and continue them."""
