"""From pieces of text to tokens and a mask, many records at a time.

The tokens before an answer are exactly those the model will be given when it is asked for one: the border between two
pieces never falls inside a token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fsdp_trainer.data.chat import ChatTemplate, Dropped, Piece, build_chat_template, chat_pieces
from fsdp_trainer.data.formats import Chat, RecordError, find_lost
from fsdp_trainer.data.sources import BadRecord, Example
from fsdp_trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Encoder:
    """All that turning a record into tokens depends on; it can be pickled to a worker process."""

    tokenizer: "PreTrainedTokenizerBase"
    template: ChatTemplate | None
    train_on: str
    seq_len: int
    on_too_long: str
    vocab_size: int | None
    bos_id: int | None  # None: the tokenizer adds none by itself
    eos_id: int | None
    end_ids: frozenset[int]  # tokens that a model can stop at

    def end_tokens(self) -> str:
        """Return the tokens that a model can stop at, as text."""
        return ", ".join(map(str, self.tokenizer.convert_ids_to_tokens(sorted(self.end_ids)))) or "none"


@dataclass(frozen=True)
class Encoded:
    """Documents back to back, with what happened to the records they came from."""

    tokens: np.ndarray  # int32
    supervised: np.ndarray  # bool
    lengths: np.ndarray  # int64 [documents]
    records: int = 0  # how many were given
    bad: tuple[BadRecord, ...] = ()
    dropped: Counter = field(default_factory=Counter)
    truncated: int = 0
    stopping: int = 0  # documents whose last target is an end token


def build_encoder(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template: str | None,
    train_on: str = "assistant",
    seq_len: int,
    on_too_long: str = "truncate",
    vocab_size: int | None = None,
) -> Encoder:
    """Learn what the tokenizer and the template do with a probe text; `chat_template` is Jinja text, not a path."""
    template = None if chat_template is None else build_chat_template(chat_template, tokenizer=tokenizer)
    bos, eos = (_token_id(tokenizer, name) for name in (tokenizer.bos_token, tokenizer.eos_token))
    ends = {eos, _token_id(tokenizer, template.turn_end if template else None)}
    return Encoder(
        tokenizer=tokenizer,
        template=template,
        train_on=train_on,
        seq_len=seq_len,
        on_too_long=on_too_long,
        vocab_size=vocab_size,
        bos_id=bos if cast("list[int]", tokenizer("x")["input_ids"])[:1] == [bos] else None,
        eos_id=eos,
        end_ids=frozenset(end for end in ends if end is not None),
    )


def _token_id(tokenizer: "PreTrainedTokenizerBase", name: Any) -> int | None:
    return None if name is None else tokenizer.get_vocab().get(str(name))


def encode_examples(examples: Sequence[Example | BadRecord], *, encoder: Encoder) -> Encoded:
    """Turn records into documents; bad ones (the reader's too) are returned by name, dropped ones by count."""
    bad: list[BadRecord] = []
    dropped: Counter = Counter()
    kept: list[tuple[Example, list[Piece]]] = []
    for example in examples:
        outcome = example if isinstance(example, BadRecord) else _pieces_or_reason(example, encoder=encoder)
        if isinstance(outcome, BadRecord):
            bad.append(outcome)
        elif isinstance(outcome, Dropped):
            dropped[outcome.reason] += 1
        elif isinstance(example, Example):
            kept.append((example, outcome))

    documents: list[tuple[np.ndarray, np.ndarray]] = []
    truncated = 0
    for (example, pieces), encoded in zip(kept, _tokenise([pieces for _, pieces in kept], encoder), strict=True):
        if encoded is None:
            bad.append(BadRecord(kind="no mask", where=example.where, what=_unstable(pieces)))
            continue
        ids, mask = _with_ends(*encoded, plain=not isinstance(example.content, Chat), encoder=encoder)
        _check_ids(ids, example=example, encoder=encoder)
        too_long = len(ids) > encoder.seq_len
        if too_long and encoder.on_too_long == "error":
            raise _too_long(len(ids), example=example, encoder=encoder)
        if too_long and encoder.on_too_long == "drop":
            dropped["longer than seq_len"] += 1
        elif not mask[: encoder.seq_len].any():
            dropped["nothing to train on after truncation" if too_long else "nothing to train on"] += 1
        else:
            truncated += too_long
            documents.append((ids[: encoder.seq_len], mask[: encoder.seq_len]))
    return Encoded(
        tokens=np.concatenate([ids for ids, _ in documents] or [np.empty(0, np.int32)]),
        supervised=np.concatenate([mask for _, mask in documents] or [np.empty(0, bool)]),
        lengths=np.array([len(ids) for ids, _ in documents], dtype=np.int64),
        records=len(examples),
        bad=tuple(bad),
        dropped=dropped,
        truncated=truncated,
        stopping=sum(_stops(ids, mask, end_ids=encoder.end_ids) for ids, mask in documents),
    )


def _pieces_or_reason(example: Example, *, encoder: Encoder) -> list[Piece] | BadRecord | Dropped:
    try:
        return _pieces(example, encoder=encoder)
    except Dropped as drop:
        return drop
    except RecordError as error:
        return BadRecord(kind=error.kind, where=example.where, what=error.what)


def _pieces(example: Example, *, encoder: Encoder) -> list[Piece]:
    content = example.content
    if isinstance(content, Chat):
        if encoder.template is None:
            raise DataError(
                "the tokenizer has no chat template, and the data are conversations",
                values=f"{example.where}; tokenizer {encoder.tokenizer.name_or_path}",
                fix="set data.chat_template to a Jinja file, or model.tokenizer to one with a template",
            )
        pieces = chat_pieces(content, template=encoder.template, train_on=encoder.train_on)
        if (lost := find_lost(content, "".join(piece.text for piece in pieces))) is not None:
            raise RecordError("template error", f"the chat template does not write {lost}; use one that does")
        return pieces
    if not content.completion.strip():
        raise Dropped("empty completion" if content.prompt else "empty text")
    pieces = [Piece(content.prompt, encoder.train_on == "all"), Piece(content.completion, True)]
    return [piece for piece in pieces if piece.text]


def _tokenise(documents: Sequence[Sequence[Piece]], encoder: Encoder) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Tokenise documents with the mask of their pieces; None where the border between two pieces cannot be kept."""
    texts = []
    for pieces in documents:
        texts += ["".join(piece.text for piece in pieces)]
        if len(pieces) > 1:
            texts += [piece.text for piece in pieces]
    # one call for all: the tokenizer's threads work through the batch
    ids = iter(_ids(texts, encoder.tokenizer) if texts else ())
    results = []
    for pieces in documents:
        whole = next(ids)
        parts = [next(ids) for _ in pieces] if len(pieces) > 1 else [whole]
        joined = [token for part in parts for token in part]
        lengths: list[int] | None = [len(part) for part in parts]
        if joined != whole:
            joined, lengths = _stable_borders(pieces, whole=whole, joined=joined, lengths=lengths, encoder=encoder)
        results.append(
            None
            if lengths is None
            else (
                np.array(joined, dtype=np.int32),
                np.repeat(np.array([piece.supervised for piece in pieces], dtype=bool), lengths),
            )
        )
    return results


def _stable_borders(
    pieces: Sequence[Piece], *, whole: list[int], joined: list[int], lengths: list[int], encoder: Encoder
) -> tuple[list[int], list[int] | None]:
    """Settle a document whose pieces tokenise differently apart and together.

    Tokenizers that put a space before every text (Llama 2) differ at each piece: there the text up to each border must
    give a prefix of the whole. Where a token would span a border (an answer that starts with a newline, after a header
    that ends with one), the pieces stay apart, as they are when the model answers; they must still read the same.
    """
    borders = [0]
    for count in range(1, len(pieces)):
        before = _ids(["".join(piece.text for piece in pieces[:count])], encoder.tokenizer)[0]
        if whole[: len(before)] != before:
            break
        borders.append(len(before))
    else:
        found = np.diff([*borders, len(whole)]).tolist()
        # A piece that vanished in its neighbour's token (unknown words, say) would not be trained on at all.
        lost = any(piece.text and not length for piece, length in zip(pieces, found, strict=True))
        return whole, None if lost else found
    same_text = encoder.tokenizer.decode(joined) == encoder.tokenizer.decode(whole)
    return joined, lengths if same_text else None


def _ids(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return cast("list[list[int]]", encoded["input_ids"])


def _with_ends(ids: np.ndarray, mask: np.ndarray, *, plain: bool, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
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
    return ids, mask


def _stops(ids: np.ndarray, mask: np.ndarray, *, end_ids: frozenset[int]) -> bool:
    # the last two targets: markers often cover the newline that follows the end token
    return any(int(token) in end_ids for token in ids[mask][-2:])


def _check_ids(ids: np.ndarray, *, example: Example, encoder: Encoder) -> None:
    if encoder.vocab_size is not None and len(ids) and int(ids.max()) >= encoder.vocab_size:
        raise DataError(
            "the tokenizer makes token ids that the model's embedding table does not have",
            values=f"id {int(ids.max())}, table of {encoder.vocab_size} rows, tokenizer "
            f"{encoder.tokenizer.name_or_path} ({len(encoder.tokenizer)} tokens), first at {example.where}",
            fix="set model.tokenizer to the tokenizer this model was trained with",
        )


def _too_long(length: int, *, example: Example, encoder: Encoder) -> DataError:
    return DataError(
        f"{example.where}: the record is longer than data.seq_len",
        values=f"{length} tokens, data.seq_len {encoder.seq_len}, data.on_too_long error",
        fix="raise data.seq_len, or set data.on_too_long to truncate or drop",
    )


def _unstable(pieces: Sequence[Piece]) -> str:
    answer = next((piece.text for piece in pieces if piece.supervised), "")
    return (
        f"the tokenizer merges the start of the answer {answer[:30]!r} with the text before it, whichever way it is cut"
    )
