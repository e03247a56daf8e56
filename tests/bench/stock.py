"""The peer: the same transformer in stock PyTorch, eager, as one would write it: SDPA, F.cross_entropy, fused AdamW.

    python -m tests.bench.stock SIZE DTYPE      a step for each line of standard input, answered by the loss

It runs in a process of its own, whose oneDNN may use whatever the processor has: ours sets a limit for speed.

Local layers attend by blocks of one window (each block of queries to its own keys and those of the block before), so
the peer does no work for keys that no query sees. Weights, activations and moments are of one dtype.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.spec import ModelSpec
from tests.bench.shapes import TOKENS, spec


class Block(nn.Module):
    """Pre-norm attention with QK-norm and RoPE, then SwiGLU. x is [1, S, D]."""

    def __init__(self, m: ModelSpec, layer: int) -> None:
        super().__init__()
        self.m, self.full = m, m.is_full(layer)
        queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
        self.qkv = nn.Linear(m.d_model, queries + 2 * keys, bias=False)
        self.out = nn.Linear(queries, m.d_model, bias=False)
        self.gate_up = nn.Linear(m.d_model, 2 * m.ffn, bias=False)
        self.down = nn.Linear(m.ffn, m.d_model, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(m.d_model, eps=1e-5), nn.RMSNorm(m.d_model, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        m, s = self.m, x.shape[1]
        sizes = [m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim]
        q, k, v = (y.view(1, s, -1, m.head_dim).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(sizes, -1))
        q, k = (rotate(F.rms_norm(y, (m.head_dim,)), cos, sin) for y in (q, k))
        if self.full or s <= m.window:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = local_attention(q, k, v, m.window, seen)
        x = x + self.out(y.transpose(1, 2).reshape(1, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of z[1, H, S, E]."""
    low, high = z.chunk(2, -1)
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1)


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: int, seen: Tensor) -> Tensor:
    """Attention of [1, H, S, E] to the `window` last keys, by blocks of `window` queries; S is a multiple of it."""

    def blocks(x: Tensor) -> Tensor:
        return x[0].unflatten(1, (-1, window)).transpose(0, 1)  # [blocks, H, window, E]

    def with_previous(x: Tensor) -> Tensor:
        b = blocks(x)
        return torch.cat([torch.cat([torch.zeros_like(b[:1]), b[:-1]]), b], 2)

    y = F.scaled_dot_product_attention(blocks(q), with_previous(k), with_previous(v), attn_mask=seen, enable_gqa=True)
    return y.transpose(0, 1).flatten(1, 2)[None]


class Stock(nn.Module):
    """tokens i64[S], targets i64[S] → the loss with z-loss."""

    cos: Tensor
    sin: Tensor
    seen: Tensor

    def __init__(self, m: ModelSpec) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(m.vocab, m.d_model), nn.Linear(m.d_model, m.vocab, bias=False)
        self.norm0, self.norm1 = nn.RMSNorm(m.d_model, eps=1e-5), nn.RMSNorm(m.d_model, eps=1e-5)
        self.blocks = nn.ModuleList([Block(m, layer) for layer in range(m.layers)])
        powers = m.rope_theta ** (-torch.arange(0, m.head_dim, 2).float() / m.head_dim)
        angle = torch.arange(m.seq_len).float()[:, None] * powers
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        distance = torch.arange(m.window)[:, None] + m.window - torch.arange(2 * m.window)
        seen = ((distance >= 0) & (distance < m.window)).expand(m.seq_len // m.window, 1, -1, -1).clone()
        seen[:1, ..., : m.window] = False  # before the first block there is nothing
        self.register_buffer("seen", seen)

    def forward(self, tokens: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        x = self.norm0(self.embed(tokens))[None]
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.seen)
        logits = self.head(self.norm1(x))[0].float()
        return F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(-1).square().mean()


class Trainer:
    """A step of the peer: forward, backward, clipping, AdamW."""

    def __init__(self, m: ModelSpec, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Stock(m).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step(self, window: Tensor) -> float:
        """One step on a window i64[S + 1]; the loss in nats."""
        loss = self.model(window[:-1], window[1:], 1e-4)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Peer:
    """The peer of one size and dtype in its own process, until close()."""

    def __init__(self, size: str, dtype: str) -> None:
        free = {**os.environ, "ONEDNN_MAX_CPU_ISA": "DEFAULT"}
        command = [sys.executable, "-W", "ignore", "-m", "tests.bench.stock", size, dtype]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=free)

    def step(self) -> float:
        """One step, waited for; the loss in nats."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print("step", file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return float(answer)
        raise RuntimeError(f"the peer ended with {self.process.wait()}: its own message stands above")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def main(size: str, dtype: str) -> None:
    """Steps on random windows, one for each line."""
    model, random = spec(size).model, np.random.default_rng(0)
    trainer = Trainer(model, getattr(torch, dtype))
    for _ in sys.stdin:
        window = torch.from_numpy(random.integers(0, model.vocab, TOKENS + 1))
        print(trainer.step(window), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
