"""Every key that a record, a message or a part of one may have: reading, refusing and docs/data.md come from here.

A key that stands in no table is refused in a message; in a record it is named in the log, or refused where its name
says that it decides what is trained on.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from fsdp_trainer.config import COLUMNS

ROLES = ("system", "developer", "user", "assistant", "tool")
SAME_ROLE = {"human": "user", "gpt": "assistant", "model": "assistant"}
SAME_ROLE |= {"function_call": "assistant", "tool_call": "assistant"}
SAME_ROLE |= {"observation": "tool", "function": "tool", "ipython": "tool", "tool_response": "tool"}
CALL_ROLES = ("function_call", "tool_call")  # their text is the call itself, as JSON

# What says whether an answer, or a part of its text, is a target; by who writes it so, and the values it takes.
_SWITCH, _NUMBER = "true or false", "0 or 1"
MARKS = {
    "train": ("Axolotl", _SWITCH),
    "training": ("Axolotl", _SWITCH),
    "trainable": ("files of single projects", _SWITCH),
    "weight": ("OpenAI, Mistral, Axolotl", _NUMBER),
    "loss": ("ms-swift, XTuner", f"{_SWITCH}, or {_NUMBER}"),
    "loss_scale": ("ms-swift", f"{_SWITCH}, or {_NUMBER}"),
    "loss_weight": ("files of single projects", f"{_SWITCH}, or {_NUMBER}"),
    "loss_mask": ("verl", f"{_SWITCH}, or {_NUMBER}"),
    "step_loss_mask": ("slime", f"{_SWITCH}, or {_NUMBER}"),
    "output_with_loss": ("XTuner", _SWITCH),
    "masked": ("torchtune, where true is no target", _SWITCH),
}
INVERTED_MARKS = ("masked",)
# Stretches of the text, each {begin_offset, end_offset, train}: what none of them names is no target.
DETAILS = ("train_detail", "training_detail")
DETAIL_KEYS = ("begin_offset", "end_offset", "train")

TEXT_TURNS = ("conversations", "conversation", "data")  # columns whose list may hold texts in turn: LIMA, UltraChat
TEXT_PARTS = ("text", "input_text", "output_text")
ROLE_KEYS, TEXT_KEYS, PART_TEXT_KEYS = ("role", "from"), ("content", "value"), ("text", "content", "value")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
PLAIN_KEYS = ("tool_call_id", "name")
# Filled, each would be lost: it is refused. Empty, it says nothing.
REFUSED_KEYS = ("function_call", "refusal", "audio", "audios", "image", "images", "video", "videos")
# About a message, and not part of what is said: published sets carry these (WildChat, LMSYS-Chat, OpenAI's logs).
IGNORED_KEYS = ("id", "message_id", "uuid", "index", "turn", "turn_id", "turn_identifier", "timestamp", "created_at")
IGNORED_KEYS += ("date", "model", "language", "country", "state", "toxic", "redacted", "hashed_ip", "header")
IGNORED_KEYS += ("openai_id", "tokens", "token_count", "num_tokens", "finish_reason", "stop_reason", "annotations")
IGNORED_KEYS += ("metadata", "source")
MESSAGE_KEYS = frozenset(
    chain(ROLE_KEYS, TEXT_KEYS, MARKS, DETAILS, REASONING_KEYS, PLAIN_KEYS, REFUSED_KEYS, IGNORED_KEYS, ["tool_calls"])
)
PART_KEYS = frozenset(chain(["type", "id", "index", "annotations", "cache_control"], PART_TEXT_KEYS, MARKS))
# A question with its answer as one turn: Capybara and XTuner, ms-swift, and others.
PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"))
PAIR_KEYS = frozenset(chain(*PAIRS, ["system"], MARKS, IGNORED_KEYS))

# What a record may say beside its turns, by each name that files have for it.
CONTEXT = {
    "system": ("system", "system_prompt", "system_message"),
    "tools": ("tools", "functions"),
    "chat_template_kwargs": ("chat_template_kwargs",),
    "input": ("input", "context"),
    "history": ("history",),
    "documents": ("documents",),
    "media": ("image", "images", "video", "videos", "audio", "audios"),
}
_CHAT = ("system", "tools", "chat_template_kwargs")
# What each format renders of it; anything else of CONTEXT is refused there.
RENDERED = {
    "messages": _CHAT,
    "sharegpt": _CHAT,
    "prompt_completion": _CHAT,  # of messages: beside text they are refused
    "alpaca": (*_CHAT, "input"),
    "text": (),
}


@dataclass(frozen=True)
class Shape:
    """Columns by which a record is recognised: what they are read as, to what the file calls them."""

    format: str  # one of data.format
    needs: Mapping[str, str]
    sets: str = ""  # published sets that are of this shape
    lists: tuple[str, ...] = field(default=())  # columns of the file that must hold a list for it

    @property
    def columns(self) -> tuple[str, ...]:
        """Return what the file calls the columns that are needed."""
        return tuple(self.needs.values())

    @property
    def names(self) -> frozenset[str]:
        """Return what the file may call the columns that are read: those needed and the context that is rendered."""
        return frozenset(chain(self.columns, *(CONTEXT[name] for name in RENDERED[self.format])))

    def describe(self) -> str:
        """Return the format and its columns, for a message."""
        return f"{self.format} ({' + '.join(self.columns)})"

    def renaming(self) -> str:
        """Return the line of the settings that names this shape among others."""
        return "data.columns: {" + ", ".join(f"{ours}: {theirs}" for ours, theirs in self.needs.items()) + "}"


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# In the order they are tried. The first of a format is the one that its name stands for.
SHAPES = (
    Shape("messages", _same("messages"), "OpenAI, TRL, UltraChat 200k, SmolTalk, Tulu 3, Nemotron v1 and v2"),
    Shape("sharegpt", _same("conversations"), "ShareGPT, OpenHermes, LIMA"),
    Shape("prompt_completion", _same("prompt", "completion"), "TRL, OpenAI's older files"),
    Shape("alpaca", _same("instruction", "output"), "Alpaca"),
    Shape("text", _same("text"), "C4, FineWeb, The Pile"),
    Shape("messages", {"messages": "conversation"}, "WildChat, LMSYS-Chat, Capybara, XTuner", ("conversation",)),
    Shape("messages", {"messages": "data"}, "UltraChat (the original)", ("data",)),
    Shape("alpaca", {"instruction": "instruction", "output": "response"}, "Dolly"),
    Shape("alpaca", {"instruction": "question", "output": "response"}, "OpenOrca"),
    Shape("alpaca", {"instruction": "query", "output": "response"}, "MetaMathQA, ms-swift"),
    Shape("alpaca", {"instruction": "question", "output": "answer"}, "GSM8K"),
    Shape("alpaca", {"instruction": "query", "calls": "answers", "tools": "tools"}, "xLAM function calling"),
    Shape("alpaca", {"instruction": "input", "output": "output"}, "Llama-Nemotron post-training"),
)
FORMATS = tuple(RENDERED)
_NEEDED = {key for shape in SHAPES[: len(FORMATS)] for key in shape.needs}
assert _NEEDED | {*CONTEXT} - {"media", "documents"} == {*COLUMNS}
COLUMN_NAMES = frozenset(chain(*(shape.columns for shape in SHAPES), *CONTEXT.values()))
# By words like these the columns of an unknown file are guessed, in the refusal alone.
QUESTIONS = ("instruction", "question", "query", "prompt", "problem", "user", "human", "request", "input", "inputs")
QUESTIONS += ("task", "source_text")
DOCUMENTS = ("content", "document", "body", "article", "raw_content", "markdown", "page_content")
ANSWERS = ("output", "response", "answer", "completion", "solution", "assistant", "gpt", "reply", "target", "targets")
ANSWERS += ("summary", "target_text")

_DECIDES = ("loss", "train", "mask", "weight", "label")
_INNOCENT = re.compile(r"(con|re)?strain\w*|gloss\w*|blossom\w*|floss\w*|lightweight|unmasked_text")
_DECIDES_TOO = ("kto_tag",)  # LLaMA-Factory's: whether an answer is a wanted one
# Columns that have such a word in them and say something else: Nemotron's names the models it was used for.
_SAYS_SOMETHING_ELSE = ("used_in_training",)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def decides_targets(name: str) -> bool:
    """Tell whether a key by its name says what is trained on: loss_mask, isTrainable, label."""
    words = [word.lower() for word in _WORDS.findall(name)]
    joined = " ".join(word for word in words if not _INNOCENT.fullmatch(word))
    return name not in _SAYS_SOMETHING_ELSE and (name in _DECIDES_TOO or any(word in joined for word in _DECIDES))


@lru_cache(maxsize=1024)  # every record is asked for, and those of a file have few different sets of columns
def fitting_shapes(names: tuple[str, ...], record_format: str = "auto") -> tuple[Shape, ...]:
    """Return the shapes whose columns are all there, but those that another one of them reads whole."""
    fitting = [
        shape
        for shape in SHAPES
        if record_format in ("auto", shape.format) and all(name in names for name in shape.columns)
    ]
    return tuple(
        shape
        for shape in fitting
        if not any(other is not shape and other.names.issuperset(shape.columns) for other in fitting)
    )


def columns_to_read(
    names: Iterable[str], *, columns: Mapping[str, str], record_format: str = "auto"
) -> frozenset[str] | None:
    """Return which columns of a table are decoded; None for all of it, where its shape is unknown and is to be told."""
    names = list(names)
    ours = {theirs: name for name, theirs in columns.items()}
    if not fitting_shapes(tuple(ours.get(name, name) for name in names), record_format):
        return None
    read = COLUMN_NAMES | ours.keys()
    return frozenset(name for name in names if name in read or decides_targets(name))
