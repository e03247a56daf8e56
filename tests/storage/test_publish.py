"""Publishing: complete, compared, signed; repeatable where it stopped; never over anything else."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import storage.made
from storage.audit.keys import load_or_create_key
from storage.audit.release import check_release
from storage.code_archive import archive_key, code_of, pack, source_files
from storage.copying import PublishProgress, copy_all
from storage.errors import CheckpointFault, InputFault, LedgerFault, Refused, VerbatimError
from storage.ledger import part_key
from storage.objects import Data, pieces
from storage.publish import publish
from storage.release import RELEASE_KEY, Release, check_objects, load_release
from storage.run import Run, open_run
from storage.store import LocalStore, MemoryStore, object_digest
from tests.storage import small
from tests.storage.conftest import Small, flip


def everything(store: LocalStore) -> dict[str, bytes]:
    return {key: store.read(key) for key in store.list()}


def test_complete_and_signed(made: Small, tmp_path: Path) -> None:
    target, reports = LocalStore(tmp_path / "target"), list[PublishProgress]()
    result = publish(made.store, made.mix, target, made.key, report=reports.append)
    found = everything(target)
    release = Release.parse(found.pop(RELEASE_KEY), RELEASE_KEY).body
    assert {key: (entry.digest, entry.size) for key, entry in release.objects.items()} == {
        key: (object_digest(data), len(data)) for key, data in found.items()
    }
    assert (release.steps, release.head) == (12, made.run().ledger.head)
    assert release.trajectory_root == made.run().ledger.trajectory_root()
    assert result.copied == len(found) == len(reports) and result.size == reports[-1].bytes == reports[-1].of_bytes
    assert load_release(target, made.run().ledger) == release
    check_objects(target, release)


def test_twice_is_once(made: Small) -> None:
    before = everything(made.published)
    assert publish(made.store, made.mix, made.published, made.key).copied == 0
    made.train()  # leaves two more segment records
    assert publish(made.store, made.mix, made.published, made.key).copied == 0
    assert everything(made.published) == before


def test_repeating_finds_what_was_damaged_since(made: Small) -> None:
    flip(made.published.path("mix/tokenizer.json"), 30)
    with pytest.raises(InputFault, match=r"mix/tokenizer.json has digest"):
        publish(made.store, made.mix, made.published, made.key)


@pytest.mark.parametrize("count", [0, 1, 30, 70])
def test_killed_and_repeated(made: Small, tmp_path: Path, count: int) -> None:
    target = LocalStore(tmp_path / "target")
    child = os.fork()
    if child == 0:
        small.die_at_link(count, lambda: publish(made.store, made.mix, target, made.key))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert RELEASE_KEY not in target.list()
    publish(made.store, made.mix, target, made.key)
    assert everything(target) == everything(made.published)


def test_another_run_under_the_same_address_is_refused(made: Small, tmp_path: Path) -> None:
    other = Small(tmp_path / "other")
    small.begin(other.folder, other.store, other.mix, seed=8)
    other.train()
    before = everything(made.published)
    with pytest.raises(Refused, match="nothing was written"):
        publish(other.store, other.mix, made.published, other.key)
    assert everything(made.published) == before
    strange = MemoryStore(str(tmp_path))
    strange.create("notes.txt", b"mine")
    with pytest.raises(Refused):
        publish(made.store, made.mix, strange, made.key)
    assert strange.list() == ["notes.txt"]


def test_a_release_never_changes(begun: Small) -> None:
    begun.train(until=6)
    publish(begun.store, begun.mix, begun.published, begun.key)
    before = everything(begun.published)
    begun.train()
    with pytest.raises(Refused, match="the run went on after it was published"):
        publish(begun.store, begun.mix, begun.published, begun.key)
    assert everything(begun.published) == before


def test_only_the_trainer_publishes(made: Small, tmp_path: Path) -> None:
    other = load_or_create_key(tmp_path / "keys", "other")
    with pytest.raises(Refused, match="is not the run's trainer"):
        publish(made.store, made.mix, LocalStore(tmp_path / "target"), other)
    assert not (tmp_path / "target").exists()


def test_damage_is_found_before_it_is_published(made: Small, tmp_path: Path) -> None:
    def refused(path: Path, position: int, error: type[InputFault]) -> None:
        good = path.read_bytes()
        flip(path, position)
        with pytest.raises(error):
            publish(made.store, made.mix, LocalStore(tmp_path / "target"), made.key)
        assert not (tmp_path / "target" / RELEASE_KEY).exists()
        path.write_bytes(good)

    refused(made.store.path(part_key(4)), 100, LedgerFault)
    refused(made.store.path("checkpoints/00000005.json"), 200, CheckpointFault)
    refused(next(path for path in (made.store.root / "objects").iterdir()), 40, InputFault)


class Lossy(MemoryStore):
    """A store that keeps the length of what it is given, but not the middle."""

    def create(self, key: str, data: Data) -> bool:
        whole = b"".join(pieces(data))
        if key.startswith("objects/"):
            whole = whole[:100] + bytes(len(whole) - 200) + whole[-100:]
        return super().create(key, whole)


def test_blocks_of_zeros_at_the_right_size_are_found(made: Small, tmp_path: Path) -> None:
    target = Lossy(str(tmp_path))
    with pytest.raises(InputFault, match="does not read back as it was written"):
        publish(made.store, made.mix, target, made.key)
    assert RELEASE_KEY not in target.list()


def test_what_is_trained_while_it_is_published_stays_out(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    begun.train(until=6)

    def opened_just_before_it_goes_on(*stores: Any) -> Run:
        run = open_run(*stores)
        begun.train()
        return run

    monkeypatch.setattr("storage.publish.open_run", opened_just_before_it_goes_on)
    publish(begun.store, begun.mix, begun.published, begun.key)
    assert check_release(begun.published).body.steps == 6


@pytest.mark.parametrize(
    "key", ["windows/verbs/train/00001.arrow", "tokenizer.json", "docs/nouns/held_out/00000.parquet"]
)
def test_a_damaged_mix_is_not_published(made: Small, tmp_path: Path, key: str) -> None:
    flip(made.mix.path(key), -20)
    target = LocalStore(tmp_path / "target")
    with pytest.raises(InputFault, match=f"mix/{key} has digest .*, run and mix demand"):
        publish(made.store, made.mix, target, made.key)
    assert not {RELEASE_KEY, f"mix/{key}"} & set(target.list())


@pytest.mark.parametrize("where", ["run", "run/published", "mix", "mix/published"])
def test_a_target_within_what_is_published_is_refused(made: Small, where: str) -> None:
    before = everything(made.store), everything(made.mix)
    with pytest.raises(Refused, match="which is to be published; nothing was written"):
        publish(made.store, made.mix, LocalStore(made.folder / where), made.key)
    assert (everything(made.store), everything(made.mix)) == before


@pytest.mark.parametrize(
    "key", ["ledger/00000003.jsonl", "checkpoints/00000005.json", "digests/00000003.json", "mix/manifest.json"]
)
def test_what_changes_after_it_was_read_is_not_published(
    made: Small, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.mix.path(key[4:]) if key.startswith("mix/") else made.store.path(key)

    def damaged_just_before(*arguments: Any) -> Any:
        flip(path, -10)
        return copy_all(*arguments)

    monkeypatch.setattr("storage.publish.copy_all", damaged_just_before)
    target = LocalStore(tmp_path / "target")
    with pytest.raises(InputFault, match=f"{key} has digest .*, run and mix demand"):
        publish(made.store, made.mix, target, made.key)
    assert not {RELEASE_KEY, key} & set(target.list())


@pytest.mark.parametrize("edited", ["storage/store.py", "README.md"])
def test_code_that_was_edited_in_between(
    made: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    """A publication that was stopped goes on only as it was begun: the error shows both, and what to do."""
    target = LocalStore(tmp_path / "target")

    def stop(progress: PublishProgress) -> None:
        if any(key.startswith("code/") and key.endswith(".tar") for key in target.list()):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        publish(made.store, made.mix, target, made.key, report=stop)
    begun, (archive,) = everything(target), (key for key in target.list("code/") if key.endswith(".tar"))
    files = source_files()
    files[edited] += b"\n"
    monkeypatch.setattr(storage.made, "source_files", lambda: files)
    with pytest.raises(VerbatimError) as caught:
        publish(made.store, made.mix, target, made.key)
    said, other = str(caught.value), archive_key(code_of(files))
    if edited == "README.md":
        was, now = object_digest(begun[archive]), object_digest(pack(files))
        assert other == archive and f"{archive} is there already with other content" in said
        assert now in said and (was in said or f"of {len(begun[archive])} bytes" in said)
    else:
        assert (
            f"{target.uri} holds {archive}, which this publication does not, but {other}; nothing was written" in said
        )
        assert everything(target) == begun
    assert "other code" in said and "next: verbatim publish RUN-FOLDER --target ANOTHER-ADDRESS" in said
    assert RELEASE_KEY not in target.list()
    monkeypatch.undo()
    publish(made.store, made.mix, target, made.key)
    assert everything(target) == everything(made.published)
