"""From pieces of text to tokens and a mask, many records at a time.

The tokens before an answer are exactly those the model will be given when it is asked for one: the border between two
pieces never falls inside a token.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from fsdp_trainer.data.chat import RENDERING, ChatTemplate, Dropped, Piece, build_chat_template, chat_pieces
from fsdp_trainer.data.formats import Chat, RecordError
from fsdp_trainer.data.sources import BadRecord, Example
from fsdp_trainer.data.tokens import TextTokenizer, build_control_tokens, build_text_tokenizer, is_hiding
from fsdp_trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WINDOW = 32  # characters on each side of a border that are looked at
_CUT_TOKENS = 4  # of a window that ends within a word

SPLIT_REMAINDER = "pieces of split records with nothing to train on"
NOT_ENCODED = "records with text that the tokenizer cannot encode"


@dataclass(frozen=True)
class Encoder:
    """All that turning a record into tokens depends on; it can be pickled to a worker process."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    train_on: str
    seq_len: int
    on_too_long: str
    vocab_size: int | None
    bos_id: int | None  # None: the tokenizer adds none by itself
    eos_id: int | None
    ends: dict[int, str]  # tokens at which generation stops, with their text

    def end_tokens(self) -> str:
        """Return the tokens at which generation stops, as text."""
        return ", ".join(self.ends[token] for token in sorted(self.ends)) or "none"


class _Document(NamedTuple):
    ids: np.ndarray  # int32
    mask: np.ndarray  # bool


@dataclass(frozen=True)
class Encoded:
    """Documents back to back, with what happened to the records they came from."""

    tokens: np.ndarray  # int32
    supervised: np.ndarray  # bool
    lengths: np.ndarray  # int64 [documents]
    records: int = 0  # how many were given
    bad: tuple[BadRecord, ...] = ()
    dropped: Counter = field(default_factory=Counter)
    truncated: int = 0  # records
    split: int = 0  # records
    endless: int = 0  # whole records whose last target is no end token
    notes: Counter = field(default_factory=Counter)  # what else is worth knowing, by kind, in records
    record_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # before anything was cut
    digests: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # of the records' content
    unread: frozenset[str] = frozenset()  # columns of the records that nothing reads
    not_encoded: str | None = None  # the first record with text that the tokenizer cannot encode, and what of it


def build_encoder(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template: str | None,
    train_on: str = "assistant",
    seq_len: int,
    on_too_long: str = "truncate",
    vocab_size: int | None = None,
    sanitize_control_tokens: bool = True,
    stop_ids: Collection[int] = (),
) -> Encoder:
    """Learn what the tokenizer and the template do with a probe text; `chat_template` is Jinja text, not a path.

    `stop_ids`: the tokens at which the model's generation config stops, beside the tokenizer's own end token.
    """
    eos_id = cast("int | None", tokenizer.eos_token_id)
    names = {token: tokenizer.convert_ids_to_tokens(token) for token in {*stop_ids, eos_id} if token is not None}
    ends = {token: str(name) for token, name in names.items() if name is not None}
    template = None
    if chat_template is not None:
        template = build_chat_template(
            chat_template, tokenizer=tokenizer, ends=ends.values(), sanitize=sanitize_control_tokens
        )
    control = template.control if template is not None else build_control_tokens(tokenizer)
    vocabulary = tokenizer.get_vocab()  # a new copy of it in every call
    bos, eos = (
        None if name is None else vocabulary.get(str(name)) for name in (tokenizer.bos_token, tokenizer.eos_token)
    )
    return Encoder(
        tokenizer=build_text_tokenizer(tokenizer, control=control),
        template=template,
        train_on=train_on,
        seq_len=seq_len,
        on_too_long=on_too_long,
        vocab_size=vocab_size,
        bos_id=bos if cast("list[int]", tokenizer("x")["input_ids"])[:1] == [bos] else None,
        eos_id=eos,
        ends=ends,
    )


