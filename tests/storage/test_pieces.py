"""Openings and audits of parts of a step, of a real model: what each finds, and what it leaves to the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from storage import checkpoint, engine
from storage.advance import advance
from storage.audit import again, confirm
from storage.audit.certificate import Beacon, Body, Certificate, piece_proof, sign, verify
from storage.audit.fingerprints import PRIME, check_size, chosen_tensor, fingerprints
from storage.audit.keys import Key, load_or_create_key
from storage.audit.open import open_step
from storage.audit.opened import is_open, opening_key
from storage.audit.opening import Opening, load_gradient, load_opening
from storage.audit.pieces import PROVES, audit_piece
from storage.audit.proofs import check_proofs
from storage.audit.release import check_release
from storage.audit.replay import audit_step
from storage.audit.verdict import AuditProgress, Outcome
from storage.errors import CertificateFault, Divergence, InputFault, MachineFault, Refused
from storage.mirrors import open_copies
from storage.publish import publish
from storage.run import Run, open_release
from storage.store import LocalStore, object_digest
from storage.stream import Stream
from tests.storage import small
from tests.storage.conftest import Small, flip
from tests.storage.opened import BEACON, MATCHES, PIECES, STEP, UNITS, draw_from, drawn, outcomes, verdicts
from tests.storage.test_audit import republished


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Eight steps of a real model, two units each, with checkpoints 0, 5 and 8; published."""
    made = Small(tmp_path_factory.mktemp("pieces"))
    small.begin(made.folder, made.store, made.mix)
    made.train(8)
    publish(made.store, made.mix, made.published, made.key)
    return made


@pytest.fixture(scope="module", autouse=True)
def _self_test_once() -> Iterator[None]:
    """The vectors, and a fresh process for a no-match, take longer than all of these audits; test_audit_machine.py is
    about them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "self_test", lambda backend, report: None)
        patch.setattr(confirm, "repeat", again.found)
        yield


@pytest.fixture(scope="module")
def opened(trained: Small, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The same, step 6 opened for the draw of one date."""
    folder = tmp_path_factory.mktemp("opened") / "run"
    shutil.copytree(trained.folder, folder)
    made = Small(folder)
    open_step(made.published, STEP, drawn(made), "cpu")
    return made


@pytest.fixture
def made(opened: Small, tmp_path: Path) -> Small:
    """A copy of it that a test may damage."""
    shutil.copytree(opened.folder, tmp_path / "made")
    return Small(tmp_path / "made")


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


def test_every_piece_of_an_honest_step_matches(made: Small, auditor: Key) -> None:
    for folder in ("run", "mix", "sources"):  # from what was published alone
        (made.folder / folder).rename(made.folder / f"hidden-{folder}")
    found = verdicts(made, auditor)
    assert outcomes(found) == MATCHES, [verdict.detail for verdict in found.values()]
    ledger = made.release().ledger
    for piece, verdict in found.items():
        assert verdict.certificate and verdict.exit_code == 0
        assert verdict.document()["explanation"] == PROVES[piece.split()[2]]
        body = verify(verdict.certificate, ledger, piece).body
        assert (body.verdict, body.step, body.draw, body.beacon) == ("match", STEP, drawn(made).reference(), BEACON)
        assert body.recorded == body.reproduced


def test_an_opening_holds_what_it_says(opened: Small) -> None:
    run = opened.release()
    found = load_opening(run, STEP)
    assert checkpoint.steps(opened.opened) == [6, 7]
    assert found.fingerprints.shape == (UNITS, len(run.spec.model.shapes()))
    gradient, _ = replayed(run)
    sums = [sum(column) % PRIME for column in found.fingerprints.T.tolist()]
    assert sums == fingerprints(gradient, BEACON.value, STEP)
    assert found.opening.tensor == chosen_tensor(list(gradient), BEACON.value, STEP)


def test_a_release_is_verified_and_published_again_beside_what_was_opened(made: Small) -> None:
    """The release lists none of it, and never changes; what is no part of an opening is as unlisted as ever."""
    before = made.published.read("RELEASE.json")
    check_release(made.published)
    made.published.delete("RELEASE.json")
    publish(made.store, made.mix, made.published, made.key)
    assert made.published.read("RELEASE.json") == before
    made.opened.create("openings/notes.txt", b"not an opening")
    with pytest.raises(InputFault, match=r"holds opened/openings/notes.txt, which RELEASE.json does not list"):
        check_release(made.published)


