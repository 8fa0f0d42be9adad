"""Ask the Hugging Face hub once whether it is there, before a library asks for half a minute; needs no torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_trainer.errors import ConfigError

TIMEOUT_SECONDS = 5.0


def refuse_unreachable(
    path: str, *, revision: str | None = None, files: Sequence[str] = ("config.json",), setting: str = "model.path"
) -> None:
    """Raise ConfigError where `path` is a hub id, none of `files` is in the cache, and the hub does not answer.

    What it answers, also that there is no such model, is left to whoever downloads.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or Path(path).exists():
        return
    if any(isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in files):
        return
    reason = "HF_HUB_OFFLINE is set"
    if not constants.is_offline_mode():
        try:
            HfApi().model_info(path, revision=revision, timeout=TIMEOUT_SECONDS)
            return
        except HfHubHTTPError:
            return
        except Exception as error:  # of the HTTP library, which differs between releases of the hub's
            reason = f"{constants.ENDPOINT} cannot be reached: {str(error) or type(error).__name__}"
    raise ConfigError(
        "The model is no folder here, and the hub cannot be asked for it."
        if setting == "model.path"
        else "The tokenizer is no folder here, and the hub cannot be asked for it.",
        values=f"{setting}: {path} ({reason}, and it is not in the cache {constants.HF_HUB_CACHE})",
        fix="give the path of a model folder, or let the hub be reached"
        + (" (unset HF_HUB_OFFLINE)" if constants.is_offline_mode() else ""),
    )


def refuse_unreachable_model(path: str, *, tokenizer: str | None, revision: str | None) -> None:
    """Raise ConfigError where the model, or the tokenizer that is named beside it, would have to come from afar."""
    refuse_unreachable(path, revision=revision)
    if tokenizer is not None:
        names = ("tokenizer.json", "tokenizer_config.json")
        refuse_unreachable(tokenizer, revision=revision, files=names, setting="model.tokenizer")
