"""The Open-1B transformer over one unit of windows: forward, loss, and explicit backward.

    embed ─ RMSNorm ─▶ x ─┬─ RMSNorm ─ q, k, v ─ QK-norm, RoPE ─ attention ─ o ─┬─(+)─┬─ RMSNorm ─ gate·up ─ SwiGLU ─ down ─(+)─▶ …
                          └──────────────────────────────────────────────────────┘     └────────────────────────────────────┘
    … ─ RMSNorm ─ head ─ cross-entropy + z-loss

Suffixes: T tokens of the unit, D model width, H·E query width, F feed-forward width. bf16 tensors are kept between
operations; what a quantiser reads is never kept as floats. Gradients are of the *sum* over tokens; 1/N enters with the
optimizer. What lies between forward and backward is the memory plan's choice (memory.py); a layer that is recomputed
goes through the functions of its first time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kernels.interface import Attended, AttentionShape, GradientSlices, Part, Rope, Rows, Weight
from model import host
from model.group import ALONE, Group
from model.memory import KEEP_ALL, MemoryPlan, give_back
from model.spec import RunSpec


@dataclass(frozen=True)
class Network:
    """One step's weights, quantised once and used by every unit of the step, or quantised at each use."""

    spec: RunSpec
    backend: ModuleType
    plan: MemoryPlan
    weights: dict[str, Any]  # every parameter, or this rank's rows, f32, on the host or the device
    tensors: dict[str, Any]  # embedding and norm gains on the device, f32
    held: dict[str, Weight]  # linears and head, where the plan holds their codes
    rope: Rope
    eps: np.float32

    def gain(self, name: str) -> Any:
        """The gain f32[D] of a norm."""
        return self.tensors[name]

    def weight(self, name: str, flag: Any) -> Weight:
        """A linear by the recipe's rule, or the head by its rows' maxima."""
        if name in self.held:
            return self.held[name]
        rule = "max" if name == "head" else self.spec.numerics.weight_scale
        return self.backend.quantise_weight(self.backend.to_device(self.weights[name]), rule, flag)

    @property
    def gradient_slices(self) -> GradientSlices:
        """Of every linear's output gradient."""
        numerics = self.spec.numerics
        return GradientSlices(numerics.input_gradient_slices, numerics.weight_gradient_slices)

    def attention_shape(self, layer: int) -> AttentionShape:
        """Heads and window of one layer."""
        m = self.spec.model
        window = m.seq_len if m.is_full(layer) else m.window
        return AttentionShape(m.heads, m.kv_heads, m.head_dim, m.seq_len, window)


class AttentionTrace(NamedTuple):
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


class FeedForwardTrace(NamedTuple):
    """What one feed-forward layer keeps for its backward."""

    x_TD: Any
    r_T: Any
    rows: Rows
    gate_up: Any
    hidden: Rows


@dataclass(frozen=True)
class Trace:
    """What one unit keeps: of the layers what the plan says, the input of the final norm, and the head's rows.

    layers: [attention's, feed-forward's] trace of each; or the stream bf16[T, D] entering every n-th. The backward
    takes them off the list, so that each is gone as soon as it was used.
    """

    layers: list[Any]
    final_TD: Any
    r_final_T: Any
    rows: Rows


def network(
    spec: RunSpec,
    backend: ModuleType,
    weights: dict[str, Any],
    flag: Any,
    plan: MemoryPlan = KEEP_ALL,
    group: Group = ALONE,
) -> Network:
    """The network of these weights; quantises them all where the plan holds codes.

    In a group each rank quantises the rows that it owns, and they all hold every code.
    """
    plain = {name: backend.to_device(w) for name, w in weights.items() if w.ndim == 1 or name == "embed"}
    m = spec.model
    rope = Rope(*map(backend.to_device, host.rope_tables(m.seq_len, m.head_dim, m.rope_theta)))
    net = Network(spec, backend, plan, weights, plain, {}, rope, host.f32(m.norm_eps))
    if plan.hold_codes or group.size > 1:
        own = {name: net.weight(name, flag) for name in weights.keys() - plain.keys()}
        net.held.update(group.codes(own))
    net.tensors.update(group.tables(plain))
    return net


def quantised(net: Network) -> list[str]:
    """Names of the parameters that enter as codes, in name order."""
    return sorted(net.spec.model.shapes().keys() - net.tensors.keys())


