"""The peer on a GPU: the same transformer in stock PyTorch, as one would write it for speed.

Matrix products, attention and the residual stream in bf16, torch.compile, flex attention (a window's blocks that no
query sees are skipped), fused AdamW. Parameters are bf16 too, which is fastest, or float32 and rounded to bf16 where
they are used, which trains better: the benchmark of speed takes the first, the study of precision the second.

It starts from the same weights as ours. Rotary pairs are (i, i + E/2) here and (2i, 2i + 1) there, so rows of q and k
change places within each head. On a CPU, where flex attention has no backward, attention takes a dense mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from model import schedule
from model.host import rope_tables
from model.spec import ModelSpec, RunSpec

Compiled = Literal["no", "blocks", "whole"]  # blocks: each by itself, so that equal ones are compiled once


class Linear(nn.Module):
    """A matrix [O, I], in the dtype of what enters it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm with a gain [D]."""

    def __init__(self, gain: Tensor, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(gain), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain.to(x.dtype), self.eps)


class Start(nn.Module):
    """Embedding and its norm: tokens i64[B, S] → bf16[B, S, D]."""

    def __init__(self, table: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.norm, self.dtype = nn.Parameter(table), Norm(gain, eps), dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(F.embedding(tokens, self.table).to(self.dtype))


class Block(nn.Module):
    """Pre-norm attention with QK-norm and RoPE, then SwiGLU; x is [B, S, D]."""

    def __init__(self, m: ModelSpec, p: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.m, self.eps = m, float(m.norm_eps)
        q, k = (halves_first(p[name], m.head_dim) for name in "qk")
        self.qkv, self.out = Linear(torch.cat([q, k, p["v"]])), Linear(p["o"])
        self.gate_up, self.down = Linear(p["gate_up"]), Linear(p["down"])
        self.norm1, self.norm2 = Norm(p["attn_norm"], self.eps), Norm(p["mlp_norm"], self.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        m, (b, s, _) = self.m, x.shape
        sizes = [m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim]
        q, k, v = (y.view(b, s, -1, m.head_dim).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(sizes, -1))
        q, k = (rotate(F.rms_norm(y, (m.head_dim,), eps=self.eps), cos, sin) for y in (q, k))
        x = x + self.out(attend(q, k, v, mask).transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class End(nn.Module):
    """Final norm, head and loss: (mean nll + z · mean lse², mean nll) of targets i64[B, S]."""

    def __init__(self, head: Tensor, gain: Tensor, eps: float, z_loss: float) -> None:
        super().__init__()
        self.norm, self.head, self.z_loss = Norm(gain, eps), Linear(head), z_loss

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        nll = F.cross_entropy(logits, targets.flatten())
        return nll + self.z_loss * logits.logsumexp(-1).square().mean(), nll.detach()


class Stock(nn.Module):
    """tokens, targets i64[B, S] → End's pair; made of our parameters by name, each of which it copies."""

    cos: Tensor
    sin: Tensor

    def __init__(self, run: RunSpec, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        m, p = run.model, {name: tensor.clone() for name, tensor in parameters.items()}
        eps, device = float(m.norm_eps), p["embed"].device
        self.start = Start(p["embed"], p["embed_norm"], eps, dtype)
        self.blocks = nn.ModuleList(
            Block(m, {name[11:]: p[name] for name in p if name.startswith(f"blocks.{layer:03d}.")})
            for layer in range(m.layers)
        )
        self.end = End(p["head"], p["final_norm"], eps, float(run.optimizer.z_loss))
        cos, sin = (torch.tensor(table, device=device) for table in rope_tables(m.seq_len, m.head_dim, m.rope_theta))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        full, local = (mask_of(m.seq_len, window, device) for window in (m.seq_len, m.window))
        self.masks = [full if m.is_full(layer) else local for layer in range(m.layers)]

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.start(tokens)
        for block, mask in zip(self.blocks, self.masks, strict=True):
            x = block(x, self.cos, self.sin, mask)
        loss: tuple[Tensor, Tensor] = self.end(x, targets)
        return loss


def halves_first(weight: Tensor, width: int) -> Tensor:
    """Rows [H·E, D] with each head's even channels before its odd ones."""
    return weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).reshape(weight.shape)


