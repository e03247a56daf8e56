"""The peer computes what ours does, but for rounding: else a ratio between them would compare two models."""

from __future__ import annotations

import numpy as np
import torch

import kernels
from kernels import canonical
from model.spec import NumericsSpec
from model.state import initial_state
from model.step import step
from tests.bench.gpu_stock import Trainer, halves_first, parameters_of
from tests.bench.shapes import TINY, run_of


def test_the_peer_has_our_loss_and_our_gradients() -> None:
    run, backend = run_of(TINY, 2, NumericsSpec()), kernels.backend("cpu")
    state, gradients = initial_state(run, backend), dict[str, np.ndarray]()
    generator = np.random.default_rng(0)
    for weight in state.weights.values():  # at the drawn scale attention is all but even, whatever the positions
        weight *= np.float32(4) if weight.ndim > 1 else generator.uniform(0.5, 2, weight.shape).astype(np.float32)
    windows = generator.integers(0, run.model.vocab, (2, run.model.seq_len + 1))
    parameters = parameters_of(backend, state.weights, torch.device("cpu"), torch.float32)
    peer = Trainer(run, parameters, 2, "no", torch.float32)
    batch = torch.from_numpy(windows)
    loss, nll = peer.loss(batch[:, :-1], batch[:, 1:])
    loss.backward()
    record = step(run, backend, state, windows, take=gradients.update)

    assert record.loss is not None
    assert abs(float(canonical.from_bits(record.loss)) - float(nll)) < 0.01
    width, sizes = run.model.head_dim, [len(state.weights[f"blocks.000.{name}"]) for name in "qkv"]
    for layer, block in enumerate(peer.model.blocks):
        theirs = dict(zip("qkv", block.qkv.weight.grad.split(sizes), strict=True))
        theirs |= {"o": block.out.weight.grad, "gate_up": block.gate_up.weight.grad, "down": block.down.weight.grad}
        theirs |= {"attn_norm": block.norm1.gain.grad, "mlp_norm": block.norm2.gain.grad}
        for name, gradient in theirs.items():
            ours = torch.from_numpy(gradients[f"blocks.{layer:03d}.{name}"]).float()
            ours = halves_first(ours, width) if name in ("q", "k") else ours
            assert torch.cosine_similarity(ours.flatten(), gradient.flatten(), 0) > 0.98, (layer, name)
    assert peer.model.start.table.grad is not None
    embedded = torch.from_numpy(gradients["embed"]).float().flatten()
    assert torch.cosine_similarity(embedded, peer.model.start.table.grad.flatten(), 0) > 0.98