def encode_examples(examples: Sequence[Example | BadRecord], *, encoder: Encoder) -> Encoded:
    """Turn records into documents; bad ones (the reader's too) are returned by name, dropped ones by count."""
    bad: list[BadRecord] = []
    dropped: Counter = Counter()
    notes: Counter = Counter()
    kept: list[tuple[Example, list[Piece]]] = []
    with RENDERING:
        outcomes = [
            example if isinstance(example, BadRecord) else _pieces_or_reason(example, encoder=encoder)
            for example in examples
        ]
    for example, outcome in zip(examples, outcomes, strict=True):
        if isinstance(outcome, BadRecord):
            bad.append(outcome)
        elif isinstance(outcome, Dropped):
            dropped[outcome.reason] += 1
        elif isinstance(example, Example):
            kept.append((example, outcome[0]))
            notes.update(outcome[1])

    documents: list[_Document] = []
    counts: Counter = Counter()
    not_encoded: str | None = None
    record_lengths: list[int] = []
    for (example, pieces), encoded in zip(kept, _tokenise([pieces for _, pieces in kept], encoder), strict=True):
        if encoded is None:
            bad.append(BadRecord(kind="no mask", where=example.where, what=_unstable(pieces)))
            continue
        document = _with_ends(*encoded, plain=not isinstance(example.content, Chat), encoder=encoder)
        _check_ids(document.ids, example=example, encoder=encoder)
        if lost := encoder.tokenizer.not_encoded([piece.text for piece in pieces], ids=document.ids):
            notes[NOT_ENCODED] += 1
            not_encoded = not_encoded or f"{example.where}: {lost}"
        record_lengths.append(len(document.ids))
        fitted = _fit(document, example=example, encoder=encoder, counts=counts)
        if isinstance(fitted, str):
            dropped[fitted] += 1
        documents += [] if isinstance(fitted, str) else fitted
    notes.update({SPLIT_REMAINDER: counts["remainders"]} if counts["remainders"] else {})
    return Encoded(
        tokens=np.concatenate([ids for ids, _ in documents] or [np.empty(0, np.int32)]),
        supervised=np.concatenate([mask for _, mask in documents] or [np.empty(0, bool)]),
        lengths=np.array([len(ids) for ids, _ in documents], dtype=np.int64),
        records=len(examples),
        bad=tuple(bad),
        dropped=dropped,
        truncated=counts["truncated"],
        split=counts["split"],
        endless=counts["endless"],
        notes=notes,
        record_lengths=np.array(record_lengths, dtype=np.int64),
        digests=np.array([example.digest for example, _ in kept], dtype=np.uint64),
        unread=frozenset(name for example in examples if isinstance(example, Example) for name in example.unread),
        not_encoded=not_encoded,
    )


def _fit(document: _Document, *, example: Example, encoder: Encoder, counts: Counter) -> list[_Document] | str:
    """Return the documents of at most seq_len tokens that a record gives, or why it gives none; count what was done."""
    ids, mask = document
    limit = encoder.seq_len
    too_long = len(ids) > limit
    if too_long and encoder.on_too_long == "error":
        raise _too_long(len(ids), example=example, encoder=encoder)
    if too_long and encoder.on_too_long == "drop":
        return "longer than seq_len"
    if not mask.any():
        return "nothing to train on"
    if too_long and encoder.on_too_long == "truncate":
        if not mask[:limit].any():
            return "nothing to train on after truncation"
        counts["truncated"] += 1
        return [_Document(ids[:limit], mask[:limit])]
    counts["endless"] += not _stops(ids, mask, ends=encoder.ends)
    if not too_long:
        return [document]
    pieces = list(split_document(ids, mask, seq_len=limit, bos_id=encoder.bos_id))
    trained = [piece for piece in pieces if piece.mask.any()]
    if not trained:
        return "nothing to train on after splitting"
    counts["split"] += 1
    counts["remainders"] += len(pieces) - len(trained)
    return trained


