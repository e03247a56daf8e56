"""Certificates: what one key holder replayed, signed, and checkable offline in a second.

    {"body": {…}, "signature": "…"}      canonical JSON; the signature is the auditor's, over the body

`proof` is BLAKE3 keyed by (auditor, run, piece, beacon value) over the bytes of the step's gradient and of the state
after it: only who held them can make it, and whoever replays the step can make it again for any key and compare.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from kernels import canonical
from kernels.digest import DTYPES, digest, keyed
from model.state import State
from storage.audit.keys import Key, verify_signature
from storage.errors import CertificateFault
from storage.figures import Probe
from storage.ledger import Entry, Ledger
from storage.provenance import Provenance
from storage.records import Count, Digest, Record, Signature, Text
from storage.store import Store, object_digest

MAX_CERTIFICATE = 1 << 16
PURPOSE = "certificate"
PIECE = re.compile(r"step (0|[1-9]\d{0,14}) (?:unit (0|[1-9]\d{0,3})|sum|update)", re.ASCII)  # a part of a step
HELD_OUT = re.compile(r"held-out (0|[1-9]\d{0,14})", re.ASCII)  # the losses of a state on held-out windows


class Beacon(Record):
    """A public random value, of a round of one of the schemes of beacon.py."""

    scheme: Text
    round: Count
    value: Digest


class DrawReference(Record):
    """The draw that chose this piece: its date and the digest of its record."""

    date: Text
    record: Digest


class Body(Record):
    """What is claimed. predecessor: digest of the entry before; recorded: of the ledger's; reproduced: what came out.

    For the piece "initial" the predecessor is the run id, and recorded and reproduced are initial state roots. For a
    part of a step (pieces.py) they are digests of what its opening says and of what came out. For "held-out k" they are
    the digest of the record of state k's held-out losses, as a release lists it, and the record that came out.
    """

    kind: Literal["certificate"] = "certificate"
    run: Digest
    piece: Text
    verdict: Literal["match", "no-match"]
    first_step: Count  # state from which the replay began
    step: Count | None  # of the compared entry: the piece's, or the first that did not match on the way
    predecessor: Digest
    recorded: Digest
    reproduced: Entry | Probe | Digest
    mix_root: Digest
    provenance: Provenance
    beacon: Beacon | None
    draw: DrawReference | None
    began: Text
    ended: Text
    proof: Digest
    auditor: Digest


class Certificate(Record):
    """A body and the auditor's signature of it."""

    body: Body
    signature: Signature


def replay_proof(
    auditor: str, run: str, piece: str, beacon: Beacon | None, gradient: dict[str, np.ndarray], state: State
) -> str:
    """The proof of replay that this auditor must show for this step; gradient: int64 sums, empty for a void step."""
    groups = {"gradient": dict(sorted(gradient.items())), "state": state.tensors()}
    return piece_proof(auditor, run, piece, beacon, groups, state.scalars())


def piece_proof(
    auditor: str,
    run: str,
    piece: str,
    beacon: Beacon | None,
    groups: Mapping[str, Mapping[str, np.ndarray]],
    scalars: Mapping[str, Any],
) -> str:
    """The proof over tensors by group and name, in the order given, and scalars."""
    name = {"auditor": auditor, "beacon": beacon.value if beacon else "", "piece": piece, "run": run}
    key = bytes.fromhex(digest(canonical.dumps(name), "proof of replay"))
    return keyed(key, _material(groups, scalars))


def _material(
    groups: Mapping[str, Mapping[str, np.ndarray]], scalars: Mapping[str, Any]
) -> Iterator[bytes | memoryview]:
    """Names, shapes and little-endian bytes of the tensors, then the scalars."""
    for group, tensors in groups.items():
        for name, array in tensors.items():
            yield canonical.dumps([group, name, array.dtype.name, list(array.shape)])
            array = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name])
            yield memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    yield canonical.dumps(dict(scalars))


def sign(body: Body, key: Key) -> bytes:
    """The certificate's bytes."""
    return Certificate(body=body, signature=key.sign(body.canonical(), PURPOSE)).canonical()


def verify(data: bytes, ledger: Ledger, piece: str | None = None) -> Certificate:
    """Check a certificate against a ledger, without replaying anything; CertificateFault says what is wrong.

    piece: what it is said to be about ("step 17", "initial"), where the caller knows. That the proof of replay is
    right can only be told by replaying.
    """
    if len(data) > MAX_CERTIFICATE:
        raise CertificateFault(f"certificate: {len(data)} bytes, at most {MAX_CERTIFICATE} are allowed")
    certificate = Certificate.parse(data, "certificate", CertificateFault)
    check(certificate, ledger, piece)
    return certificate


