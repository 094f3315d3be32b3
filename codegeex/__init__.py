# SPDX-License-Identifier: Apache-2.0
"""CodeGeeX: configuration, model, published weight names, tokenizer."""
