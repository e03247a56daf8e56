"""The Open-1B transformer over one unit of windows: forward, loss, and explicit backward.

    embed ─ RMSNorm ─▶ x ─┬─ RMSNorm ─ q, k, v ─ QK-norm, RoPE ─ attention ─ o ─┬─(+)─┬─ RMSNorm ─ gate·up ─ SwiGLU ─ down ─(+)─▶ …
                          └──────────────────────────────────────────────────────┘     └────────────────────────────────────┘
    … ─ RMSNorm ─ head ─ cross-entropy + z-loss

Suffixes: T tokens of the unit, D model width, H·E query width, F feed-forward width. bf16 tensors are kept between
operations; what a quantiser reads is never kept as floats. Gradients are of the *sum* over tokens; 1/N enters with the
optimizer.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kernels.interface import Attended, AttentionShape, Part, Rope, Rows, Weight
from model import host
from model.spec import RunSpec


@dataclass(frozen=True)
class Network:
    """One step's weights, quantised once and used by every unit of the step."""

    spec: RunSpec
    backend: ModuleType
    tensors: dict[str, Any]  # embedding and norm gains, f32
    weights: dict[str, Weight]  # linears and head
    rope: Rope
    eps: np.float32

    def gain(self, name: str) -> Any:
        """The gain f32[D] of a norm."""
        return self.tensors[name]

    def attention_shape(self, layer: int) -> AttentionShape:
        """Heads and window of one layer."""
        m = self.spec.model
        window = m.seq_len if m.is_full(layer) else m.window
        return AttentionShape(m.heads, m.kv_heads, m.head_dim, m.seq_len, window)


@dataclass(frozen=True)
class AttentionTrace:
    """What one attention layer keeps for its backward."""

    x_TD: Any
    r_T: Any
    rows: Rows
    q_y: Any
    k_y: Any
    q: Rows
    k: Rows
    v: Rows
    attended: Attended
    out_rows: Rows


@dataclass(frozen=True)
class FeedForwardTrace:
    """What one feed-forward layer keeps for its backward."""

    x_TD: Any
    r_T: Any
    rows: Rows
    gate_up: Any
    hidden: Rows


@dataclass(frozen=True)
class Trace:
    """What one unit keeps: embeddings before their norm, each layer's, and the input of the final norm."""

    embedded_TD: Any
    r_embed_T: Any
    layers: list[tuple[AttentionTrace, FeedForwardTrace]]
    final_TD: Any
    r_final_T: Any
    rows: Rows


def network(spec: RunSpec, backend: ModuleType, weights: dict[str, np.ndarray], flag: Any) -> Network:
    """Quantise every linear by the recipe's rule and the head by its rows' maxima."""
    rule = spec.numerics.weight_scale
    plain = {name: backend.to_device(w) for name, w in weights.items() if w.ndim == 1 or name == "embed"}
    quantised = {
        name: backend.quantise_weight(backend.to_device(w), "max" if name == "head" else rule, flag)
        for name, w in weights.items()
        if name not in plain
    }
    m = spec.model
    rope = Rope(*map(backend.to_device, host.rope_tables(m.seq_len, m.head_dim, m.rope_theta)))
    return Network(spec, backend, plain, quantised, rope, host.f32(m.norm_eps))


def forward(net: Network, tokens: Any, flag: Any) -> Trace:
    """Run a unit's input tokens i64[T] up to the head's input."""
    embedded = net.backend.embed(net.tensors["embed"], net.backend.to_device(tokens))
    x, r_embed = net.backend.norm_bf16(embedded, net.gain("embed_norm"), net.eps, flag)
    layers = []
    for layer in range(net.spec.model.layers):
        x, attention = _attention(net, layer, x, flag)
        x, feed_forward = _feed_forward(net, layer, x, flag)
        layers.append((attention, feed_forward))
    rows, r_final = net.backend.norm_rows(x, net.gain("final_norm"), net.eps, 2, flag)
    return Trace(embedded, r_embed, layers, x, r_final, rows)


def unit_loss(net: Network, windows: np.ndarray, flag: Any) -> tuple[int, int]:
    """(Σ nll in 2⁻²⁴ nats, Σ lse² in 2⁻²⁰) of windows i64[N, S+1], without gradients."""
    trace = forward(net, windows[:, :-1].reshape(-1), flag)
    targets = net.backend.to_device(windows[:, 1:].reshape(-1))
    return net.backend.head(trace.rows, net.weights["head"], targets, flag)


