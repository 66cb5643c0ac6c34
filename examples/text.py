"""Real text as rows of token ids, one token a byte: no download, no tokenizer to train."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

BOS, EOS, VOCAB_SIZE = 256, 257, 258


def read_rows(source: Path | None, seq_len: int) -> Tensor:
    """Files one after another, each between BOS and EOS, cut into rows: int16[rows, seq_len].

    Args:
        source: a file, or a folder whose files are all read; None takes the sources of Python's
            standard library, some ten megabytes that every machine with Python has.
        seq_len: tokens in a row. What is left over at the end is dropped.
    """
    documents = [_tokens(path.read_bytes()) for path in _files(source)]
    rows = sum(map(len, documents)) // seq_len
    if rows == 0:
        raise SystemExit(
            f"{source or 'the standard library'}: too little text for {seq_len} tokens"
        )
    stream = torch.cat(documents)
    return stream[: rows * seq_len].view(rows, seq_len)


def _files(source: Path | None) -> list[Path]:
    # Sorted, since every rank reads for itself and all must see the same rows.
    if source is None:
        library = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "test", "tests"}
        found = (p for p in library.rglob("*.py") if not skipped & {*p.relative_to(library).parts})
    else:
        found = source.rglob("*") if source.is_dir() else [source]
    return sorted(path for path in found if path.is_file() and path.stat().st_size)


def _tokens(text: bytes) -> Tensor:
    body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.cat(
        [torch.tensor([BOS], dtype=torch.int16), body, torch.tensor([EOS], dtype=torch.int16)]
    )