def check(certificate: Certificate, ledger: Ledger, piece: str | None = None) -> Body:
    """What verify() checks of a certificate whose bytes were parsed; its body."""
    body = certificate.body
    if not verify_signature(body.auditor, certificate.signature, body.canonical(), PURPOSE):
        raise CertificateFault(
            f"certificate: the signature is not that of key {body.auditor} over this content",
            cause="a byte was changed, or the content was moved to another run, step or key",
            next_step="get it again from the auditor",
        )
    _require("run", body.run, ledger.run_id)
    _require("piece", body.piece, body.piece if piece is None else piece)
    _require("mix root", body.mix_root, ledger.header.mix_root)
    _require("contract", body.provenance.contract, ledger.header.spec.get("contract"))
    _require("conformance digest", body.provenance.conformance, ledger.header.spec.get("vectors"))
    if body.piece == "initial":
        _check_initial(body, ledger)
    elif PIECE.fullmatch(body.piece):
        _check_part(body, ledger)
    elif HELD_OUT.fullmatch(body.piece):
        _check_held_out(body, ledger)
    else:
        _check_step(body, ledger)
    return body


def check_own(bodies: Iterable[Body]) -> None:
    """CertificateFault where two auditors show one proof of replay: it is keyed by the auditor, so one copied it."""
    shown: dict[str, str] = {}
    for body in bodies:
        if (other := shown.setdefault(body.proof, body.auditor)) != body.auditor:
            raise CertificateFault(
                f"certificate: keys {other} and {body.auditor} show the same proof of replay {body.proof}",
                cause="one of them signed what the other had replayed",
                next_step="replay the piece and make the proof for both keys: it is the copy's that differs",
            )


def _check_initial(body: Body, ledger: Ledger) -> None:
    _require("step", body.step, None)
    _require("predecessor", body.predecessor, ledger.run_id)
    _require("recorded initial root", body.recorded, ledger.header.initial_root)
    _require("verdict", body.verdict, "match" if body.reproduced == body.recorded else "no-match")


def _check_part(body: Body, ledger: Ledger) -> None:
    step = int(body.piece.split()[1])
    if step >= len(ledger):
        raise CertificateFault(f"certificate: about step {step}, the ledger holds {len(ledger)} steps")
    _require("step", (body.first_step, body.step), (step, step))
    _require("predecessor", body.predecessor, ledger.link(step))
    if body.draw is None or body.beacon is None or not isinstance(body.reproduced, str):
        raise CertificateFault(f"certificate: {body.piece} without the draw that chose it, or with a whole entry")
    _require("verdict", body.verdict, "match" if body.reproduced == body.recorded else "no-match")


def _check_held_out(body: Body, ledger: Ledger) -> None:
    step, found = int(body.piece.split()[1]), body.reproduced
    if not isinstance(found, Probe):
        raise CertificateFault(f"certificate: {body.piece} without the losses that came out")
    if step > len(ledger):
        raise CertificateFault(f"certificate: about state {step}, the ledger holds {len(ledger)} steps")
    _require("step", (body.first_step, body.step, found.step), (step, None, step))
    _require("predecessor", body.predecessor, ledger.link(step))
    _require("state root", found.state, ledger.state_root(step))
    _require("held-out root", found.held_out_root, ledger.header.held_out_root)
    same = object_digest(found.canonical()) == body.recorded
    _require("verdict", body.verdict, "match" if same else "no-match")


def _check_step(body: Body, ledger: Ledger) -> None:
    piece, step, found = body.piece, body.step, body.reproduced
    if not isinstance(found, Entry) or step is None or piece != f"step {_number(piece)}":
        raise CertificateFault(f"certificate: piece {piece!r} and its entry do not belong together")
    if step >= len(ledger):
        raise CertificateFault(f"certificate: about step {step}, the ledger holds {len(ledger)} steps")
    _require("reproduced step", found.step, step)
    _require("predecessor", body.predecessor, ledger.link(step))
    _require("recorded entry", body.recorded, ledger.link(step + 1))
    same = found == ledger[step]
    _require("verdict", body.verdict, "match" if same else "no-match")
    if not body.first_step <= step <= _number(piece) or (same and step != _number(piece)):
        raise CertificateFault(f"certificate: it compares step {step} from state {body.first_step}, but claims {piece}")


def _number(piece: str) -> int:
    text = piece.removeprefix("step ")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1


def _require(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        shown = found if isinstance(found, str) and found.isprintable() else repr(found)  # never lines of a stranger's
        raise CertificateFault(
            f"certificate: its {what} is {shown[:200]}, expected {expected}",
            cause="it belongs to another run or step, or claims what it does not show",
        )


def certificate_key(data: bytes, body: Body) -> str:
    """A name of its own for a certificate: piece, auditor, digest."""
    return f"certificates/{body.piece.replace(' ', '-')}-{body.auditor[:16]}-{digest(data, PURPOSE)[:16]}.json"


def save_certificate(store: Store, data: bytes) -> str:
    """Write a certificate; its key."""
    key = certificate_key(data, Certificate.parse(data, "certificate", CertificateFault).body)
    store.create(key, data)
    return key