def test_pieces_are_audited_from_several_copies(trained: Small, made: Small, auditor: Key) -> None:
    """The first copy has no opening and lacks a window's file; the second has both."""
    first = made.folder / "first"
    shutil.copytree(trained.published.root, first)
    for window in LocalStore(first).list("mix/windows/"):
        LocalStore(first).delete(window)
    copies = open_copies([str(first), str(made.published.root)])
    found = {piece: audit_piece(copies, piece, drawn(made), "cpu", auditor) for piece in PIECES}
    assert outcomes(found) == MATCHES, [verdict.detail for verdict in found.values()]
    assert {copy.store for copy in found[PIECES[0]].bad_copies} == {LocalStore(first).uri}
    assert audit_step(copies, STEP, "cpu", auditor).compared == (6,)


def test_proofs_of_pieces_are_made_again(made: Small, auditor: Key) -> None:
    ledger = made.release().ledger
    bodies = [verify(found.certificate or b"", ledger).body for found in verdicts(made, auditor).values()]
    check_proofs(made.published, bodies, "cpu")
    for change, said in (
        ({"proof": "5" * 64}, "its proof of replay of step 6 unit 0 is 5555"),
        ({"recorded": "5" * 64, "verdict": "no-match"}, "was not opened as it says"),
        ({"reproduced": "5" * 64, "verdict": "no-match"}, "it claims 5555"),
    ):
        invented = verify(sign(Body.model_validate(dict(bodies[0]) | change), auditor), ledger).body
        with pytest.raises(CertificateFault, match=said):
            check_proofs(made.published, [invented], "cpu")


def replayed(run: Run, step: int = STEP) -> tuple[dict[str, np.ndarray], engine.State]:
    """(the summed gradient of the step, the state after it)."""
    gradient: dict[str, np.ndarray] = {}
    state = checkpoint.load(run.store, run.ledger, 5)
    while state.step <= step:
        advance(run, engine.load_backend("cpu"), state, take=gradient.update)
    return gradient, state


@pytest.mark.parametrize("backend", ["cpu", "generic:cpu", "reference"])
def test_an_opening_is_the_same_whoever_makes_it(trained: Small, opened: Small, tmp_path: Path, backend: str) -> None:
    shutil.copytree(trained.folder, tmp_path / "again")
    again = Small(tmp_path / "again")
    open_step(again.published, STEP, drawn(again), backend)
    assert added(again, trained) == added(opened, trained)
    assert len(added(again, trained)) >= 3


def added(made: Small, before: Small) -> dict[str, bytes]:
    """What the opening wrote into the published store."""
    return {key: made.published.read(key) for key in made.published.list() if key not in before.published.list()}


def test_an_audit_of_the_step_begins_at_the_opening(opened: Small, trained: Small, auditor: Key) -> None:
    assert audit_step(trained.published, STEP, "cpu", auditor).compared == (5, 6)
    assert audit_step(opened.published, STEP, "cpu", auditor).compared == (6,)
    assert audit_step(opened.published, 7, "cpu", auditor).compared == (7,)


def test_opening_again_changes_nothing(made: Small) -> None:
    before = {key: made.published.read(key) for key in made.published.list()}
    reports: list[AuditProgress] = []
    open_step(made.published, STEP, drawn(made), "cpu", reports.append)
    assert {key: made.published.read(key) for key in made.published.list()} == before
    assert not [report for report in reports if report.stage in ("replay", "unit")]


def test_an_interrupted_opening_goes_on_from_the_state(made: Small) -> None:
    """Without its manifest an opening is not there; the state before the step is, so nothing is replayed to it."""
    before = {key: made.published.read(key) for key in made.published.list()}
    for key in (opening_key(STEP), checkpoint.checkpoint_key(7)):
        made.opened.delete(key)
    reports: list[AuditProgress] = []
    open_step(made.published, STEP, drawn(made), "cpu", reports.append)
    assert {key: made.published.read(key) for key in made.published.list()} == before
    assert [report.step for report in reports if report.stage == "replay"] == [STEP]


def test_not_opened_and_not_drawn_are_refused(trained: Small, made: Small, auditor: Key) -> None:
    verdict = audit_piece(trained.published, PIECES[0], drawn(made), "cpu", auditor)
    assert verdict.exit_code == 13 and "was not opened" in verdict.detail and "verbatim open" in verdict.detail
    draw = drawn(made)
    with pytest.raises(Refused, match="did not choose step 6"):
        open_step(trained.published, STEP, draw.model_copy(update={"steps": [1, 2]}), "cpu")
    with pytest.raises(Refused, match="records steps 0 to 7"):
        open_step(trained.published, 8, draw, "cpu")