def split_document(
    ids: np.ndarray, mask: np.ndarray, *, seq_len: int, bos_id: int | None = None
) -> Iterator[_Document]:
    """Cut a document into pieces of at most seq_len tokens that hold each of its tokens once, in order.

    Every piece is a document of its own: where `bos_id` is given (the start token that the document begins with) each
    starts with one, and nothing of another piece is seen. The first token of a later piece is no target: what came
    before it stands in another document. A last piece of one token, which could not be trained on, takes one more from
    the piece before it.
    """
    room = seq_len - (bos_id is not None)
    start = int(bos_id is not None)  # the document's own start token is one that every piece gets
    cuts = list(range(start, len(ids), room))
    if len(cuts) > 1 and len(ids) - cuts[-1] == 1 and room > 2:
        cuts[-1] -= 1
    for first, last in zip(cuts, [*cuts[1:], len(ids)], strict=True):
        piece, supervised = ids[first:last], mask[first:last].copy()
        if first > start:
            supervised[0] = False
        if bos_id is not None:
            piece, supervised = np.append(np.int32(bos_id), piece), np.append(False, supervised)
        yield _Document(piece, supervised)


def _pieces_or_reason(example: Example, *, encoder: Encoder) -> tuple[list[Piece], list[str]] | BadRecord | Dropped:
    try:
        return _pieces(example, encoder=encoder)
    except Dropped as drop:
        return drop
    except RecordError as error:
        return BadRecord(kind=error.kind, where=example.where, what=error.what)


def _pieces(example: Example, *, encoder: Encoder) -> tuple[list[Piece], list[str]]:
    content = example.content
    if isinstance(content, Chat):
        if encoder.template is None:
            raise DataError(
                "the tokenizer has no chat template, and the data are conversations",
                values=f"{example.where}; tokenizer {encoder.tokenizer.name}",
                fix="set data.chat_template to a Jinja file, or model.tokenizer to one with a template",
            )
        return chat_pieces(content, template=encoder.template, train_on=encoder.train_on)
    if not content.completion.strip():
        raise Dropped("empty completion" if content.prompt else "empty text")
    if is_hiding(content.prompt) or is_hiding(content.completion):
        raise RecordError("private character", "the text holds a character of Unicode's private plane 16")
    pieces = [Piece(content.prompt, encoder.train_on == "all"), Piece(content.completion, True)]
    return [piece for piece in pieces if piece.text], []


