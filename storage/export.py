"""The last weights of a run as a stranger's own code can take them: float32 safetensors, a config, a plain program.

    export/model.safetensors    or model-00001-of-00004.safetensors, …, of 1 GiB each; parameters by their names
    export/config.json          the shape in plain numbers; which run and state the weights are
    export/tokenizer.json       the mix's
    export/load.py              plain_model.py: torch, safetensors and tokenizers alone

The weights' bytes are those of the last checkpoint, in files that only order them anew, so that they are never stored
twice where a release is made, and anyone can tell from the checkpoint what must be in them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels.digest import digest_of, tensor_digest
from storage import checkpoint
from storage.assembled import Assembled, Assembly, Span
from storage.checkpoint import PIECE_BYTES, Shapes, parted, safetensors_header, state_shapes
from storage.errors import CheckpointFault, InputFault, Refused
from storage.run import Run
from storage.store import object_digest, sound

FOLDER = "export/"
PROGRAM_KEY = FOLDER + "load.py"
PROGRAM = "storage/plain_model.py"  # in the project, whence it is published with the code
TOKENIZER = "tokenizer.json"  # in the mix, and here
_STATE = "weights/"  # before a parameter's name in a state


def exported(run: Run, program: bytes) -> dict[str, Assembly]:
    """Every object of the last checkpoint's export, by key; none where there is no checkpoint. program: the bytes of
    PROGRAM."""
    made = _steps(run)
    return exported_at(run, made[-1], program) if made else {}


def write_export(run: Run, step: int, folder: Path) -> None:
    """Write a checkpoint's export, without the program, into a folder of this machine; InputFault for a tokenizer that
    is not the mix's."""
    made = exported_at(run, step, b"")
    store = Assembled("export", made)
    for key in made.keys() - {PROGRAM_KEY}:
        with (folder / key.removeprefix(FOLDER)).open("wb") as file:
            for start in range(0, store.size(key), PIECE_BYTES):
                file.write(store.read_range(key, start, min(PIECE_BYTES, store.size(key) - start)))
    check_tokenizer((folder / TOKENIZER).read_bytes(), config_of(run, step))


def chosen_step(run: Run, step: int | None) -> int:
    """The checkpoint after so many steps, the last one for None; Refused where there is none."""
    made = _steps(run)
    if not made or step not in (None, *made):
        raise Refused(
            f"{run.store.uri} has no checkpoint {'' if step is None else step}; it has {made or 'none'}",
            next_step="choose one of these with --step",
        )
    return made[-1] if step is None else step


def check_tokenizer(data: bytes, config: Mapping[str, Any]) -> None:
    """InputFault unless it is the tokenizer that an export's config names."""
    if (found := object_digest(data)) != (expected := config.get("tokenizer")):
        raise InputFault(
            f"{TOKENIZER} has digest {found}, the model was trained with {expected}",
            cause="the tokenizer is another model's, or was edited",
            next_step="take it from the release that the weights are from",
        )


def _steps(run: Run) -> list[int]:
    return [step for step in checkpoint.steps(run.store) if step <= len(run.ledger)]


def exported_at(run: Run, step: int, program: bytes) -> dict[str, Assembly]:
    """exported() of the checkpoint after so many steps.

    Reads its weights and verifies them; CheckpointFault if they are not the ledger's.
    """
    tokenizer = run.stream.manifest.mix.tokenizer
    key = run.stream.base + TOKENIZER
    span = Span(run.stream.store, key, 0, run.stream.store.size(key))
    config = (json.dumps(config_of(run, step), indent=1) + "\n").encode()
    return _weights(run, step) | {
        FOLDER + "config.json": Assembly.of(config),
        FOLDER + TOKENIZER: Assembly((span,), tokenizer.digest),
        PROGRAM_KEY: Assembly.of(program),
    }


def config_of(run: Run, step: int) -> dict[str, Any]:
    """Plain values. attention_windows: how many tokens a query of each layer sees, its own included; tokenizer: the
    digest of its file."""
    m, tokenizer = run.spec.model, run.stream.manifest.mix.tokenizer
    return {
        "run": run.ledger.run_id,
        "name": run.spec.name,
        "step": step,
        "state_root": run.ledger.state_root(step),
        "dtype": "float32",
        "vocab": m.vocab,
        "d_model": m.d_model,
        "layers": m.layers,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "ffn": m.ffn,
        "seq_len": m.seq_len,
        "attention_windows": [m.seq_len if m.is_full(layer) else m.window for layer in range(m.layers)],
        "rope_theta": m.rope_theta,
        "norm_eps": float(m.norm_eps),
        "end_of_text": tokenizer.end_of_text,
        "tokenizer": tokenizer.digest,
    }


def _weights(run: Run, step: int) -> dict[str, Assembly]:
    """The weight files: a header, then each tensor where it lies in the checkpoint."""
    manifest = checkpoint.load_manifest(run.store, run.ledger, step)
    places, shapes = _places(run, manifest), run.spec.model.shapes()
    groups, found = parted(shapes), {}
    for number, names in enumerate(groups, 1):
        part = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        header = safetensors_header(names, shapes)
        spans = [places[_STATE + name] for name in names]
        tensors = (_verified(places[_STATE + name], name, shapes, manifest) for name in names)
        digest = digest_of(_before(header, tensors), "object")
        found[f"{FOLDER}model{part}.safetensors"] = Assembly((header, *spans), digest)
    return found


def _before(header: bytes, tensors: Iterator[bytes]) -> Iterator[bytes]:
    yield header
    yield from tensors


def _places(run: Run, manifest: checkpoint.Manifest) -> dict[str, Span]:
    """Where each tensor of a state lies."""
    shapes, places = state_shapes(run.spec.model), {}
    for part in manifest.parts:
        start = len(safetensors_header(part.tensors, shapes))
        for name in part.tensors:
            size = 4 * int(np.prod(shapes[name], dtype=np.int64))
            places[name] = Span(run.store, checkpoint.object_key(part.digest), start, size)
            start += size
    return places


def _verified(place: Span, name: str, shapes: Shapes, manifest: checkpoint.Manifest) -> bytes:
    """A parameter's bytes; CheckpointFault unless they are what the checkpoint's manifest says of it."""
    return sound(place.store, place.key, lambda copy: _checked(replace(place, store=copy), name, shapes, manifest))


def _checked(place: Span, name: str, shapes: Shapes, manifest: checkpoint.Manifest) -> bytes:
    data = place.take(0, len(place))
    found = tensor_digest(_STATE + name, np.frombuffer(data, "<f4").reshape(shapes[name]))
    if found != (expected := manifest.tensors[_STATE + name]):
        raise CheckpointFault(
            f"{place.store.uri}: {place.key}: tensor {_STATE + name} has digest {found}, checkpoint {manifest.step} "
            f"demands {expected}",
            cause="the disk or a copy damaged it, or someone edited it",
            next_step=f"rm {place.key} and the checkpoints that name it, train again, publish again",
        )
    return data
