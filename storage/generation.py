"""How a model goes on with a text: a checkpoint of a run, published or not, or an export, by the exports' own program.

There is one such program (plain_model.py), for whoever has this project's code and whoever has not: what a user sees
here is what the export does. Its sums are of floats, so another machine may go on with another word.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer

from storage import checkpoint
from storage.errors import InputFault, UsageError
from storage.export import TOKENIZER, check_tokenizer, chosen_step, config_of
from storage.plain_model import Model, said
from storage.run import Run, open_at
from storage.store import LocalStore, Store, open_store

CONFIG = "config.json"
MAX_TOKENIZER = 1 << 28


@dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer."""

    model: Model
    tokenizer: Tokenizer

    def continued(self, prompt: str, count: int) -> Iterator[str]:
        """The text that follows, in pieces, of at most `count` tokens; UsageError for a prompt that does not fit."""
        tokens, room = self.tokenizer.encode(prompt, add_special_tokens=False).ids, self.model.config["seq_len"]
        if not 0 < len(tokens) < room:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, the model goes on after 1 to {room - 1}",
                next_step="give a longer or shorter --prompt",
            )
        return said(self.model, self.tokenizer, tokens, count)


def speaker(address: str, step: int | None = None, device: str = "cpu") -> Speaker:
    """The model at an address. step: of a run, which checkpoint, its last one for None; every byte of it is verified.

    Raises CheckpointFault for a checkpoint whose root is not in the ledger, InputFault for another tokenizer than the
    model was trained with, Refused where there is no such model, UsageError for a device that is not here.
    """
    _check_device(device)
    store = open_store(address)
    if CONFIG in store.list(CONFIG):
        if step is not None:
            raise UsageError("an export is of one state; --step chooses among a run's checkpoints")
        return _of_export(store, device)
    return _of_run(open_at(address), step, device)


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:  # how torch says that it is not here
        raise UsageError(f"device {device}: {str(error).splitlines()[0]}", next_step="leave --device out") from None


def _of_run(run: Run, step: int | None, device: str) -> Speaker:
    chosen = chosen_step(run, step)
    wanted = [f"weights/{name}" for name in run.spec.model.shapes()]
    weights = checkpoint.load(run.store, run.ledger, chosen, wanted=wanted).weights
    config, stream = config_of(run, chosen), run.stream
    tokenizer = stream.store.read(stream.base + TOKENIZER, limit=MAX_TOKENIZER)
    return Speaker(Model(config, weights, device), _tokenizer(tokenizer, config))


def _of_export(store: Store, device: str) -> Speaker:
    if not isinstance(store, LocalStore):
        raise UsageError(f"{store.uri}: an export is read from a folder", next_step="copy its files into one")
    try:
        model = Model.load(store.root, device)
        _try(model)
    except (ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        raise InputFault(f"{store.uri}: not an export: {error!r}", cause="a file was damaged or edited") from None
    return Speaker(model, _tokenizer(store.read(TOKENIZER, limit=MAX_TOKENIZER), model.config))


@torch.inference_mode()
def _try(model: Model) -> None:
    """One token; ValueError, KeyError, TypeError or IndexError where weights and config do not fit each other."""
    try:
        model.logits(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    except RuntimeError as error:  # how torch says that shapes do not fit
        raise ValueError(str(error).partition("\n")[0]) from None


def _tokenizer(data: bytes, config: dict[str, Any]) -> Tokenizer:
    check_tokenizer(data, config)
    return Tokenizer.from_str(data.decode())
