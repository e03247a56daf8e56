"""The same chain with the real model: trained by one backend, audited by the other from what was published."""

from pathlib import Path

import pytest

from storage.audit.certificate import verify
from storage.audit.keys import load_or_create_key
from storage.audit.replay import audit_initial, audit_step
from storage.audit.verdict import Outcome
from storage.publish import publish
from storage.training import train_segment
from tests.storage import small
from tests.storage.conftest import Small


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Small:
    made = Small(tmp_path_factory.mktemp("real"))
    small.begin(made.folder, made.store, made.mix)
    made.train(until=7)
    made.store.path("checkpoints/00000007.json").unlink()  # as if the process had died before it
    assert made.train().validated == (5, 6)
    publish(made.store, made.mix, made.published, made.key)
    return made


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_audits_on_both_backends(real: Small, backend: str) -> None:
    auditor = load_or_create_key(real.folder / "auditor", backend)
    initial = audit_initial(real.published, backend, auditor)
    step = audit_step(real.published, 8, backend, auditor)
    assert [initial.outcome, step.outcome] == [Outcome.MATCH] * 2, (initial.detail, step.detail)
    assert step.compared == (5, 6, 7, 8) and step.certificate
    assert verify(step.certificate, real.release().ledger, "step 8").body.provenance.backend == backend


def test_backend_may_change_between_segments(real: Small, tmp_path: Path) -> None:
    other = Small(tmp_path)
    small.begin(other.folder, other.store, other.mix)
    for until, backend in ((3, "reference"), (6, "cpu")):
        train_segment(other.run(), backend, until, checkpoint_every=2, diagnostics_every=3)
    expected = [entry.state for entry in real.run().ledger][:6]
    assert [entry.state for entry in other.run().ledger] == expected
