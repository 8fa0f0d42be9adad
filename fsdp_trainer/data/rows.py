"""Prepared rows: the tokens, masks and borders that training reads, as four flat arrays.

Saved as plain .npy files so that every rank maps the same pages instead of holding a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_trainer.errors import DataError

_ARRAYS = ("tokens", "supervised", "document_starts", "row_documents", "source_rows")


@dataclass(frozen=True)
class Rows:
    """One prepared data set; documents lie back to back in row order."""

    tokens: np.ndarray  # int32 [total_tokens]
    supervised: np.ndarray  # bool [total_tokens]: this token is a target; the first token of a document never is
    document_starts: np.ndarray  # int64 [n_documents + 1]: offsets into tokens
    row_documents: np.ndarray  # int64 [n_rows + 1]: row r holds documents row_documents[r] : row_documents[r + 1]
    source_rows: np.ndarray | None = None  # int64 [sources + 1]: rows of source s; None: one source
    weights: tuple[float, ...] | None = None  # of the sources; not saved, so that a new mix needs no new rows

    @property
    def n_rows(self) -> int:
        """Count the rows."""
        return len(self.row_documents) - 1

    @property
    def n_documents(self) -> int:
        """Count the documents."""
        return len(self.document_starts) - 1

    @property
    def total_tokens(self) -> int:
        """Count the tokens, without padding."""
        return int(self.document_starts[-1])

    def row_tokens(self) -> np.ndarray:
        """Count the tokens of each row: int64 [n_rows]."""
        return np.diff(self.document_starts[self.row_documents])

    def row_supervised(self) -> np.ndarray:
        """Count the supervised tokens of each row: int64 [n_rows]."""
        return self.supervised_in(np.arange(self.n_rows))

    def supervised_in(self, indices: np.ndarray) -> np.ndarray:
        """Count the supervised tokens of the given rows only, so that a window reads just its own pages of the mask."""
        starts = self.document_starts[self.row_documents[indices]]
        stops = self.document_starts[self.row_documents[indices + 1]]
        counts = [np.count_nonzero(self.supervised[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        return np.array(counts, dtype=np.int64)

    def documents_of(self, index: int) -> np.ndarray:
        """Return the token offsets of the documents of one row, with the end of the last: int64 [documents + 1]."""
        return self.document_starts[self.row_documents[index] : self.row_documents[index + 1] + 1]

    def take(self, indices: np.ndarray) -> "Rows":
        """Copy the given rows, in the given order."""
        documents = np.concatenate([np.arange(*self.row_documents[index : index + 2]) for index in indices])
        starts, stops = self.document_starts[documents], self.document_starts[documents + 1]
        spans = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        return Rows(
            tokens=np.concatenate([self.tokens[span] for span in spans]),
            supervised=np.concatenate([self.supervised[span] for span in spans]),
            document_starts=_borders(stops - starts),
            row_documents=_borders(np.diff(self.row_documents)[indices]),
        )


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Put the rows of several sets behind each other; `source_rows` tells which came from which."""
    return Rows(
        tokens=np.concatenate([part.tokens for part in parts]),
        supervised=np.concatenate([part.supervised for part in parts]),
        document_starts=_borders(np.concatenate([np.diff(part.document_starts) for part in parts])),
        row_documents=_borders(np.concatenate([np.diff(part.row_documents) for part in parts])),
        source_rows=_borders(np.array([part.n_rows for part in parts])),
    )


def _borders(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def save_rows(rows: Rows, folder: Path) -> None:
    """Write the arrays as .npy files into an existing folder."""
    for name in _ARRAYS:
        if (array := getattr(rows, name)) is not None:
            np.save(folder / f"{name}.npy", array)


def load_rows(folder: Path) -> Rows:
    """Map the arrays of a folder that `save_rows` wrote; nothing is read until it is used."""
    try:
        present = [name for name in _ARRAYS if name != "source_rows" or (folder / f"{name}.npy").exists()]
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in present}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            "the cached rows cannot be read", values=f"{folder}: {error}", fix="delete this folder; it is built again"
        ) from error
    # the border arrays are small and used in every window; in memory they cost no page faults
    borders = {name: np.array(array) for name, array in arrays.items() if name not in ("tokens", "supervised")}
    return Rows(**(arrays | borders))  # type: ignore[arg-type]