def forward(net: Network, tokens: Any, flag: Any, keep: bool = True) -> Trace:
    """Run a unit's input tokens i64[T] up to the head's input; without `keep`, nothing is left of the layers."""
    x = _embed(net, net.backend.to_device(tokens), flag)[1]
    every, layers = net.plan.recompute, []
    for layer in range(net.spec.model.layers):
        if not keep or every:
            if keep and layer % every == 0:
                layers.append(x)
            x = _through(net, layer, x, flag)
        else:
            layers.append(_traces(net, layer, x, flag))
            x = _feed_forward_output(net, layer, layers[-1][1], flag)
    rows, r_final = net.backend.norm_rows(x, net.gain("final_norm"), net.eps, 2, flag)
    return Trace(layers, x, r_final, rows)


def unit_loss(net: Network, windows: np.ndarray, flag: Any) -> tuple[Any, Any]:
    """(Σ nll in 2⁻²⁴ nats, Σ lse² in 2⁻²⁰) of windows i64[N, S+1], without gradients."""
    rows = forward(net, windows[:, :-1].reshape(-1), flag, keep=False).rows
    targets = net.backend.to_device(windows[:, 1:].reshape(-1))
    return net.backend.head(rows, net.weight("head", flag), targets, flag)


def unit_gradients(
    net: Network, windows: np.ndarray, two_z: np.float32, sums: dict[str, Any], flag: Any
) -> tuple[Any, Any]:
    """unit_loss(), adding the unit's gradient of Σ (nll + z·lse²) to `sums`, int64 in units of 2⁻²⁴, by parameter
    name."""
    b = net.backend
    tokens, targets = (b.to_device(part.reshape(-1)) for part in (windows[:, :-1], windows[:, 1:]))
    trace = forward(net, tokens, flag)
    _give_back(net)
    nll, lse2, dx = _head_backward(net, trace, targets, two_z, sums, flag)
    kept = trace.layers
    del trace
    for layer, traces in _backwards(net, kept, flag):
        dx = _feed_forward_backward(net, layer, traces, dx, sums, flag)
        dx = _attention_backward(net, layer, traces, dx, sums, flag)
        _give_back(net)
    embedded, _, r = _embed(net, tokens, flag)
    dx = b.norm_backward(dx, embedded, r, net.gain("embed_norm"), None, sums["embed_norm"], flag)
    b.embed_backward(dx, tokens, sums["embed"], flag)
    return nll, lse2


def _give_back(net: Network) -> None:
    if net.plan.lean:
        give_back()


def _backwards(net: Network, kept: list[Any], flag: Any) -> Iterator[tuple[int, list[Any]]]:
    """(layer, its traces) from the last layer to the first, kept or made again; `kept` is used up."""
    every, layers = net.plan.recompute, net.spec.model.layers
    while kept:
        if not every:
            yield len(kept) - 1, kept.pop()
            continue
        streams = [kept.pop()]
        first = len(kept) * every
        for layer in range(first, min(first + every, layers) - 1):
            streams.append(_through(net, layer, streams[-1], flag))
        while streams:
            yield first + len(streams) - 1, _traces(net, first + len(streams) - 1, streams.pop(), flag)


def _traces(net: Network, layer: int, x: Any, flag: Any) -> list[Any]:
    """Both traces of a layer that the stream x enters."""
    attention = _attention(net, layer, x, flag)
    return [attention, _feed_forward(net, layer, _attention_output(net, layer, attention, flag), flag)]


def _through(net: Network, layer: int, x: Any, flag: Any) -> Any:
    """The stream bf16[T, D] after a layer, whose traces are dropped as they are used."""
    x = _attention_output(net, layer, _attention(net, layer, x, flag), flag)
    return _feed_forward_output(net, layer, _feed_forward(net, layer, x, flag), flag)


def _embed(net: Network, tokens: Any, flag: Any) -> tuple[Any, Any, Any]:
    """(embeddings bf16[T, D], the residual stream's first value, inverse root mean squares f32[T])."""
    embedded = net.backend.embed(net.tensors["embed"], tokens)
    return embedded, *net.backend.norm_bf16(embedded, net.gain("embed_norm"), net.eps, flag)


def _head_backward(
    net: Network, trace: Trace, targets: Any, two_z: np.float32, sums: dict[str, Any], flag: Any
) -> tuple[Any, Any, Any]:
    b, gain = net.backend, net.gain("final_norm")
    nll, lse2, dy = b.head_backward(trace.rows, net.weight("head", flag), targets, two_z, sums["head"], flag)
    return nll, lse2, b.norm_backward(dy, trace.final_TD, trace.r_final_T, gain, None, sums["final_norm"], flag)


