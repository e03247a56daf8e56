"""Strangers' records without end: a reader is done in bounded time and memory, and misses nobody whom he names."""

import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from storage import olmes
from storage.audit import collect as collecting
from storage.audit.certificate import Certificate, sign
from storage.audit.collect import MAX_DRAWS, MAX_FAULTY, MAX_UNLISTED, collect
from storage.audit.standing import standing
from storage.page.history import history
from storage.page.make import page
from storage.page.markup import Place
from storage.page.steps import NUMBER, step_bits
from storage.store import MemoryStore
from tests.storage.drawn import BEACON, Book, at

MANY = 100_000


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def test_a_hundred_thousand_certificates_of_a_stranger(book: Book) -> None:
    """All but the first few bear no true signature; the named key's lies behind them all."""
    made = book.certify("mallory", 11, first=0)
    flood, proofs = MemoryStore("flood"), ("".join(each) for each in product("0123456789abcdef", repeat=5))
    mallory = book.key("mallory")
    genuine = sign(made, mallory)
    for number, proof in zip(range(MANY), proofs, strict=False):
        other = proof + made.proof[5:]
        if number < 10:
            data = sign(made.model_copy(update={"proof": other}), mallory)
        else:
            data = genuine.replace(made.proof.encode(), other.encode())
        flood.create(f"certificates/{number:06d}.json", data)
    ada = book.certify("ada", 6)
    flood.create("certificates/z.json", sign(ada, book.key("ada")))
    named = book.named("ada")

    began = time.monotonic()
    found = collect([flood], book.ledger, named)
    held = standing(book.published, book.ledger, found, named, at("2026-12-15"))
    html = page(history(book.published, book.ledger), Place({}, None), held).decode()
    assert time.monotonic() - began < 120
    assert len(found.certificates) == 11 and len(found.faulty) == MAX_FAULTY
    assert ada in found.certificates and held.levels[6] == "attested"
    assert found.beyond == MANY - 10 - MAX_FAULTY and len(html) < 1 << 20
    assert f"{found.beyond:,} records more, faulty or by keys without a name" in html


def test_what_is_held_of_strangers_is_bounded_and_named_keys_are_not(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_UNLISTED <= 8 << 20
    monkeypatch.setattr(collecting, "MAX_UNLISTED", 10_000)
    for number, name in enumerate(["mallory", "ada"] * 20):
        book.certify(name, number % 12)
    named = book.named("ada")
    found = collect([book.records], book.ledger, named)
    strangers = [body for body in found.certificates if body.auditor not in named]
    sizes = [len(Certificate(body=body, signature="0" * 128).canonical()) for body in strangers]
    assert len(found.certificates) - len(strangers) == 20
    assert len(strangers) + found.beyond == 20 and sum(sizes[:-1]) < 10_000 <= sum(sizes)
    assert collect([book.records], book.ledger, book.named("ada", "mallory")).beyond == 0


def test_scores_of_strangers_are_bounded_too(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MAX_UNLISTED", 1)
    part = {"questions": 2, "right": {"completion": 1}, "asked": {"completion": "0" * 64}, "data": "0" * 64}
    score = olmes.Score.model_validate({"parts": {"all": part}})
    known = {"run": book.ledger.run_id, "step": 3, "state": book.ledger.state_root(3), "packages": {}}
    for name in ("mallory", "ada", "mallory", "ada"):
        key = book.key(name)
        tasks = f"{len(book.records.list('evaluations/')):064x}"
        body = olmes.Body.model_validate(known | {"tasks": tasks, "scores": {"few": score}, "evaluator": key.public})
        olmes.save(book.records, body, key)
    found = collect([book.records], book.ledger, book.named("ada"))
    assert len(found.evaluations) == 3 and found.beyond == 1 and not found.faulty


def test_draws_of_one_night_without_end(book: Book) -> None:
    """A file's value is signed by nobody: whoever has the statement can make draws of it."""
    stores = []
    for number in range(MAX_DRAWS + 5):
        stores.append(MemoryStore(f"draw-{number}"))
        book.draw(beacon=BEACON.model_copy(update={"value": f"{number:064x}"}), records=stores[-1])
    found = collect(stores, book.ledger)
    assert (len(found.draws), found.beyond) == (MAX_DRAWS, 5)


def test_the_map_takes_no_longer_for_certificates_that_passed_many_steps(book: Book) -> None:
    steps = 80_957
    body = book.certify("mallory", 11, first=0).model_copy(update={"step": steps - 1})
    short = body.model_copy(update={"first_step": 7, "step": 9})
    run = SimpleNamespace(ledger=range(steps), states=[], validated=[])
    known: dict[str, Any] = {"opened": [], "levels": [], "rows": [], "audited": SimpleNamespace(parts={})}

    def bits(bodies: list[Any]) -> np.ndarray:
        said = SimpleNamespace(named={}, evidence=SimpleNamespace(certificates=bodies), **known)
        return step_bits(cast(Any, run), cast(Any, said))

    began = time.monotonic()
    assert (bits([body] * MANY) == 1 | 1 << NUMBER["unlisted"]).all()
    assert time.monotonic() - began < 20
    assert np.flatnonzero(bits([short]) != 1).tolist() == [7, 8, 9]
