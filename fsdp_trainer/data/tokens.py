"""Text to token ids with what is needed of the tokenizer alone, so that a worker process loads no transformers for it.

Control tokens a person typed are carried through the chat template as one private character each, and become plain
text here: nobody can end a turn or open another by writing its marker.
"""

import re
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Plane 16 of Unicode is private use; icon fonts use the other private ranges.
_FIRST_HIDDEN, _LAST_HIDDEN = 0x10F000, 0x10FFFD
_IN_NO_VOCABULARY = chr(0xE1234)  # a character that stands for nothing, and never will
_ONE_AT_A_TIME = threading.Lock()  # Transformers' tokenizers set their own switches in every call; ours are never set
_HIDDEN = re.compile(f"([{chr(_FIRST_HIDDEN)}-{chr(_LAST_HIDDEN)}])")


@dataclass(frozen=True)
class ControlTokens:
    """The special tokens a tokenizer makes of their text, and the private characters that stand for typed ones."""

    names: tuple[str, ...]  # longest first, so that a token wins over one it contains
    pattern: re.Pattern[str]

    def found_in(self, value: Any) -> bool:
        """Tell whether any text inside a message (its lists and objects too) holds a control token."""
        return any(self.pattern.search(text) for text in texts_in(value))

    def hide(self, value: Any) -> Any:
        """Return the value with a private character in the place of every control token in its texts."""
        if isinstance(value, str):
            return self.pattern.sub(lambda match: chr(_FIRST_HIDDEN + self.names.index(match.group())), value)
        if isinstance(value, dict):
            return {key: self.hide(inner) for key, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def shown(self, text: str) -> str:
        """Return text with what was hidden in it written out."""
        return _HIDDEN.sub(lambda match: self._name(match.group()), text) if is_hiding(text) else text

    def _name(self, character: str) -> str:
        index = ord(character) - _FIRST_HIDDEN
        return self.names[index] if index < len(self.names) else character


def texts_in(value: Any) -> list[str]:
    """Return every string inside a value of lists and objects; keys are not text."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    found: list[str] = []
    for one in inner:
        if isinstance(one, str):
            found.append(one)
        else:
            found += texts_in(one)
    return found


def is_hiding(text: str) -> bool:
    """Tell whether text holds one of the private characters."""
    return not text.isascii() and _HIDDEN.search(text) is not None


def build_control_tokens(tokenizer: "PreTrainedTokenizerBase") -> ControlTokens:
    """Collect the special tokens of a tokenizer; tokens merely added, such as <think>, are ordinary text to people."""
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names.update(str(token) for token in tokenizer.all_special_tokens)
    longest_first = tuple(sorted(filter(None, names), key=lambda name: (-len(name), name)))
    assert len(longest_first) <= _LAST_HIDDEN - _FIRST_HIDDEN
    return ControlTokens(longest_first, re.compile("|".join(map(re.escape, longest_first)) or "(?!)"))


@dataclass(frozen=True)
class TextTokenizer:
    """What encoding needs of a tokenizer. `backend`: the Rust tokenizer where there is one, else Transformers' own."""

    backend: Any
    control: ControlTokens
    name: str  # where it came from, for messages
    size: int
    added: re.Pattern[str]  # tokens that are taken out of a text before its characters are looked at
    unknown_id: int | None  # written for what has no token; None: that is left out, or has bytes
    _is_encoded: dict[str, bool] = field(default_factory=dict, compare=False)  # by character, of those met so far

    @property
    def is_rust(self) -> bool:
        """Tell whether the Rust tokenizer does it all, without Python's lock and on several cores."""
        return isinstance(self.backend, Tokenizer)

    def ids(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts to int32, none with a start or end token of the tokenizer's; one call serves many texts."""
        if not texts:
            return []
        encoded = self._encode(texts)
        for index, text in enumerate(texts):
            if is_hiding(text):
                encoded[index] = self._ids_with_hidden(text)
        return encoded

    def not_encoded(self, texts: Sequence[str], *, ids: np.ndarray) -> str:
        """Return some of what the tokenizer leaves out of texts, or writes as its unknown token; "" for nothing.

        `ids` is what it made of them together.
        """
        if self.unknown_id is not None:
            return "words for which it writes its unknown token" if self.unknown_id in ids else ""
        texts = [text for text in texts if not (text.isascii() and self._encodes_ascii)]
        if all(map(self._encodes, set().union(*texts))):
            return ""
        rest = (self.added.sub("", text) for text in texts)  # the signs of control tokens need no tokens of their own
        lost = sorted(character for character in set().union(*rest) if not self._encodes(character))
        return ", ".join(map(repr, lost[:5])) + (" and more" if len(lost) > 5 else "")

    @cached_property
    def _encodes_ascii(self) -> bool:
        return all(self._encodes(chr(code)) for code in range(32, 127))

    def _encodes(self, character: str) -> bool:
        if (known := self._is_encoded.get(character)) is None:
            ids = self._encode([character], as_text=True)[0]
            # Blanks are often dropped on purpose, at borders; a private character stands for a control token. Of a
            # character of several bytes some may have no token: what is left is no text.
            known = character.isspace() or is_hiding(character) or (len(ids) > 0 and "\ufffd" not in self.decode(ids))
            self._is_encoded[character] = known
        return known

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, special tokens included."""
        with nullcontext() if self.is_rust else _ONE_AT_A_TIME:
            return str(self.backend.decode(ids.tolist(), skip_special_tokens=False))

    @cached_property
    def _of_plain_text(self) -> Tokenizer:
        """The Rust tokenizer with control tokens read as text: a copy, as threads share the one without."""
        copy = Tokenizer.from_str(self.backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def _encode(self, texts: list[str], *, as_text: bool = False) -> list[np.ndarray]:
        if self.is_rust:
            backend = self._of_plain_text if as_text else self.backend
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            # arrays at once: long lists of numbers are what Python's cycle collector would walk through again and again
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        options = {"add_special_tokens": False, "verbose": False, "split_special_tokens": as_text}
        with _ONE_AT_A_TIME:
            encoded = cast("list[list[int]]", self.backend(texts, **options)["input_ids"])
        return [np.array(ids, dtype=np.int32) for ids in encoded]

    def _ids_with_hidden(self, text: str) -> np.ndarray:
        """Encode as Transformers' `sanitize_control_tokens` does: what was typed is cut out of the text around it."""
        parts = [
            self._ids_inside(self.control.shown(part), first=not index, as_text=index % 2 == 1)
            for index, part in enumerate(_HIDDEN.split(text))
            if part
        ]
        return np.concatenate(parts)

    def _ids_inside(self, text: str, *, first: bool, as_text: bool) -> np.ndarray:
        if first:
            return self._encode([text])[0]
        # After a newline that is taken off again: SentencePiece would put a space before a text of its own.
        newline, ids = self._encode(["\n", "\n" + text], as_text=as_text)
        after = ids[len(newline) :]
        return after if np.array_equal(ids[: len(newline)], newline) else self._encode([text], as_text=as_text)[0]


def build_text_tokenizer(tokenizer: "PreTrainedTokenizerBase", *, control: ControlTokens) -> TextTokenizer:
    """Take the Rust tokenizer out of a tokenizer, where it alone gives the same ids."""
    backend: Any = tokenizer
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(rust, Tokenizer):
        copy = Tokenizer.from_str(rust.to_str())  # the caller's own keeps its truncation and padding
        copy.no_truncation()
        copy.no_padding()
        probe = "".join(["Hello  wörld\n\n12 ", *control.names[:8], " x\n"])
        expected = cast("list[int]", tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"])
        backend = copy if copy.encode(probe, add_special_tokens=False).ids == expected else tokenizer
    names = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    added = re.compile("|".join(map(re.escape, names)) or "(?!)")
    text = TextTokenizer(backend, control, str(tokenizer.name_or_path), len(tokenizer), added, unknown_id=None)
    unknown_id = None if tokenizer.unk_token is None else tokenizer.unk_token_id
    return replace(text, unknown_id=unknown_id) if unknown_id in text.ids([_IN_NO_VOCABULARY])[0] else text