def unit_gradients(
    net: Network, windows: np.ndarray, two_z: np.float32, sums: dict[str, Any], flag: Any
) -> tuple[int, int]:
    """unit_loss(), adding the unit's gradient of Σ (nll + z·lse²) to `sums`, int64 in units of 2⁻²⁴, by parameter
    name."""
    b = net.backend
    tokens, targets = (b.to_device(part.reshape(-1)) for part in (windows[:, :-1], windows[:, 1:]))
    trace = forward(net, tokens, flag)
    nll, lse2, dy = b.head_backward(trace.rows, net.weights["head"], targets, two_z, sums["head"], flag)
    dx = b.norm_backward(dy, trace.final_TD, trace.r_final_T, net.gain("final_norm"), None, sums["final_norm"], flag)
    for layer in reversed(range(net.spec.model.layers)):
        attention, feed_forward = trace.layers.pop()
        dx = _feed_forward_backward(net, layer, feed_forward, dx, sums, flag)
        dx = _attention_backward(net, layer, attention, dx, sums, flag)
    gain, gain_sums = net.gain("embed_norm"), sums["embed_norm"]
    dx = b.norm_backward(dx, trace.embedded_TD, trace.r_embed_T, gain, None, gain_sums, flag)
    b.embed_backward(dx, tokens, sums["embed"], flag)
    return nll, lse2


def _attention(net: Network, layer: int, x: Any, flag: Any) -> tuple[Any, AttentionTrace]:
    b, w, name = net.backend, net.weights, f"blocks.{layer:03d}"
    rows, r = b.norm_rows(x, net.gain(f"{name}.attn_norm"), net.eps, 1, flag)
    q_y, k_y, v_y = (b.project(rows, w[f"{name}.{part}"]) for part in "qkv")
    q = b.rotate_rows(q_y, net.rope, net.eps, True, flag)
    k = b.rotate_rows(k_y, net.rope, net.eps, False, flag)
    v = b.quantise_rows(v_y.reshape(-1, net.spec.model.head_dim), 1, flag)
    attended = b.attention(q, k, v, net.attention_shape(layer))
    out_rows = b.quantise_rows(attended.out, 1, flag)
    y = b.project_add(out_rows, w[f"{name}.o"], x)
    return y, AttentionTrace(x, r, rows, q_y, k_y, q, k, v, attended, out_rows)


def _attention_backward(
    net: Network, layer: int, t: AttentionTrace, dy: Any, sums: dict[str, Any], flag: Any
) -> Any:
    b, w, name, slices = net.backend, net.weights, f"blocks.{layer:03d}", net.spec.numerics.gradient_slices
    part = {p: f"{name}.{p}" for p in ("q", "k", "v", "o")}
    d_out = b.linear_backward(t.out_rows, (Part(dy, w[part["o"]], sums[part["o"]]),), slices, flag)
    dq, dk, dv = b.attention_backward(t.q, t.k, t.v, t.attended, d_out, net.attention_shape(layer), flag)
    d_parts = {
        "q": b.rotate_backward(dq, t.q_y, net.rope, net.eps, flag),
        "k": b.rotate_backward(dk, t.k_y, net.rope, net.eps, flag),
        "v": dv,
    }
    parts = tuple(Part(d, w[part[p]], sums[part[p]]) for p, d in d_parts.items())
    dx = b.linear_backward(t.rows, parts, slices, flag)
    gain = f"{name}.attn_norm"
    return b.norm_backward(dx, t.x_TD, t.r_T, net.gain(gain), dy, sums[gain], flag)


def _feed_forward(net: Network, layer: int, x: Any, flag: Any) -> tuple[Any, FeedForwardTrace]:
    b, w, name = net.backend, net.weights, f"blocks.{layer:03d}"
    rows, r = b.norm_rows(x, net.gain(f"{name}.mlp_norm"), net.eps, 1, flag)
    gate_up = b.project(rows, w[f"{name}.gate_up"])
    hidden = b.swiglu_rows(gate_up, net.spec.numerics.down_slices, flag)
    return b.project_add(hidden, w[f"{name}.down"], x), FeedForwardTrace(x, r, rows, gate_up, hidden)


def _feed_forward_backward(
    net: Network, layer: int, t: FeedForwardTrace, dy: Any, sums: dict[str, Any], flag: Any
) -> Any:
    b, w, name, slices = net.backend, net.weights, f"blocks.{layer:03d}", net.spec.numerics.gradient_slices
    down, gate_up, gain = f"{name}.down", f"{name}.gate_up", f"{name}.mlp_norm"
    dh = b.linear_backward(t.hidden, (Part(dy, w[down], sums[down]),), slices, flag)
    d_gate_up = b.swiglu_backward(dh, t.gate_up)
    dx = b.linear_backward(t.rows, (Part(d_gate_up, w[gate_up], sums[gate_up]),), slices, flag)
    return b.norm_backward(dx, t.x_TD, t.r_T, net.gain(gain), dy, sums[gain], flag)
