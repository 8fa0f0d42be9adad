"""Prepared rows: the tokens, masks and borders that training reads, as four flat arrays.

Saved as plain .npy files so that every rank maps the same pages instead of holding a copy.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from fsdp_trainer.errors import DataError


@dataclass(frozen=True)
class Rows:
    """One prepared data set; documents lie back to back in row order."""

    tokens: np.ndarray  # int32 [total_tokens]
    supervised: np.ndarray  # bool [total_tokens]: this token is a target; the first token of a document never is
    document_starts: np.ndarray  # int64 [n_documents + 1]: offsets into tokens
    row_documents: np.ndarray  # int64 [n_rows + 1]: row r holds documents row_documents[r] : row_documents[r + 1]

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


def save_rows(rows: Rows, folder: Path) -> None:
    """Write the arrays as .npy files into an existing folder."""
    for field in fields(rows):
        np.save(folder / f"{field.name}.npy", getattr(rows, field.name))


def load_rows(folder: Path) -> Rows:
    """Map the arrays of a folder that `save_rows` wrote; nothing is read until it is used."""
    try:
        arrays = {field.name: np.load(folder / f"{field.name}.npy", mmap_mode="r") for field in fields(Rows)}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            "the cached rows cannot be read", values=f"{folder}: {error}", fix="delete this folder; it is built again"
        ) from error
    # the two border arrays are small and used in every window; in memory they cost no page faults
    arrays["document_starts"] = np.array(arrays["document_starts"])
    arrays["row_documents"] = np.array(arrays["row_documents"])
    return Rows(**arrays)