def test_another_draw_than_it_was_opened_for_is_refused(made: Small, auditor: Key) -> None:
    """Else whoever opens could choose the coefficients, and with them what they do not see."""
    other = drawn(made, "2026-11-30", Beacon(scheme="file", round=2, value="1" * 64))
    verdict = audit_piece(made.published, PIECES[2], other, "cpu", auditor)
    assert verdict.exit_code == 13 and "opened for the draw of 2026-11-29" in verdict.detail
    second = LocalStore(made.folder / "second")
    shutil.copytree(made.published.root, second.root)
    opening = load_opening(made.release(), STEP).opening.model_copy(update={"draw": other.reference()})
    made.opened.path(opening_key(STEP)).write_bytes(opening.canonical())
    copies = open_copies([made.published.uri, second.uri])
    found = audit_piece(copies, PIECES[0], drawn(made), "cpu", auditor)  # by the opening beside the second copy
    assert found.outcome is Outcome.MATCH
    assert [(copy.store, copy.key) for copy in found.bad_copies] == [(made.opened.uri, opening_key(STEP))]


@pytest.mark.parametrize("unit", [2, 17, 4096])
def test_a_unit_that_is_not_there_is_refused(opened: Small, auditor: Key, unit: int) -> None:
    verdict = audit_piece(opened.published, f"step {STEP} unit {unit}", drawn(opened), "cpu", auditor)
    assert verdict.exit_code == 13 and "its 2 units are 0 to 1" in verdict.detail


def damaged(made: Small, change: dict[str, Any]) -> None:
    """Another opening in the place of the published one."""
    path = made.opened.path(opening_key(STEP))
    opening = Opening.parse(path.read_bytes(), "opening")
    path.write_bytes(Opening(**(opening.model_dump() | change)).canonical())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": "0" * 64}, "its run is 000"),
        ({"step": 5}, "its step is 5, expected 6"),
        ({"nll": [1]}, "its number of units is (1, 2), expected (2, 2)"),
        ({"tensor": "head' OR 1=1"}, "its tensor is head' OR 1=1"),
        ({"fingerprints": "0" * 64}, f"there is no objects/{'0' * 64}"),
        ({"gradient": "0" * 64}, f"there is no objects/{'0' * 64}"),
    ],
)
def test_an_opening_that_cannot_be_this_steps(made: Small, auditor: Key, change: dict[str, Any], said: str) -> None:
    damaged(made, change)
    verdict = audit_piece(made.published, f"step {STEP} sum", drawn(made), "cpu", auditor)
    assert (verdict.exit_code, verdict.certificate) == (11, None) and said in verdict.detail, verdict.detail


def put(made: Small, data: bytes) -> str:
    """Store an object; its digest."""
    digest = object_digest(data)
    made.opened.create(checkpoint.object_key(digest), data)
    return digest


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "holds 0 bytes"),
        (b"\0" * 8 * 25, "holds 200 bytes"),
        (b"\xff" * 8 * UNITS * 12, "a fingerprint is 18446744073709551615"),
    ],
)
def test_a_table_of_fingerprints_that_is_none(made: Small, auditor: Key, data: bytes, said: str) -> None:
    damaged(made, {"fingerprints": put(made, data)})
    verdict = audit_piece(made.published, f"step {STEP} unit 0", drawn(made), "cpu", auditor)
    assert verdict.exit_code == 11 and said in verdict.detail, verdict.detail


@pytest.mark.parametrize("part", ["sum", "update"])
def test_another_gradient_than_the_entrys_is_an_input_fault(made: Small, auditor: Key, part: str) -> None:
    """It proves nothing about the run: the entry says which gradient it is."""
    opened = load_opening(made.release(), STEP)
    gradient = load_gradient(made.release(), opened)
    gradient.reshape(-1)[-1] += 1
    damaged(made, {"gradient": put(made, gradient.tobytes())})
    verdict = audit_piece(made.published, f"step {STEP} {part}", drawn(made), "cpu", auditor)
    assert verdict.exit_code == 11 and f"the gradient of {opened.opening.tensor} has digest" in verdict.detail


