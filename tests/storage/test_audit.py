"""Audits from the published store alone: five verdicts, each for its own reason."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.digest import root
from storage import checkpoint, engine
from storage.advance import advance
from storage.audit.beacon import Value
from storage.audit.certificate import Certificate, replay_proof, verify
from storage.audit.confirm import Finding
from storage.audit.draw import make_draw
from storage.audit.keys import Key, load_or_create_key
from storage.audit.replay import audit_initial, audit_step
from storage.audit.statement import Statement, announce
from storage.audit.verdict import AuditProgress, Outcome, Verdict
from storage.beside import StepDigests, digests_key, load_digests
from storage.errors import InputFault
from storage.ledger import HEADER_KEY, Entry, part_key, trajectory_root
from storage.publish import publish
from storage.release import PURPOSE, RELEASE_KEY, Release, ReleaseBody, grouped
from storage.run import Run
from storage.store import LocalStore, MemoryStore
from tests.storage import small
from tests.storage.conftest import Small, flip
from tests.storage.drawn import DATE, Known, at
from tests.storage.test_draw import BEACON


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


def lonely(made: Small) -> LocalStore:
    """The published store, with everything else of the run gone."""
    for folder in ("run", "mix", "sources"):
        if (made.folder / folder).exists():
            (made.folder / folder).rename(made.folder / f"hidden-{folder}")
    return made.published


def test_match(made: Small, auditor: Key) -> None:
    store, reports = lonely(made), list[AuditProgress]()
    verdict = audit_step(store, 8, "cpu", auditor, report=reports.append)
    assert (verdict.outcome, verdict.exit_code, verdict.piece) == (Outcome.MATCH, 0, "step 8")
    assert verdict.compared == (5, 6, 7, 8) and verdict.fields == verdict.tensors == ()
    stages = [report.stage for report in reports]
    assert stages[2].startswith("needs 0.") and " GB are free" in stages.pop(2)
    assert stages == ["self-test", "ledger", "checkpoint"] + ["replay"] * 4
    assert verdict.certificate and verify(verdict.certificate, made.release().ledger, "step 8").body.verdict == "match"
    assert verdict.document()["verdict"] == "match" and verdict.seconds > 0


@pytest.mark.parametrize("step", [0, 5, 11])
def test_first_checkpointed_and_last_step(made: Small, auditor: Key, step: int) -> None:
    verdict = audit_step(made.published, step, "cpu", auditor)
    assert verdict.outcome is Outcome.MATCH and verdict.compared[-1] == step and verdict.compared[0] in (0, 5, 10)


def test_initial_state(made: Small, auditor: Key) -> None:
    verdict = audit_initial(lonely(made), "cpu", auditor)
    assert (verdict.outcome, verdict.piece) == (Outcome.MATCH, "initial")
    assert "the weights before the first step have the recorded root" in verdict.document()["explanation"]
    assert verdict.certificate and verify(verdict.certificate, made.release().ledger, "initial").body.step is None


def test_other_initial_weights(made: Small, auditor: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine.initial_state

    def other(spec: Any, backend: Any) -> Any:
        state = original(spec, backend)
        state.weights["final_norm"][0] += 1
        return state

    monkeypatch.setattr(engine, "initial_state", other)
    verdict = audit_initial(made.published, "cpu", auditor)
    assert (verdict.outcome, verdict.fields, verdict.tensors) == (
        Outcome.NO_MATCH, ("initial_root",), ("weights/final_norm",),
    )  # fmt: skip
    assert verdict.certificate and verify(verdict.certificate, made.release().ledger).body.verdict == "no-match"


def test_a_forged_initial_root_is_no_match_whatever_checkpoint_0_says(begun: Small, auditor: Key) -> None:
    header = begun.run().ledger.header.model_copy(update={"initial_root": "0" * 64})
    begun.store.path(HEADER_KEY).write_bytes(header.canonical())
    publish(begun.store, begun.mix, begun.published, begun.key)
    begun.published.create("checkpoints/00000000.json", b"{}")
    verdict = audit_initial(begun.published, "cpu", auditor)
    assert (verdict.outcome, verdict.tensors, verdict.fields) == (Outcome.NO_MATCH, (), ("initial_root",))


def test_a_state_that_cannot_fit_is_refused_before_it_is_allocated(made: Small, auditor: Key) -> None:
    header = made.run().ledger.header
    model = dict(header.spec["model"], d_model=131_071, layers=1000, ffn=65_535)
    header = header.model_copy(update={"spec": header.spec | {"model": model}})
    target = LocalStore(made.folder / "giant")
    shutil.copytree(made.folder / "mix", target.root / "mix")
    target.create(HEADER_KEY, header.canonical())
    body = ReleaseBody(run=header.digest(), head=header.digest(), steps=0, mix_root=header.mix_root,
                       trajectory_root=trajectory_root(header.initial_root, []), classes=grouped({}),
                       code=header.code, lock=header.lock, declared_code=True, declared_lock=True)  # fmt: skip
    release = Release(body=body, signature=made.key.sign(body.canonical(), PURPOSE))
    target.create(RELEASE_KEY, release.canonical())
    verdict = audit_initial(target, "cpu", auditor)
    assert verdict.outcome is Outcome.REFUSED and "GB by the leanest plan, this machine offers" in verdict.detail


def test_no_match_names_fields_and_tensors(made: Small, auditor: Key) -> None:
    with small.stand_in(flaw=7):
        verdict = audit_step(made.published, 7, "cpu", auditor)
    assert (verdict.exit_code, verdict.differs_at, verdict.fields) == (10, 7, ("state",))
    assert verdict.tensors == ("weights/head",) and "weights/head" in verdict.detail
    assert verdict.certificate
    body = verify(verdict.certificate, made.release().ledger, "step 7").body
    assert isinstance(body.reproduced, Entry) and body.verdict == "no-match"
    assert body.reproduced.state != made.release().ledger[7].state


def test_no_match_on_the_way(made: Small, auditor: Key) -> None:
    with small.stand_in(flaw=6):
        verdict = audit_step(made.published, 9, "cpu", auditor)
    assert (verdict.piece, verdict.differs_at, verdict.compared) == ("step 9", 6, (5, 6))
    assert verdict.certificate and verify(verdict.certificate, made.release().ledger, "step 9").body.step == 6


def test_forged_but_well_linked_step_is_found(begun: Small, auditor: Key) -> None:
    """A trainer who edits one step and links everything after it anew gets past every check but the replay."""
    with small.stand_in(flaw=7):
        begun.train()
    publish(begun.store, begun.mix, begun.published, begun.key)
    assert audit_step(begun.published, 4, "cpu", auditor).outcome is Outcome.MATCH
    assert audit_step(begun.published, 11, "cpu", auditor).outcome is Outcome.MATCH
    for step in (7, 8, 9):
        verdict = audit_step(begun.published, step, "cpu", auditor)
        assert (verdict.exit_code, verdict.differs_at, verdict.tensors) == (10, 7, ("weights/head",))


def republished(made: Small, change: dict[str, Any], at: int) -> LocalStore:
    """A release whose entry `at` was edited, with all later entries linked to it anew, signed by the trainer."""
    run = made.run()
    entries = list(run.ledger)
    entries[at] = entries[at].model_copy(update=change)
    for step in range(at, len(entries)):
        previous = entries[step - 1].digest() if step else run.ledger.run_id
        entries[step] = entries[step].model_copy(update={"previous": previous})
        made.store.path(part_key(step)).write_bytes(entries[step].canonical() + b"\n")
    if "gradient" in change:  # an honest publisher would find that these no longer belong to the entry
        made.store.delete(digests_key(at))
    target = LocalStore(made.folder / "again")
    publish(made.store, made.mix, target, made.key)
    return target


@pytest.mark.parametrize("names", [["x" * 5000], [f"{number:0100}" for number in range(20_000)]])
def test_a_forger_cannot_drown_a_no_match_in_names(made: Small, auditor: Key, names: list[str]) -> None:
    """Digests are proven by the entry alone, so who forges the entry may name there what he likes."""
    honest = load_digests(made.store, made.run().ledger[6])
    forged = honest.model_copy(update={"tensors": honest.tensors | dict.fromkeys(names, "0" * 64)})
    made.store.path(digests_key(6)).write_bytes(forged.canonical())
    store = republished(made, {"state": root(forged.tensors, forged.scalars)}, at=6)
    verdict = audit_step(store, 6, "cpu", auditor)
    assert (verdict.exit_code, verdict.fields, verdict.tensors) == (10, ("state",), ()), verdict.detail[:1000]
    assert verdict.certificate and len(Finding.of(verdict).canonical()) < 1000


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_a_record_nested_too_deep_is_an_input_fault(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    data = f'{{"gradient":{{}},"kind":"digests","scalars":{{"a":{nested}}},"step":1,"tensors":{{}}}}'
    with pytest.raises(InputFault, match="somewhere: "):
        StepDigests.parse(data.encode(), "somewhere")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lr": "3a83126f"}, "lr"), ({"batch": "0" * 64}, "batch"), ({"tokens": 99}, "tokens"),
        ({"windows": 4}, "windows"),
        ({"first_window": 3}, "first_window"), ({"event": "spike"}, "event"), ({"clipped": False}, "clipped"),
        ({"grad_norm": "40e00000"}, "event"), ({"gradient": None}, "gradient"),
    ],
)  # fmt: skip
def test_cheap_checks_find_what_spec_and_mix_contradict(
    made: Small, auditor: Key, change: dict[str, Any], field: str
) -> None:
    verdict = audit_step(republished(made, change, at=3), 11, "cpu", auditor)
    assert (verdict.exit_code, verdict.differs_at, verdict.fields) == (10, 3, (field,)), verdict.detail
    assert verdict.certificate is None


def test_forged_loss_needs_the_replay(made: Small, auditor: Key) -> None:
    store = republished(made, {"loss": "3f800000"}, at=3)
    assert audit_step(store, 11, "cpu", auditor).outcome is Outcome.MATCH
    assert audit_step(store, 3, "cpu", auditor).fields == ("loss",)


def faulty(verdict: Verdict, fault: str, *named: str) -> None:
    assert (verdict.outcome, verdict.exit_code, verdict.fault) == (Outcome.INPUT_FAULT, 11, fault), verdict.detail
    assert all(name in verdict.detail for name in named), verdict.detail
    assert verdict.certificate is None


def test_flipped_bit_in_a_checkpoint_tensor(made: Small, auditor: Key) -> None:
    part = checkpoint.load_manifest(made.published, made.release().ledger, 5).parts[0].digest
    flip(made.published.path(f"objects/{part}"), 50_000)
    verdict = audit_step(made.published, 8, "cpu", auditor)
    faulty(verdict, "CheckpointFault", "checkpoint 5", "tensor ", "leaf ", "rows ")
    assert audit_step(made.published, 11, "cpu", auditor).outcome is Outcome.MATCH


def test_flipped_bit_in_a_ledger_entry(made: Small, auditor: Key) -> None:
    path = made.published.path(part_key(6))
    flip(path, path.read_bytes().index(b'"loss":"4') + 9)
    faulty(audit_step(made.published, 8, "cpu", auditor), "LedgerFault", "entry 6 was changed")


def test_flipped_bit_in_the_last_ledger_entry(made: Small, auditor: Key) -> None:
    path = made.published.path(part_key(11))
    flip(path, path.read_bytes().index(b'"loss":"4') + 9)
    faulty(audit_step(made.published, 8, "cpu", auditor), "InputFault", "RELEASE.json", "head")


def test_cut_off_ledger(made: Small, auditor: Key) -> None:
    made.published.path(part_key(11)).unlink()
    faulty(audit_step(made.published, 8, "cpu", auditor), "InputFault", "number of steps is 12, the ledger's is 11")


def test_flipped_bit_in_a_window(made: Small, auditor: Key) -> None:
    for path in made.published.root.rglob("mix/windows/*/train/*.arrow"):
        flip(path, path.stat().st_size // 2)
    verdicts = [audit_step(made.published, step, "cpu", auditor) for step in range(12)]
    wrong = [verdict for verdict in verdicts if verdict.outcome is not Outcome.MATCH]
    assert wrong
    for verdict in wrong:
        faulty(verdict, "WindowFault", "mix/windows/", "window ", "leaf")


def test_flipped_bit_in_the_manifest_or_release(made: Small, auditor: Key) -> None:
    for key in ("mix/manifest.json", RELEASE_KEY):
        path = made.published.path(key)
        good = path.read_bytes()
        flip(path, len(good) // 2)
        verdict = audit_step(made.published, 8, "cpu", auditor)
        assert verdict.exit_code == 11 and key in verdict.detail
        path.write_bytes(good)


def test_flipped_bit_in_unneeded_digests_does_not_matter_to_a_match(made: Small, auditor: Key) -> None:
    flip(made.published.path("digests/00000008.json"), 700)
    assert audit_step(made.published, 8, "cpu", auditor).outcome is Outcome.MATCH
    with small.stand_in(flaw=8):
        verdict = audit_step(made.published, 8, "cpu", auditor)
    assert (verdict.exit_code, verdict.fields, verdict.tensors) == (10, ("state",), ())


def test_machine_fault_at_self_test(made: Small, auditor: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_self_test", lambda backend, report: ["norm_rows/3"])
    verdict = audit_step(made.published, 8, "cpu", auditor)
    assert (verdict.exit_code, verdict.certificate) == (12, None) and "norm_rows/3" in verdict.detail


def test_machine_that_disagrees_with_itself(made: Small, auditor: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = engine.step, iter(range(100))

    def unsteady(spec: Any, backend: Any, state: Any, windows: np.ndarray, **options: Any) -> Any:
        if state.step == 6:
            state.weights["head"][0, 0] += next(calls)  # wrong in another way at each call
        return original(spec, backend, state, windows, **options)

    assert next(calls) == 0
    monkeypatch.setattr(engine, "step", unsteady)
    verdict = audit_step(made.published, 8, "cpu", auditor)
    assert verdict.exit_code == 12 and "when it was repeated in a fresh process" in verdict.detail
    assert verdict.certificate is None


@pytest.mark.parametrize("step", [-1, 12, 10**9])
def test_step_that_is_not_there_is_refused(made: Small, auditor: Key, step: int) -> None:
    verdict = audit_step(made.published, step, "cpu", auditor)
    assert verdict.exit_code == 13 and "0 to 11" in verdict.detail


def test_nothing_to_compare_with_is_refused(made: Small, auditor: Key) -> None:
    assert audit_step(MemoryStore("empty"), 0, "cpu", auditor).exit_code == 13
    assert audit_initial(LocalStore(made.folder / "nowhere"), "cpu", auditor).exit_code == 13
    made.published.path(RELEASE_KEY).unlink()
    verdict = audit_step(made.published, 0, "cpu", auditor)
    assert verdict.exit_code == 13 and "not a finished publication" in verdict.detail


def test_other_arithmetic_is_refused(begun: Small, auditor: Key, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "other")
    header = begun.run().ledger.header
    changed = header.model_copy(update={"spec": header.spec | {"contract": "verbatim-1999"}})
    store.create("ledger/header.json", changed.canonical())
    for key in begun.mix.list():
        store.create(f"mix/{key}", begun.mix.read(key))
    verdict = audit_initial(store, "cpu", auditor)
    assert verdict.exit_code == 13 and "verbatim-1999" in verdict.detail


def test_draw_stands_in_the_certificate(made: Small, auditor: Key) -> None:
    records, ledger = MemoryStore(str(made.folder)), made.release().ledger
    statement = announce(records, ledger, made.key, DATE, 2, Known(BEACON), at(DATE))
    assert isinstance(statement, Statement)
    draw = make_draw(records, ledger, statement, Value(BEACON, ""), at(DATE))
    verdict = audit_step(made.published, draw.steps[0], "cpu", auditor, draw)
    assert verdict.certificate
    body = verify(verdict.certificate, made.release().ledger).body
    assert body.draw == draw.reference() and body.beacon == BEACON
    other = next(step for step in range(12) if step not in draw.steps)
    assert audit_step(made.published, other, "cpu", auditor, draw).exit_code == 13


def test_proof_of_replay_needs_gradient_and_state(made: Small, auditor: Key) -> None:
    run = made.release()
    verdict = audit_step(made.published, 6, "cpu", auditor)
    assert verdict.certificate
    proof = Certificate.parse(verdict.certificate, "certificate").body.proof
    gradient, state = _replayed(run, 6)

    def again(key: str = auditor.public, run_id: str = run.ledger.run_id, piece: str = "step 6", **other: Any) -> str:
        used = {"beacon": None, "gradient": gradient, "state": state} | other
        return replay_proof(key, run_id, piece, used["beacon"], used["gradient"], used["state"])

    assert again() == proof
    changed = {name: sums.copy() for name, sums in gradient.items()}
    changed["head"].reshape(-1)[-1] += 1
    proofs = [again(key=made.key.public), again(run_id="0" * 64), again(piece="step 7"), again(beacon=BEACON)]
    proofs += [again(gradient=changed), again(gradient={})]
    state.v["q"] = state.v.pop(next(iter(state.v)))
    proofs.append(again())
    assert len({proof, *proofs}) == 8


def _replayed(run: Run, step: int) -> tuple[dict[str, np.ndarray], Any]:
    gradient: dict[str, np.ndarray] = {}
    state = checkpoint.load(run.store, run.ledger, 5)
    while state.step <= step:
        advance(run, engine.load_backend("cpu"), state, take=gradient.update)
    return gradient, state
