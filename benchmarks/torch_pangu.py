# SPDX-License-Identifier: Apache-2.0
"""PanGu-alpha in plain PyTorch, written as one would today: the peer of benchmarks/train_step.py."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask, query=None):
        a = self.norm1(x)
        q, k, v = (
            linear(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, source in ((self.query, a if query is None else query), (self.key, a), (self.value, a))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.output(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TorchPanGu(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, num_heads, seq_len):
        super().__init__()
        self.word = nn.Embedding(vocab_size, hidden_size)
        self.position, self.query = nn.Embedding(seq_len, hidden_size), nn.Embedding(seq_len, hidden_size)
        self.layers = nn.ModuleList(Layer(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        for table in (self.word, self.position, self.query):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens, labels, positions, weights):
        length = tokens.shape[1]
        index = torch.arange(length)
        distance = index[:, None] - index[None, :]
        mask = ((distance >= 0) & (distance <= positions[:, :, None]))[:, None]  # (B, 1, T, T)
        x = self.word(tokens) + self.position(positions)
        for layer in self.layers[:-1]:
            x = layer(x, mask)
        x = self.layers[-1](self.norm(x), mask, self.query(positions))
        nll = F.cross_entropy((x @ self.word.weight.T).flatten(0, 1), labels.flatten(), reduction="none")
        return (nll * weights.flatten()).sum()
