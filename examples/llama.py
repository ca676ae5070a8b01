"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.  Ordinary single-device code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 352
    length: int = 128
    dropout: float = 0.0
    tied: bool = False
    theta: float = 10000.0
    rotary: bool = True


Positions = tuple[torch.Tensor, torch.Tensor]


def angles(c: Config, length: int, like: torch.Tensor) -> Positions:
    """Cosine and sine of the rotary angles, each [length, head_dim / 2]."""
    half = c.dim // c.heads // 2
    rates = c.theta ** (-torch.arange(half, device=like.device, dtype=torch.float32) / half)
    turns = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * rates
    return turns.cos().to(like.dtype), turns.sin().to(like.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``x`` [batch, heads, length, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = c.heads, c.kv_heads, c.dim // c.heads
        self.dropout = c.dropout
        self.wq = nn.Linear(c.dim, c.heads * self.size, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(c.heads * self.size, c.dim, bias=False)

    def forward(self, x: torch.Tensor, positions: Positions | None) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if positions is not None:
            q, k = rotate(q, *positions), rotate(k, *positions)
        groups = self.heads // self.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(c.dim, c.ffn, bias=False)
        self.up = nn.Linear(c.dim, c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(c.dim, eps=1e-5), nn.RMSNorm(c.dim, eps=1e-5)
        self.attention, self.ffn = Attention(c), FeedForward(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: torch.Tensor, positions: Positions | None) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Llama(nn.Module):
    """``forward(ids, targets)`` gives the mean cross-entropy, ``forward(ids)`` the logits [batch, length, vocab]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim, eps=1e-5)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        c = self.config
        x = self.embed(ids)
        positions = angles(c, ids.shape[1], x) if c.rotary else None
        for layer in self.layers:
            x = layer(x, positions)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, c.vocab).float(), targets.view(-1))


MEGATRON = {
    "embed.weight": 0,
    "head.weight": 0,
    "layers.*.attention.w[qkv].weight": 0,
    "layers.*.attention.wo.weight": 1,
    "layers.*.ffn.gate.weight": 0,
    "layers.*.ffn.up.weight": 0,
    "layers.*.ffn.down.weight": 1,
}
"""The dim of each matrix that Megatron shards on the tensor-parallel axis; norms are replicated."""
