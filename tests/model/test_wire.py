"""Both ways between ranks give exact sums and the same bytes, whatever the pieces' lengths; the device's over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from model import wire
from model.ranks import take_gpu

RANKS = 3
COUNTS = ([5, 5, 5], [7, 0, 4], [0, 0, 11], [1, 20, 3])
STAGED = (1, 6, 1 << 20)  # values a rank sends at a time: fewer than ranks, some, all
WIRES: dict[str, Callable[[], wire.Wire]] = {
    "host": wire.Host,
    "device": lambda: wire.Device(torch.device("cpu"), dist.group.WORLD),
}


def drawn(rank: int, counts: list[int]) -> torch.Tensor:
    """A rank's sums: of both signs, and large enough that float64 would round them."""
    return torch.from_numpy(np.random.default_rng(rank).integers(-(2**60), 2**60, sum(counts)))


def _rank(rank: int, kind: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found: dict[str, np.ndarray] = {}
    for staged in STAGED:
        wire.STAGED["cpu"] = staged
        line = WIRES[kind]()
        for number, counts in enumerate(COUNTS):
            line.meet()
            found[f"{staged}.{number}"] = line.reduce_scatter(drawn(rank, counts), counts).numpy()
            line.settle()
    found["gathered"] = line.all_gather(torch.arange(4, dtype=torch.uint8) + 10 * rank).numpy()
    np.savez(folder / f"{rank}.npz", **found)  # type: ignore[arg-type]
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", WIRES)
def test_pieces_hold_the_sum_and_bytes_arrive(kind: str, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, kind, tmp_path)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(RANKS)]
    for number, counts in enumerate(COUNTS):
        whole = torch.stack([drawn(rank, counts) for rank in range(RANKS)]).sum(0, dtype=torch.int64).numpy()
        for staged in STAGED:
            pieces = [found[rank][f"{staged}.{number}"] for rank in range(RANKS)]
            assert [len(piece) for piece in pieces] == counts
            assert np.concatenate(pieces).tobytes() == whole.tobytes()
    for rank in range(RANKS):
        assert found[rank]["gathered"].tolist() == [[10 * r + i for i in range(4)] for r in range(RANKS)]


def test_a_rank_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="this machine has 2 GPUs, and process 2 of it has none"):
        take_gpu(2)
