"""The peers of `make bench-corpus`, run by an environment of their own; nothing of the project is imported here.

    python corpus_peers.py tokenizers TEXTS TOKENIZER OUT      encode_batch on texts in memory, by all cores
    python corpus_peers.py datatrove TEXTS TOKENIZER OUT       ParquetReader → DocumentTokenizer by two workers

TEXTS: a folder of Parquet files with the columns `id` and `text`; the file names sort as the documents do. Each writes
its ids to OUT, without the end-of-text token the first and with it the second, and prints one JSON line, whose
`seconds` are those of the encoding, or of the whole pipeline.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

BATCH_BYTES = 4 << 20
WORKERS = 2
END = "<|endoftext|>"


def tokenizers(texts: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """HF's library alone: the texts are in memory before, the ids are taken out afterwards."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    encoder.encode_special_tokens = True  # a special token's name inside a text is text
    everything = [text for path in sorted(texts.glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()]
    seconds, lengths, ids = 0.0, [], []
    for batch in batches(everything):
        began = time.perf_counter()
        encoded = encoder.encode_batch(batch, add_special_tokens=False)
        seconds += time.perf_counter() - began
        ids += [np.array(text.ids, np.uint32) for text in encoded]
        lengths += [len(text) for text in encoded]
    np.concatenate(ids).tofile(out / "ids.u32")
    np.cumsum(lengths).astype(np.uint64).tofile(out / "ends.u64")
    return {"seconds": seconds, "tokens": int(sum(lengths)), "version": version("tokenizers")}


def batches(texts: list[str]) -> Iterator[list[str]]:
    """Batches of some megabytes: what HF keeps for each token would not fit into memory for all of them."""
    first = size = 0
    for end, text in enumerate(texts, 1):
        size += len(text)
        if size >= BATCH_BYTES or end == len(texts):
            yield texts[first:end]
            first, size = end, 0


def datatrove(texts: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """The pipeline from its reader to its token files. It doesn't shuffle, which it does within a file only."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        ParquetReader(str(texts)),
        DocumentTokenizer(str(out / "tokens"), str(tokenizer), eos_token=END, shuffle_documents=False),
    ]
    files = len(list(texts.glob("*.parquet")))
    executor = LocalPipelineExecutor(steps, tasks=files, workers=WORKERS, logging_dir=str(out / "logs"))
    began = time.perf_counter()
    stats = executor.run()
    seconds = time.perf_counter() - began
    (tokens,) = [s.stats["tokens"].total for s in stats.stats if "tokens" in s.stats]
    return {"seconds": seconds, "tokens": int(tokens), "version": version("datatrove")}


if __name__ == "__main__":
    peers = {"tokenizers": tokenizers, "datatrove": datatrove}
    print(json.dumps(peers[sys.argv[1]](*map(Path, sys.argv[2:]))))
