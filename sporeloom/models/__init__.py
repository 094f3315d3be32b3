# SPDX-License-Identifier: Apache-2.0
"""What a model is: its configuration, its parameters, what its weights are called elsewhere. No MindSpore here."""
