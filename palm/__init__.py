# SPDX-License-Identifier: Apache-2.0
"""PaLM: configuration, network, weights, tokenizer."""
