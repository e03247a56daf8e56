"""A published run checked without a replay: is every record genuine, and do all of them agree?"""

from storage import checkpoint
from storage.audit.check import check_entries
from storage.audit.contents import check_listed, needed
from storage.publish import ReleaseBody, check_objects, load_release
from storage.run import open_release
from storage.store import Store


def check_release(store: Store) -> ReleaseBody:
    """The release in `store`, every byte of it read.

    Chain and signature; every object as listed, and everything that a replay reads listed; what each entry says against
    spec and mix; every window against its leaf, every checkpoint against the ledger's state roots. Raises InputFault,
    Divergence or Refused for the first that is wrong.
    """
    run = open_release(store)
    body = load_release(store, run.ledger)
    check_objects(store, body)
    check_listed(needed(run), {key: entry.digest for key, entry in body.objects.items()})
    check_entries(run)
    run.stream.check()
    for step in checkpoint.steps(store):
        checkpoint.check(store, run.ledger, step)
    return body
