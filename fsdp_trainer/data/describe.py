"""Show rows as a person reads them: decoded, with the tokens that are targets marked.

The first thing to look at when a run learns nothing: a mask that is empty, or covers the question, is plain to see.
"""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from fsdp_trainer.data.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample_pieces(
    rows: Rows, index: int, *, tokenizer: "PreTrainedTokenizerBase", max_tokens: int = 400
) -> list[tuple[str, bool]]:
    """Return the text of one row in stretches, each with whether it is supervised; at most `max_tokens` tokens."""
    borders = rows.documents_of(index)
    start, stop = int(borders[0]), min(int(borders[-1]), int(borders[0]) + max_tokens)
    supervised = np.asarray(rows.supervised[start:stop])
    inside = [int(border) - start for border in borders[1:-1] if border < stop]  # a new document starts a new stretch
    cuts = sorted({0, stop - start, *inside, *(np.flatnonzero(np.diff(supervised)) + 1).tolist()})
    pieces = []
    for first, last in pairwise(cuts):
        text = tokenizer.decode(rows.tokens[start + first : start + last].tolist(), skip_special_tokens=False)
        pieces.append((str(text), bool(supervised[first])))
    if stop < borders[-1]:
        pieces.append((f" ... {int(borders[-1]) - stop} more tokens", False))
    return pieces


def format_sample(
    rows: Rows, index: int, *, tokenizer: "PreTrainedTokenizerBase", max_tokens: int = 400, colour: bool = True
) -> Text:
    """Format one row: supervised text green and underlined, or between ⟦ and ⟧ where there is no colour."""
    text = Text()
    for piece, supervised in sample_pieces(rows, index, tokenizer=tokenizer, max_tokens=max_tokens):
        if not supervised:
            text.append(piece)
        elif colour:
            text.append(piece, style="green underline")
        else:
            text.append(f"⟦{piece}⟧")
    return text
