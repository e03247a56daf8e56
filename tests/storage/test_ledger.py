"""The ledger: one unbroken chain, and an error that says where it is broken."""

import threading
from pathlib import Path
from typing import Any

import pytest

from kernels import canonical
from kernels.digest import digest
from storage.errors import Divergence, InputFault, LedgerFault, UsageError
from storage.ledger import FETCHED, HEADER_KEY, Entry, Header, Ledger, create_header, part_key, trajectory_root
from storage.store import LocalStore, MemoryStore, Store
from tests.storage import small
from tests.storage.conftest import Small

HEADER = Header(spec=small.spec().canonical(), mix_root="1" * 64, held_out_root="2" * 64, trainer="3" * 64,
                initial_root="4" * 64, code="5" * 64, lock="6" * 64)  # fmt: skip


def entry(step: int, previous: str, **changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "step": step, "tokens": 32 * (step + 1), "first_window": 2 * step, "windows": 2, "lr": "3a83126f",
        "loss": "41000000", "z_loss": "00000000", "grad_norm": "3f800000", "batch": digest(b"%d" % step, "batch"),
        "gradient": "7" * 64, "state": digest(b"%d" % step, "state"), "event": "", "clipped": False,
        "previous": previous,
    }  # fmt: skip
    return Entry(**(fields | changes))


def chain(count: int) -> list[Entry]:
    entries: list[Entry] = []
    for step in range(count):
        entries.append(entry(step, entries[-1].digest() if entries else HEADER.digest()))
    return entries


def lines(entries: list[Entry]) -> bytes:
    return b"".join(item.canonical() + b"\n" for item in entries)


def stored(name: object, *parts: list[Entry]) -> MemoryStore:
    store = MemoryStore(f"ledger-{name}")
    create_header(store, HEADER)
    for part in parts:
        store.create(part_key(part[0].step), lines(part))
    return store


def test_record_and_read_again(tmp_path: Path) -> None:
    store = stored(tmp_path)
    ledger, entries = Ledger(store), chain(4)
    assert ledger.head == ledger.run_id == HEADER.digest() and ledger.state_root(0) == "4" * 64
    assert all(ledger.record(item) for item in entries)
    again = Ledger(store)
    assert list(again) == entries and again.head == entries[-1].digest()
    assert again.state_root(4) == entries[3].state and again.link(2) == entries[1].digest()
    assert not again.record(entries[2])


def test_parts_of_several_entries(tmp_path: Path) -> None:
    entries = chain(6)
    assert list(Ledger(stored(tmp_path, entries[:3], entries[3:4], entries[4:]))) == entries


def test_entry_digest_is_plain_blake3_of_canonical_json() -> None:
    item = entry(0, HEADER.digest())
    assert item.digest() == digest(canonical.dumps(canonical.loads(item.canonical())), "entry")


def test_trajectory_root_depends_on_states_alone() -> None:
    states = [item.state for item in chain(3)]
    expected = digest(bytes.fromhex(HEADER.initial_root), "trajectory")
    for state in states:
        expected = digest(bytes.fromhex(expected + state), "trajectory")
    assert trajectory_root(HEADER.initial_root, states) == expected
    assert len({trajectory_root(HEADER.initial_root, states[:n]) for n in range(4)}) == 4


def broken(name: object, entries: list[Entry], *names: int) -> str:
    """The message about single-entry parts, stored under the given step numbers."""
    store = stored(name)
    for number, item in zip(names, entries, strict=True):
        store.create(part_key(number), lines([item]))
    with pytest.raises(LedgerFault) as caught:
        Ledger(store)
    assert caught.value.exit_code == 11
    return caught.value.message


def test_missing_entry(tmp_path: Path) -> None:
    e = chain(5)
    assert "entry 2 is missing" in broken(tmp_path / "1", [e[0], e[1], e[3]], 0, 1, 3)
    assert "entry 0 to 2 is missing" in broken(tmp_path / "2", [e[3]], 3)
    with pytest.raises(LedgerFault, match="line 2: step 2 where step 1 belongs: entry 1 is missing"):
        Ledger(stored(tmp_path / "3", [e[0], e[2], e[3]]))


