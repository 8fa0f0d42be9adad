"""Where a chat template comes from: a file that the settings name, or the tokenizer itself."""

from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_trainer.errors import DataError
from fsdp_trainer.run_folder import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_chat_template(path: str | Path | None, *, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the text of a template file, or the tokenizer's own template; None when it has none."""
    if path is None:
        return _own_template(tokenizer)
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "data.chat_template cannot be read", values=f"{path}: {error}", fix="give the path of a Jinja file in UTF-8"
        ) from error
    try:
        inside = parse_json(text)
    except ValueError:
        return text
    # chat_template.json and tokenizer_config.json, in which models publish it
    found = inside.get("chat_template") if isinstance(inside, dict) else None
    return found if isinstance(found, str) else text


def _own_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    found = tokenizer.chat_template
    if isinstance(found, dict) and "default" not in found:
        raise DataError(
            "the tokenizer has several chat templates and none of them is its default",
            values=f"{tokenizer.name_or_path}: {', '.join(map(str, found))}",
            fix="write the one you mean to a file and name that in data.chat_template",
        )
    return tokenizer.get_chat_template() if found else None
