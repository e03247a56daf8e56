"""The same transformer in float64 PyTorch with autograd: the truth that the integer backward is measured against."""

import numpy as np
import torch

from model import host
from model.spec import RunSpec


def loss_and_gradients(
    spec: RunSpec, weights: dict[str, np.ndarray], windows: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean over tokens of nll, and the gradient of the mean of nll + z·lse², all in float64."""
    w = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in weights.items()}
    tokens = torch.from_numpy(windows.astype(np.int64))
    logits = _logits(spec, w, tokens[:, :-1])
    lse = torch.logsumexp(logits, -1)
    nll = (lse - logits.gather(-1, tokens[:, 1:, None])[..., 0]).mean()
    (nll + float(spec.optimizer.z_loss) * (lse * lse).mean()).backward()
    return float(nll.detach()), {name: value.grad.numpy() for name, value in w.items() if value.grad is not None}


def _norm(x: torch.Tensor, eps: float, gain: torch.Tensor | None = None) -> torch.Tensor:
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if gain is None else y * gain


def _logits(spec: RunSpec, w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    m, eps = spec.model, float(spec.model.norm_eps)
    cos, sin = (torch.from_numpy(t.astype(np.float64)) for t in host.rope_tables(m.seq_len, m.head_dim, m.rope_theta))
    x = _norm(w["embed"][tokens], eps, w["embed_norm"])
    for layer in range(m.layers):
        p = f"blocks.{layer:03d}."
        window = m.seq_len if m.is_full(layer) else m.window
        x = x + _attention(m, w, p, _norm(x, eps, w[p + "attn_norm"]), window, cos, sin, eps)
        gate, up = (_norm(x, eps, w[p + "mlp_norm"]) @ w[p + "gate_up"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "down"].T
    return _norm(x, eps, w["final_norm"]) @ w["head"].T


def _attention(m, w, p, x, window, cos, sin, eps):  # type: ignore[no-untyped-def]
    b, s, _ = x.shape
    q, k, v = ((x @ w[p + part].T).view(b, s, -1, m.head_dim) for part in "qkv")
    q, k = rotate(_norm(q, eps), cos, sin), rotate(_norm(k, eps), cos, sin)
    group = m.heads // m.kv_heads
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / m.head_dim**0.5
    distance = torch.arange(s)[:, None] - torch.arange(s)[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    out = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), v)
    return out.reshape(b, s, -1) @ w[p + "o"].T


def rotate(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs, y [B, S, H, E]."""
    even, odd = y[..., 0::2], y[..., 1::2]
    c, s = cos[:, None], sin[:, None]
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)
