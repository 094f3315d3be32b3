# SPDX-License-Identifier: Apache-2.0
"""PanGu-alpha: configuration, model, published weight names, tokenizer."""