def test_a_wrong_fingerprint_is_found_by_unit_and_sum(made: Small, auditor: Key) -> None:
    """Whoever opened the step lied: the pieces do not fit, and the audit of the step says that the entry is right."""
    opened = load_opening(made.release(), STEP)
    table = opened.fingerprints.copy()
    index = sorted(made.release().spec.model.shapes()).index(opened.opening.tensor)
    table[1, index] = (int(table[1, index]) + 1) % PRIME
    damaged(made, {"fingerprints": put(made, table.tobytes())})
    found = verdicts(made, auditor)
    assert outcomes(found) == MATCHES | {"unit 1": "no-match", "sum": "no-match"}
    assert found[f"step {STEP} unit 1"].tensors == (f"gradient/{opened.opening.tensor}",)
    assert "an audit of the whole step says which" in found[f"step {STEP} sum"].detail
    assert audit_step(made.published, STEP, "cpu", auditor).outcome is Outcome.MATCH


@pytest.mark.parametrize(("field", "parts"), [("nll", {"unit 0", "sum"}), ("lse2", {"unit 0", "sum"})])
def test_wrong_losses_are_found_by_unit_and_sum(made: Small, auditor: Key, field: str, parts: set[str]) -> None:
    values = getattr(load_opening(made.release(), STEP).opening, field)
    damaged(made, {field: [values[0] + (1 << 12), *values[1:]]})
    assert outcomes(verdicts(made, auditor)) == MATCHES | dict.fromkeys(parts, "no-match")


def test_a_flipped_bit_in_an_opened_state(made: Small, auditor: Key) -> None:
    manifest = checkpoint.load_manifest(made.opened, made.release().ledger, STEP)
    path = made.opened.path(checkpoint.object_key(manifest.parts[0].digest))
    flip(path, path.stat().st_size - 5)  # in the last tensor, a weight
    assert audit_piece(made.published, f"step {STEP} unit 0", drawn(made), "cpu", auditor).fault == "CheckpointFault"
    whole = audit_step(made.published, STEP, "cpu", auditor)  # from the checkpoint before, the opened state told
    assert (whole.outcome, whole.compared) == (Outcome.MATCH, (5, 6))
    assert [(bad.store, bad.key) for bad in whole.bad_copies] == [(made.opened.uri, checkpoint.checkpoint_key(STEP))]


def test_a_unit_reads_its_windows_and_weights_alone(made: Small, auditor: Key) -> None:
    """Neither moments nor other units' windows are looked at."""
    run, read = made.release(), list[tuple[int, int]]()
    manifest = checkpoint.load_manifest(made.opened, run.ledger, STEP)
    path = made.opened.path(checkpoint.object_key(manifest.parts[0].digest))
    flip(path, 5000)  # a first moment
    original = Stream.windows

    def watched(self: Stream, first: int, count: int) -> np.ndarray:
        read.append((first, count))
        return original(self, first, count)

    with mock.patch.object(Stream, "windows", watched):
        verdict = audit_piece(made.published, f"step {STEP} unit 1", drawn(made), "cpu", auditor)
    assert verdict.outcome is Outcome.MATCH and read == [(run.ledger[STEP].first_window + 1, 1)]


def test_a_certificate_of_a_piece_cannot_be_moved(made: Small, auditor: Key) -> None:
    ledger, ours = made.release().ledger, audit_piece(made.published, PIECES[0], drawn(made), "cpu", auditor)
    assert ours.certificate
    body = Certificate.parse(ours.certificate, "certificate").body
    with pytest.raises(CertificateFault, match="its piece is step 6 unit 0, expected step 6 unit 1"):
        verify(ours.certificate, ledger, PIECES[1])
    changes: list[dict[str, Any]] = [
        {"piece": "step 5 unit 0"}, {"piece": "step 99 unit 0"}, {"piece": "step 6"}, {"step": 5}, {"first_step": 5},
        {"predecessor": "0" * 64}, {"draw": None}, {"beacon": None}, {"reproduced": ledger[STEP]},
        {"reproduced": "0" * 64}, {"run": "0" * 64}, {"piece": "step 6 unit 00"}, {"piece": "step 6 unit"},
    ]  # fmt: skip
    for change in changes:
        forged = sign(Body.model_validate(dict(body) | change), auditor)
        with pytest.raises(CertificateFault):
            verify(forged, ledger)