def test_duplicate_entry(tmp_path: Path) -> None:
    e = chain(4)
    with pytest.raises(LedgerFault, match="step 1 is there twice"):
        Ledger(stored(tmp_path / "1", [e[0], e[1], e[1]]))
    with pytest.raises(LedgerFault, match="step 1 again, where step 2 belongs: entries are there twice"):
        Ledger(stored(tmp_path / "2", [e[0], e[1]], [e[1], e[2]]))


def test_reordered_entries(tmp_path: Path) -> None:
    e = chain(4)
    assert "reordered, or the part was renamed" in broken(tmp_path / "1", [e[0], e[2], e[1]], 0, 1, 2)
    with pytest.raises(LedgerFault, match="line 2: step 2 where step 1 belongs: entries were reordered"):
        Ledger(stored(tmp_path / "2", [e[0], e[2], e[1]]))


def test_truncated_part(tmp_path: Path) -> None:
    e = chain(3)
    store = stored(tmp_path)
    store.create(part_key(0), lines(e)[:-40])
    with pytest.raises(LedgerFault, match=r"00000000\.jsonl is cut off in the middle of an entry"):
        Ledger(store)


def test_truncated_end_is_found_by_what_lies_beyond(tmp_path: Path) -> None:
    ledger = Ledger(stored(tmp_path, chain(3)))
    with pytest.raises(LedgerFault, match="ends after 3 steps, but state 5 exists"):
        ledger.state_root(5)


@pytest.mark.parametrize(("field", "value"), [("loss", "41000001"), ("tokens", 33), ("state", "0" * 64)])
def test_changed_entry_breaks_the_chain(tmp_path: Path, field: str, value: Any) -> None:
    e = chain(3)
    e[1] = e[1].model_copy(update={field: value})
    with pytest.raises(LedgerFault, match="entry 1 was changed"):
        Ledger(stored(tmp_path, e))


def test_changed_header_breaks_the_chain(tmp_path: Path) -> None:
    store = MemoryStore(f"ledger-{tmp_path}")
    create_header(store, HEADER.model_copy(update={"mix_root": "9" * 64}))
    store.create(part_key(0), lines(chain(2)))
    with pytest.raises(LedgerFault, match="but the header has digest"):
        Ledger(store)


def test_every_flipped_bit_of_a_part_is_an_error(tmp_path: Path) -> None:
    e = chain(2)
    data = lines(e)
    first = len(lines(e[:1]))
    for position in range(first):  # the last entry has no successor yet: its checkpoint and release name it
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        store = stored(f"{tmp_path}-{position}")
        store.create(part_key(0), bytes(damaged))
        with pytest.raises(LedgerFault):
            Ledger(store)


HOSTILE = [
    b"", b"\n", b"null\n", b"[]\n", b"{}\n", b"[" * 5000 + b"\n", b"\xff\xfe\n", b"9" * 3000 + b"\n",
    lines(chain(1)).replace(b'"step":0', b'"step":-1'), lines(chain(1)).replace(b'"step":0', b'"step":true'),
    lines(chain(1)).replace(b'"step":0', b'"step":0.0'), lines(chain(1)).replace(b'"step":0', b'"step":"0"'),
    lines(chain(1)).replace(b'"clipped":false', b'"clipped":0'), lines(chain(1)).replace(b'"loss":"41', b'"loss":"4G'),
    lines(chain(1)).replace(b'"kind":"step",', b""), lines(chain(1)).replace(b'"event":""', b'"event":"other"'),
    lines(chain(1)).replace(b'{"', b'{ "'), lines(chain(1)).replace(b"}", b',"z":1}'), lines(chain(1)) + b"\n",
    lines(chain(1)).replace(b"\n", b"\r\n"), b'{"a":' * 900 + b"\n", b" " * 5000 + b"\n",
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE)
def test_hostile_parts(tmp_path: Path, data: bytes) -> None:
    store = stored(tmp_path)
    store.create(part_key(0), data)
    with pytest.raises(LedgerFault) as caught:
        Ledger(store)
    assert len(str(caught.value)) < 1500


