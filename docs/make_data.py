"""Writes docs/data.md from the tables that records are read by, so that the page cannot say something else.

Run `python docs/make_data.py` after a change to data/known_keys.py; a test compares the page with what this writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdp_trainer.data import known_keys as keys

PAGE = Path(__file__).with_name("data.md")

INTRODUCTION = """\
# What a record may look like

Written by `docs/make_data.py` from `fsdp_trainer/data/known_keys.py`: change the tables there, not here.

A record is recognised by its columns; `fsdp-trainer data` shows rows as they would train, with their targets marked.
Every key is read, refused or named, and none is dropped without a word:

- a key of a message, or of a part of its content, that stands in no table below is refused by line and name;
- a column that nothing reads is named once in the log, unless its name has loss, train, mask, weight or label in it: it
  may decide what is trained on, so it is refused;
- a record that fits two shapes is refused, unless the other columns only repeat what it says (the first question of
  UltraChat 200k in `prompt`, Alpaca's `text`). `data.format` or `data.columns` says which is meant;
- null is the same as a missing key, because a table has every column in every row. `NaN` and `Infinity` are no JSON.
"""


def format_page() -> str:
    """Formats the whole page from the tables."""
    return "\n".join(
        [
            INTRODUCTION,
            "## Shapes\n",
            "One file keeps to one shape. What is not listed is read with `data.columns`, which the refusal writes out "
            "where the columns' names let it.\n",
            _table(
                ("columns", "read as (`data.format`)", "published sets of this shape"),
                ((_names(shape.columns, " + "), f"`{shape.format}`", shape.sets) for shape in keys.SHAPES),
            ),
            f"The turns of {_names(keys.TEXT_TURNS)} may be texts alone (question, answer, question ...). Any list of "
            "turns may hold pairs, objects of "
            + ", or ".join(_names(pair, " and ") for pair in keys.PAIRS)
            + ", with `system`. The question of an `alpaca` record may be a list of messages.\n",
            "## What stands beside the turns\n",
            "Filled, a column is rendered or refused by name:\n",
            _table(("columns", "rendered in", "refused in"), _context_rows()),
            "In `prompt_completion` that holds for lists of messages: beside plain text all of them are refused. "
            "`context` is refused nowhere; where it is not rendered it is a column that is not read. "
            "`chat_template_kwargs` are variables of the chat template. A text or list that the template does not read "
            "is refused, a switch is counted.\n",
            "## Keys of a message\n",
            _table(("keys", "what they are"), _message_rows()),
            f"Roles: {_names(keys.ROLES)}; also "
            + ", ".join(f"`{name}` ({role})" for name, role in keys.SAME_ROLE.items())
            + ", in any case of letters.\n",
            f"Parts of a content have {_names(sorted(keys.PART_KEYS - set(keys.MARKS)))} and the marks below; they are "
            f"of type {_names(keys.TEXT_PARTS)}. What a tool gives back may be a number or an object, and is written "
            "as JSON.\n",
            "## What is no target\n",
            "An answer, or a part of one, is context and no target where one of these says so. Another value, a mark "
            "that asks to train on a question, and marks that contradict each other are refused.\n",
            _table(
                ("key", "takes", "known from"),
                ((f"`{key}`", takes, source) for key, (source, takes) in keys.MARKS.items()),
            ),
            f"{_names(keys.DETAILS)} hold stretches of the text, each {_names(keys.DETAIL_KEYS)} (characters, the "
            "last included): what none of them names is no target. The end of turn of an answer is a target with any "
            "part of it.\n",
        ]
    )


def _context_rows() -> Iterable[Sequence[str]]:
    for kind, names in keys.CONTEXT.items():
        rendered = [name for name, kinds in keys.RENDERED.items() if kind in kinds]
        refused = [name for name in keys.RENDERED if name not in rendered]
        yield _names(names), _names(rendered) or "none", _names(refused)


def _message_rows() -> Iterable[Sequence[str]]:
    yield _names(keys.ROLE_KEYS), "who speaks"
    yield _names(keys.TEXT_KEYS), "what is said: a text, or a list of parts"
    yield "`tool_calls`", "calls of an answer, each with `name` and `arguments` (an object or its JSON)"
    yield _names(keys.REASONING_KEYS), "the reasoning of an answer"
    yield _names(keys.PLAIN_KEYS), "handed to the chat template"
    yield _names([*keys.MARKS, *keys.DETAILS]), "what is a target, see below"
    yield _names(keys.REFUSED_KEYS), "refused where they are filled"
    yield _names(keys.IGNORED_KEYS), "about the message, and not read"


def _names(names: Iterable[str], between: str = ", ") -> str:
    return between.join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    """Writes the page beside this script."""
    PAGE.write_text(format_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
