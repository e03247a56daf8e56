"""A run: one store with this layout, and the stream it reads.

    ledger/header.json, ledger/<step>.jsonl     the chain (ledger.py)
    digests/<step>.json                         tensor digests beside each entry (beside.py)
    checkpoints/<k>.json, objects/<digest>      states (checkpoint.py)
    segments/…                                  what really ran (segment.py)
    lease/…                                     who trains it now, so that nobody does so twice (lease.py)
    probe/<k>.json, diagnostics/<step>.json     figures for people (figures.py)
    recipe.yaml                                 the recipe with which the run was begun

A published release is the same layout, with the mix under mix/ and RELEASE.json (publish.py).
"""

from dataclasses import dataclass, field
from types import ModuleType

from model import schedule
from model.spec import RunSpec
from model.state import root
from storage import engine, provenance
from storage.errors import LedgerFault, Refused, UsageError, VerbatimError
from storage.ledger import HEADER_KEY, Header, Ledger, create_header
from storage.memory import plan_for
from storage.mirrors import BadCopy
from storage.store import Store, open_store
from storage.stream import Stream

RECIPE_KEY = "recipe.yaml"


@dataclass(frozen=True)
class Run:
    """An opened run. The ledger is verified; `stream` is the mix that its header names.

    passed_over: opened states that proved not to be what they are said to be (audit/opened.py).
    """

    store: Store
    stream: Stream
    ledger: Ledger
    spec: RunSpec
    passed_over: list[BadCopy] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return schedule.total_steps(self.spec)


def create_run(
    store: Store, stream: Stream, spec: RunSpec, trainer: str, backend: ModuleType, recipe: bytes | None = None
) -> Run:
    """Write the header of a new run, or open the run that is there if spec, mix and trainer are the same.

    trainer: public key, 64 hex digits. Draws the initial weights once, to name their root. Raises Refused where the
    store holds another run, this software does not implement the spec's arithmetic, or memory is too small.
    """
    engine.check_arithmetic(spec)
    _check_stream(spec, stream, UsageError)
    if HEADER_KEY in store.list(HEADER_KEY):
        run = open_run(store, stream)
        _check_same_run(run, spec, trainer)
    else:
        plan_for(spec, "training", backend.device_memory())
        header = Header(
            spec=spec.canonical(),
            mix_root=stream.manifest.root,
            held_out_root=stream.manifest.held_out_root,
            trainer=trainer,
            initial_root=root(engine.initial_state(spec, backend))[0],
            code=provenance.code_digest(),
            lock=provenance.lock_digest(),
        )
        create_header(store, header)
        run = open_run(store, stream)
    if recipe is not None:
        store.create(RECIPE_KEY, recipe)  # the first stays: another one for the same run differs in its plan alone
    return run


def open_run(store: Store, stream: Stream) -> Run:
    """The run in `store`, its whole chain verified; Refused if the stream is not the one its header names."""
    return run_of(store, stream, Ledger(store))


def run_of(store: Store, stream: Stream, ledger: Ledger) -> Run:
    """open_run() where the ledger was read already."""
    header, manifest = ledger.header, stream.manifest
    for what, found, expected in (
        ("mix root", manifest.root, header.mix_root),
        ("held-out root", manifest.held_out_root, header.held_out_root),
    ):
        if found != expected:
            raise Refused(
                f"the stream's {what} is {found}, the run's is {expected}",
                cause="another mix is given than the run was begun with",
                next_step="give the mix that the run names, or begin a new run in an empty folder",
            )
    spec = header.run_spec()
    _check_stream(spec, stream, LedgerFault)
    return Run(store, stream, ledger, spec)


def open_release(store: Store) -> Run:
    """The run in a published store, with the mix that was published with it."""
    ledger = Ledger(store)
    return run_of(store, Stream.open(store, "mix/", root=ledger.header.mix_root), ledger)


def open_at(address: str) -> Run:
    """The run at an address: a release, or a folder with run/ and mix/ as training leaves it; Refused where neither
    is."""
    store, beside = open_store(address), f"{address.rstrip('/')}/"
    if HEADER_KEY in store.list(HEADER_KEY):
        return open_release(store)
    trained = open_store(beside + "run")
    if HEADER_KEY in trained.list(HEADER_KEY):
        return open_run(trained, Stream.open(open_store(beside + "mix")))
    raise Refused(f"{address} holds no run", cause="a wrong address", next_step="give a run's folder or a release")


def _check_stream(spec: RunSpec, stream: Stream, error: type[VerbatimError]) -> None:
    tokens, vocab = stream.window_tokens, stream.manifest.mix.tokenizer.vocab
    if tokens != spec.model.seq_len + 1:
        raise error(f"windows hold {tokens} tokens, seq_len {spec.model.seq_len} needs one more")
    if vocab > spec.model.vocab:
        raise error(f"the tokenizer has {vocab} ids, the model's vocabulary {spec.model.vocab}")


def _check_same_run(run: Run, spec: RunSpec, trainer: str) -> None:
    header, asked = run.ledger.header, spec.canonical()
    fields = [f"spec.{name}" for name in asked if asked[name] != header.spec.get(name)]
    fields += ["trainer"] if header.trainer != trainer else []
    if fields:
        raise Refused(
            f"{run.store.uri} holds another run ({run.ledger.run_id}): {', '.join(fields)} differ; nothing was changed",
            cause="the recipe or the key was changed after the run began",
            next_step="choose an empty folder for the new run, or give the recipe and key of the old one",
        )