def test_the_proof_of_a_unit_needs_its_gradient(made: Small, auditor: Key) -> None:
    found = audit_piece(made.published, PIECES[0], drawn(made), "cpu", auditor)
    assert found.certificate
    run, proof = made.release(), Certificate.parse(found.certificate, "certificate").body.proof
    state = checkpoint.load(made.opened, run.ledger, STEP)
    windows = run.stream.windows(run.ledger[STEP].first_window, 2)
    units = engine.each_unit(run.spec, engine.load_backend("cpu"), state.weights, windows)
    proofs = [
        piece_proof(key, run.ledger.run_id, piece, BEACON, {"gradient": unit.sums}, {})
        for unit in units
        for key in (auditor.public, made.key.public)
        for piece in PIECES[:2]
    ]
    assert proofs[0] == proof and len(set(proofs)) == 8


def test_gradients_too_large_for_a_fingerprint_are_refused() -> None:
    check_size({"q": np.array([2**59 - 1])}, 2, 6)
    with pytest.raises(Refused, match="of q reaches 576460752303423488"):
        check_size({"q": np.array([0, -(2**59)])}, 2, 6)


def test_units_that_do_not_make_the_step_are_a_machine_fault(
    trained: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that computes a unit in two ways opens nothing."""
    shutil.copytree(trained.folder, tmp_path / "made")
    made, original = Small(tmp_path / "made"), engine.each_unit

    def unsteady(*arguments: Any) -> Iterator[Any]:
        for unit in original(*arguments):
            unit.sums["head"][0, 0] += 1
            yield unit

    monkeypatch.setattr(engine, "each_unit", unsteady)
    with pytest.raises(MachineFault, match="do not sum to the step"):
        open_step(made.published, STEP, drawn(made), "cpu")
    assert not is_open(made.published, STEP)


def test_a_step_that_the_ledger_has_otherwise_is_not_opened(trained: Small, tmp_path: Path) -> None:
    shutil.copytree(trained.folder, tmp_path / "made")
    made = Small(tmp_path / "made")
    store = republished(made, {"loss": "3f800000"}, at=STEP)
    draw = draw_from(open_release(store).ledger, made)
    with pytest.raises(Divergence, match="step 6 came out differently"):
        open_step(store, STEP, draw, "cpu")
    assert store.list("opened/openings/") == [] and checkpoint.steps(LocalStore(store.root / "opened")) == [STEP]


def test_what_is_damaged_beside_one_copy_is_reported_and_taken_from_beside_another(made: Small, auditor: Key) -> None:
    """The opening's record, its fingerprints, the gradient, the opened states: whatever is bad, all pieces match."""
    second, manifest = (
        LocalStore(made.folder / "second"),
        checkpoint.load_manifest(made.opened, made.run().ledger, STEP),
    )
    shutil.copytree(made.published.root, second.root)
    opening = load_opening(made.release(), STEP).opening
    digests = (opening.fingerprints, opening.gradient, manifest.leaves, manifest.parts[0].digest)
    keys = [opening_key(STEP), checkpoint.checkpoint_key(STEP), *map(checkpoint.object_key, digests)]
    for key in keys:
        path = made.opened.path(key)
        good = path.read_bytes()
        flip(path, len(good) // 2)
        copies = open_copies([made.published.uri, second.uri])
        found = {piece: audit_piece(copies, piece, drawn(made), "cpu", auditor) for piece in PIECES}
        assert outcomes(found) == MATCHES, [verdict.detail for verdict in found.values()]
        reported = {(bad.store, bad.key) for bad in found[PIECES[-1]].bad_copies}
        assert reported == {(made.opened.uri, key)} or (key == keys[-1] and not reported)  # a moment that is not read
        if key == opening_key(STEP):
            alone = audit_piece(made.published, PIECES[0], drawn(made), "cpu", auditor)
            assert (alone.exit_code, alone.certificate) == (11, None)
            flip(LocalStore(second.root / "opened").path(key), 40)
            both = audit_piece(open_copies([made.published.uri, second.uri]), PIECES[0], drawn(made), "cpu", auditor)
            assert both.exit_code == 11 and "sound in none of 2 stores" in both.detail
            flip(LocalStore(second.root / "opened").path(key), 40)
        path.write_bytes(good)


def test_an_opening_that_is_damaged_in_its_only_copy_fails_the_release(made: Small) -> None:
    check_release(made.published)
    gradient = load_opening(made.release(), STEP).opening.gradient
    for key in (opening_key(STEP), checkpoint.checkpoint_key(STEP), checkpoint.object_key(gradient)):
        path = made.opened.path(key)
        good = path.read_bytes()
        flip(path, len(good) // 2)
        with pytest.raises(InputFault):
            check_release(made.published)
        path.write_bytes(good)