def _tokenise(documents: Sequence[Sequence[Piece]], encoder: Encoder) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Tokenise documents with the mask of their pieces; None where the border between two pieces cannot be kept."""
    windows = [[_border_window(one, other, encoder) for one, other in pairwise(pieces)] for pieces in documents]
    # one call for all, each text once: the tokenizer's threads work through the batch
    texts = dict.fromkeys(piece.text for pieces in documents for piece in pieces)
    texts |= dict.fromkeys(text for borders in windows for window in borders for text in window)
    ids = dict(zip(texts, encoder.tokenizer.ids([*texts]), strict=True))
    results = []
    for pieces, borders in zip(documents, windows, strict=True):
        parts = [ids[piece.text] for piece in pieces]
        joined = np.concatenate(parts or [np.empty(0, np.int32)])
        lengths: list[int] | None = [len(part) for part in parts]
        if not all(_is_stable(border, part, ids) for border, part in zip(borders, parts[1:], strict=True)):
            joined, lengths = _stable_borders(pieces, joined=joined, lengths=lengths, encoder=encoder)
        targets = np.array([piece.supervised for piece in pieces], dtype=bool)
        results.append(None if lengths is None else (joined, np.repeat(targets, lengths)))
    return results


def _border_window(before: Piece, after: Piece, encoder: Encoder) -> tuple[str, str]:
    """Return the text that ends at a border, and the same with what follows it, as far as tokens could merge.

    A control token ends what could merge, and makes most windows the same: `<|im_end|>` and a newline, say.
    """
    pattern = encoder.tokenizer.control.pattern
    left, right = before.text[-_WINDOW:], after.text[:_WINDOW]
    last = max((match.start() for match in pattern.finditer(left)), default=0)
    first = pattern.search(right)
    left, right = left[last:], right[: first.end()] if first else right
    return left, left + right


def _is_stable(window: tuple[str, str], after: np.ndarray, ids: dict[str, np.ndarray]) -> bool:
    """Tell whether the pieces at a border give the same tokens apart and together, by the text around it alone.

    The last tokens of a window are not compared: it may end within a word.
    """
    left, both = ids[window[0]], ids[window[1]]
    compared = both[len(left) :]
    if len(window[1]) - len(window[0]) == _WINDOW:
        compared = compared[:-_CUT_TOKENS]
    return _starts_with(both, left) and _starts_with(after, compared)


def _starts_with(ids: np.ndarray, start: np.ndarray) -> bool:
    return ids[: len(start)].tobytes() == start.tobytes()  # a tenth of what array_equal costs for a few tokens


def _stable_borders(
    pieces: Sequence[Piece], *, joined: np.ndarray, lengths: list[int], encoder: Encoder
) -> tuple[np.ndarray, list[int] | None]:
    """Settle a document whose pieces tokenise differently apart and together.

    Tokenizers that put a space before every text (Llama 2) differ at each piece: there the text up to each border must
    give a prefix of the whole. Where a token would span a border (an answer that starts with a newline, after a header
    that ends with one), the pieces stay apart, as they are when the model answers; they must still read the same.
    """
    *prefixes, whole = encoder.tokenizer.ids(
        ["".join(piece.text for piece in pieces[: count + 1]) for count in range(len(pieces))]
    )
    if np.array_equal(whole, joined):
        return joined, lengths
    borders = [0]
    for before in prefixes:
        if not _starts_with(whole, before):
            break
        borders.append(len(before))
    else:
        found = np.diff([*borders, len(whole)]).tolist()
        # A piece that vanished in its neighbour's token (unknown words, say) would not be trained on at all.
        lost = any(piece.text and not length for piece, length in zip(pieces, found, strict=True))
        return whole, None if lost else found
    same_text = encoder.tokenizer.decode(joined) == encoder.tokenizer.decode(whole)
    return joined, lengths if same_text else None


def _with_ends(ids: np.ndarray, mask: np.ndarray, *, plain: bool, encoder: Encoder) -> _Document:
    """Give a document exactly one start token, and plain text one end token; its first token is no target."""
    bos, eos = encoder.bos_id, encoder.eos_id
    if bos is not None:
        extra = 0
        while extra < len(ids) and ids[extra] == bos:  # the template or the text may have written it already
            extra += 1
        ids, mask = np.append(np.int32(bos), ids[extra:]), np.append(False, mask[extra:])
    if plain and eos is not None and (not len(ids) or ids[-1] != eos):
        ids, mask = np.append(ids, np.int32(eos)), np.append(mask, True)
    mask[:1] = False
    return _Document(ids, mask)


def _stops(ids: np.ndarray, mask: np.ndarray, *, ends: dict[int, str]) -> bool:
    # the last two targets: markers often cover the newline that follows the end token
    return any(int(token) in ends for token in ids[mask][-2:].tolist())


def _check_ids(ids: np.ndarray, *, example: Example, encoder: Encoder) -> None:
    if encoder.vocab_size is not None and len(ids) and int(ids.max()) >= encoder.vocab_size:
        raise DataError(
            "the tokenizer makes token ids that the model's embedding table does not have",
            values=f"id {int(ids.max())}, table of {encoder.vocab_size} rows, tokenizer "
            f"{encoder.tokenizer.name} ({encoder.tokenizer.size} tokens), first at {example.where}",
            fix="set model.tokenizer to the tokenizer this model was trained with",
        )


def _too_long(length: int, *, example: Example, encoder: Encoder) -> DataError:
    return DataError(
        f"{example.where}: the record is longer than data.seq_len",
        values=f"{length} tokens, data.seq_len {encoder.seq_len}, data.on_too_long error",
        fix="raise data.seq_len, or set data.on_too_long to truncate, split or drop",
    )


def _unstable(pieces: Sequence[Piece]) -> str:
    answer = next((piece.text for piece in pieces if piece.supervised), "")
    return (
        f"the tokenizer merges the start of the answer {answer[:30]!r} with the text before it, whichever way it is cut"
    )
