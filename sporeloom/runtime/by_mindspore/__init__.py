# SPDX-License-Identifier: Apache-2.0
"""`engine: mindspore`: MindSpore shards graphs on devices, which its versions after 2.11 do not; then this can go."""