def _attention(net: Network, layer: int, x: Any, flag: Any) -> AttentionTrace:
    b, name = net.backend, f"blocks.{layer:03d}"
    rows, r = b.norm_rows(x, net.gain(f"{name}.attn_norm"), net.eps, 1, flag)
    q_y, k_y, v_y = (b.project(rows, net.weight(f"{name}.{part}", flag)) for part in "qkv")
    q = b.rotate_rows(q_y, net.rope, net.eps, True, flag)
    k = b.rotate_rows(k_y, net.rope, net.eps, False, flag)
    v = b.quantise_rows(v_y.reshape(-1, net.spec.model.head_dim), 1, flag)
    attended = b.attention(q, k, v, net.attention_shape(layer))
    out_rows = b.quantise_rows(attended.out, 1, flag)
    return AttentionTrace(x, r, rows, q_y, k_y, q, k, v, attended, out_rows)


def _attention_output(net: Network, layer: int, t: AttentionTrace, flag: Any) -> Any:
    return net.backend.project_add(t.out_rows, net.weight(f"blocks.{layer:03d}.o", flag), t.x_TD)


def _attention_backward(net: Network, layer: int, traces: list[Any], dy: Any, sums: dict[str, Any], flag: Any) -> Any:
    """dX of the layer's attention; takes its trace off the list, and lets go of each part after its last use."""
    x, r, rows, q_y, k_y, q, k, v, attended, out_rows = traces.pop()
    b, name, slices = net.backend, f"blocks.{layer:03d}", net.gradient_slices
    d_out = b.linear_backward(out_rows, (_part(net, f"{name}.o", dy, sums, flag),), slices, flag)
    del out_rows
    dq, dk, dv = b.attention_backward(q, k, v, attended, d_out, net.attention_shape(layer), flag)
    del q, k, v, attended, d_out
    dq = b.rotate_backward(dq, q_y, net.rope, net.eps, flag)
    dk = b.rotate_backward(dk, k_y, net.rope, net.eps, flag)
    del q_y, k_y
    parts = tuple(_part(net, f"{name}.{p}", d, sums, flag) for p, d in (("q", dq), ("k", dk), ("v", dv)))
    dx = b.linear_backward(rows, parts, slices, flag)
    gain = f"{name}.attn_norm"
    return b.norm_backward(dx, x, r, net.gain(gain), dy, sums[gain], flag)


def _part(net: Network, name: str, dy: Any, sums: dict[str, Any], flag: Any) -> Part:
    return Part(dy, net.weight(name, flag), sums[name])


def _feed_forward(net: Network, layer: int, x: Any, flag: Any) -> FeedForwardTrace:
    b, name = net.backend, f"blocks.{layer:03d}"
    rows, r = b.norm_rows(x, net.gain(f"{name}.mlp_norm"), net.eps, 1, flag)
    gate_up = b.project(rows, net.weight(f"{name}.gate_up", flag))
    return FeedForwardTrace(x, r, rows, gate_up, b.swiglu_rows(gate_up, net.spec.numerics.down_slices, flag))


def _feed_forward_output(net: Network, layer: int, t: FeedForwardTrace, flag: Any) -> Any:
    return net.backend.project_add(t.hidden, net.weight(f"blocks.{layer:03d}.down", flag), t.x_TD)


def _feed_forward_backward(
    net: Network, layer: int, traces: list[Any], dy: Any, sums: dict[str, Any], flag: Any
) -> Any:
    """dX of the layer's feed-forward; takes its trace off the list, and lets go of each part after its last use."""
    x, r, rows, gate_up, hidden = traces.pop()
    b, name, slices = net.backend, f"blocks.{layer:03d}", net.gradient_slices
    dh = b.linear_backward(hidden, (_part(net, f"{name}.down", dy, sums, flag),), slices, flag)
    del hidden
    d_gate_up = b.swiglu_backward(dh, gate_up)
    del dh, gate_up
    dx = b.linear_backward(rows, (_part(net, f"{name}.gate_up", d_gate_up, sums, flag),), slices, flag)
    gain = f"{name}.mlp_norm"
    return b.norm_backward(dx, x, r, net.gain(gain), dy, sums[gain], flag)
