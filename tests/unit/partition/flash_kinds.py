# SPDX-License-Identifier: Apache-2.0
"""As `kinds`: FlashAttention, forward and backward."""

import numpy as np


def attended(q, k, v, mask, scale):
    """Probabilities (B, KV, H/KV, T, S) of attention, and the maximum and sum of each row that they are made of."""
    groups = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])
    scores = np.where(mask[:, :, None] != 0, -1e9, np.einsum("bkgtd,bksd->bkgts", groups, k) * scale)
    most = scores.max(-1, keepdims=True)
    powers = np.exp(scores - most)
    return powers / powers.sum(-1, keepdims=True), most, powers.sum(-1, keepdims=True)


def attention(q, k, v, *more):
    mask, heads, scale = more[3], more[7], more[9]
    assert heads == q.shape[1]
    probs, *rows = attended(q, k, v, mask, scale)
    rows = (np.broadcast_to(row.reshape(*q.shape[:3], 1), (*q.shape[:3], 8)) for row in rows)
    return *rows, np.zeros(1), np.einsum("bkgts,bksd->bkgtd", probs, v).reshape(q.shape)


def gradient(q, k, v, dy, *more):
    mask, heads, scale = more[3], more[11], more[13]
    assert heads == q.shape[1]
    probs, *_ = attended(q, k, v, mask, scale)
    queries, dy = (x.reshape(len(x), k.shape[1], -1, *x.shape[2:]) for x in (q, dy))
    dprobs = np.einsum("bkgtd,bksd->bkgts", dy, v)
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) * scale
    dq = np.einsum("bkgts,bksd->bkgtd", dscores, k).reshape(q.shape)
    return (
        dq,
        np.einsum("bkgts,bkgtd->bksd", dscores, queries),
        np.einsum("bkgts,bkgtd->bksd", probs, dy),
        np.zeros(0),
    )


SETTINGS = (2**31 - 1, 2**31 - 1, 0, 1, 0)
"""No window before or after, inner precision, input layout BNSD, a full mask."""


def sample(d):
    """Queries, keys and values of heads that they share in groups, a mask, and the kernel's constants."""
    rows, heads, positions, keys, width = d.size(), d.size(), d.size(), d.size(), 2
    q = d.of(rows, heads * int(d.random.integers(1, 3)), positions, width)
    k, v = d.of(rows, heads, keys, width), d.of(rows, heads, keys, width)
    mask = (d.random.random((rows if d.flag() else 1, 1, positions, keys)) < 0.3).astype(np.uint8)
    return [q, k, v, None, None, None, mask, None, None, None, q.shape[1], 1.0, 0.5, *SETTINGS]


def sample_gradient(d):
    q, k, v, *none, mask, _, _, _, heads, keep, scale = sample(d)[:13]
    rows = [d.of(*q.shape[:3], 8), d.of(*q.shape[:3], 8), d.of(1), d.of(*q.shape)]
    return [q, k, v, d.of(*q.shape), *none, mask, *rows, None, None, None, heads, keep, scale, *SETTINGS]