def test_strange_object_in_the_ledger(tmp_path: Path) -> None:
    store = stored(tmp_path)
    store.create("ledger/latest", b"")
    with pytest.raises(LedgerFault, match="ledger/latest is no part"):
        Ledger(store)


def test_race_of_equal_twins(tmp_path: Path) -> None:
    store, e = stored(tmp_path), chain(3)
    first, second = Ledger(store), Ledger(store)
    assert first.record(e[0]) and not second.record(e[0])
    assert second.record(e[1]) and not first.record(e[1])
    assert first.record(e[2]) and list(Ledger(store)) == e


def test_race_with_another_entry_is_a_divergence(tmp_path: Path) -> None:
    store: Store = stored(tmp_path)
    ours, theirs = Ledger(store), Ledger(store)
    winner = entry(0, HEADER.digest(), loss="41000001", state="8" * 64)
    loser = entry(0, HEADER.digest())
    assert theirs.record(winner)
    with pytest.raises(Divergence) as caught:
        ours.record(loser)
    message = caught.value.message
    assert winner.digest() in message and loser.digest() in message and caught.value.exit_code == 10
    assert caught.value.fields == ("loss", "state") and caught.value.step == 0
    assert list(Ledger(store)) == [winner]


def test_entries_must_follow(tmp_path: Path) -> None:
    ledger = Ledger(stored(tmp_path))
    for wrong in (chain(2)[1], entry(0, "0" * 64)):
        with pytest.raises(UsageError):
            ledger.record(wrong)


def test_another_header_is_refused(tmp_path: Path) -> None:
    store = stored(tmp_path)
    create_header(store, HEADER)
    with pytest.raises(InputFault, match="nothing was overwritten"):
        create_header(store, HEADER.model_copy(update={"lock": "0" * 64}))
    assert Header.parse(store.read(HEADER_KEY), HEADER_KEY) == HEADER


@pytest.mark.parametrize("field", ["lr", "loss", "z_loss", "grad_norm"])
@pytest.mark.parametrize("value", ["7fc00000", "7f800000", "ff800000", "ffffffff"])
def test_what_is_not_finite_has_no_bits(tmp_path: Path, field: str, value: str) -> None:
    document = chain(1)[0].document() | {field: value}
    store = stored(tmp_path)
    store.create(part_key(0), canonical.dumps(document) + b"\n")
    with pytest.raises(LedgerFault, match=rf"{field}.*finite.*{value}"):
        Ledger(store)


def test_true_is_not_one() -> None:
    spec = small.spec().canonical()
    spec["numerics"] = dict(spec["numerics"], input_gradient_slices=True)  # type: ignore[call-overload]
    with pytest.raises(LedgerFault, match="oddly"):
        HEADER.model_copy(update={"spec": spec}).run_spec()


def test_parts_are_fetched_some_at_a_time(made: Small) -> None:
    """Of a server each is a round trip; the first fault in their order is the one that is told."""
    together = threading.Barrier(FETCHED)

    class Slow(LocalStore):
        def read(self, key: str, *arguments: Any, **named: Any) -> bytes:
            if first <= key < last:
                together.wait(60)  # until as many are asked for
            return super().read(key, *arguments, **named)

    first, last = part_key(0), part_key(FETCHED)
    assert [entry.step for entry in Ledger(Slow(made.store.root))] == list(range(12))
    for step in (9, 4):
        made.store.path(part_key(step)).write_bytes(b"?\n")
    with pytest.raises(LedgerFault, match=part_key(4)):
        Ledger(made.store)