def rotate(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of z[B, H, S, E] by tables f32[S, E/2], in z's dtype."""
    low, high = z.chunk(2, -1)
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1).to(z.dtype)


def mask_of(length: int, window: int, device: torch.device) -> Any:
    """Which keys a query sees, itself and those before it up to `window` in all."""

    def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < window)

    if device.type == "cuda":
        return create_block_mask(seen, None, None, length, length, device=device)
    places = torch.arange(length)
    return seen(places, places, places[:, None], places[None, :])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention of [B, H, S, E] with grouped keys."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    attended: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return attended


class Trainer:
    """A run of the peer: steps of whole windows in micro-batches of `micro` windows, and held-out losses."""

    def __init__(
        self,
        run: RunSpec,
        parameters: Mapping[str, Tensor],
        micro: int,
        compiled: Compiled,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.run, self.micro, self.tokens = run, micro, 0
        self.device = parameters["embed"].device
        self.model = Stock(run, parameters, dtype)
        o, decays = run.optimizer, [p for p in self.model.parameters() if p.ndim > 1]
        decays = [p for p in decays if p is not self.model.start.table]
        others = [p for p in self.model.parameters() if all(p is not other for other in decays)]
        groups = [
            {"params": decays, "weight_decay": float(o.weight_decay)},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = float(o.beta1), float(o.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=float(o.eps), fused=True)
        self.loss: Any = torch.compile(self.model, dynamic=False) if compiled == "whole" else self.model
        if compiled == "blocks":
            torch._dynamo.config.recompile_limit = 64  # all parts enter through one function of nn.Module
            for part in (self.model.start, *self.model.blocks, self.model.end):
                part.compile(dynamic=False)

    def step(self, windows: np.ndarray) -> Tensor:
        """One step on windows i64[N, S + 1]: forward, backward, clipping, AdamW; the mean nll, not yet waited for."""
        rate, total = float(schedule.learning_rate(self.run, self.tokens)), torch.zeros((), device=self.device)
        batches = self._batches(windows)
        for number, batch in enumerate(batches):
            with self.micro_batch(last=number + 1 == len(batches)):
                loss, nll = self.loss(batch[:, :-1], batch[:, 1:])
                share = len(batch) / len(windows)
                (loss * share).backward()
            total += nll * share
        nn.utils.clip_grad_norm_(self.model.parameters(), float(self.run.optimizer.clip_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += len(windows) * self.run.model.seq_len
        return total

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward."""
        return nullcontext()

    @torch.no_grad()
    def evaluate(self, windows: np.ndarray) -> float:
        """Mean nll in nats of windows i64[N, S + 1]."""
        losses = [len(batch) * self.loss(batch[:, :-1], batch[:, 1:])[1] for batch in self._batches(windows)]
        return float(torch.stack(losses).sum()) / len(windows)

    def _batches(self, windows: np.ndarray) -> tuple[Tensor, ...]:
        return torch.from_numpy(np.ascontiguousarray(windows, np.int64)).to(self.device).split(self.micro)


def device_of(backend: ModuleType) -> torch.device:
    """Where a backend's arrays lie."""
    flag = backend.new_flag()
    return flag.device if isinstance(flag, Tensor) else torch.device("cpu")


def parameters_of(
    backend: ModuleType, weights: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Our weights, wherever they lie, as tensors of the peer's device and dtype."""
    return {
        name: (w if isinstance(w, Tensor) else torch.from_numpy(backend.to_host(w))).to(device, dtype)
        for name, w in weights.items()
    }
