"""The index of each shard of a part that lies in memory whole."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from storage.corpus.documents import Documents
from storage.corpus.index_file import shard_index
from storage.corpus.pack import Part


def part_index(documents: Documents, part: Part, shard_windows: int) -> Iterator[bytes]:
    """The index files of a part's shards, in order."""
    size = shard_windows * part.window_tokens
    starts = np.concatenate([[0], part.ends[:-1]])
    for start in range(0, part.count * part.window_tokens, size):
        end = start + size if start + size < part.count * part.window_tokens else len(part.ids)
        first, last = np.searchsorted(part.ends, start, "right"), np.searchsorted(starts, end, "left")
        yield shard_index(_columns(documents, part, int(first), int(last)))


def _columns(documents: Documents, part: Part, first: int, last: int) -> pa.Table:
    numbers, ends = part.documents[first:last].tolist(), part.ends[first:last]
    starts = np.concatenate([[0], part.ends])[first:last]
    return pa.table(
        {
            "number": pa.array(range(first, last), pa.int64()),
            "file": pa.array([documents.files[documents.file[i]] for i in numbers], pa.string()),
            "member": pa.array([documents.member[i] for i in numbers], pa.string()),
            "position": pa.array([documents.position[i] for i in numbers], pa.int64()),
            "first_token": pa.array(starts, pa.int64()),
            "tokens": pa.array(ends - starts, pa.int64()),
            "first_window": pa.array(starts // part.window_tokens, pa.int64()),
            "last_window": pa.array((ends - 1) // part.window_tokens, pa.int64()),
        }
    )
