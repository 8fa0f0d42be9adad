"""That all ranks are of one run: each reads its own settings and data, and on several machines these may differ.

Different ones would train something that nobody asked for, or hang in the first collective that only some take part in.
"""

from collections.abc import Mapping, Sequence

from fsdp_trainer.agreement import gather_from_all, run_on_main
from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import setting
from fsdp_trainer.config_reading import dotted_names, format_value
from fsdp_trainer.errors import ConfigError

# The same content may stand elsewhere on another machine; check_same_rows compares what was made of it.
_PLACES = {"model.path", "model.tokenizer", "data.train", "data.eval", "data.chat_template", "data.cache_dir"}


def check_same_settings(config: Config) -> None:
    """Raise ConfigError on every rank when any rank was given other settings than rank 0. Collective."""
    names = [name for name in dotted_names(Config) if name not in _PLACES]
    mine = {name: format_value(setting(config, name)) for name in names}
    found = gather_from_all(lambda: mine)
    run_on_main(lambda: _compare_settings(names, found))


def _compare_settings(names: Sequence[str], found: Sequence[Mapping[str, str]]) -> None:
    if wrong := [text for name in names if (text := _difference(name, found))]:
        raise ConfigError(
            "The ranks were given different settings.",
            values="; ".join(wrong),
            fix="start every machine with the same settings file and the same flags",
        )


def check_same_rows(digest: str) -> None:
    """Raise ConfigError on every rank when any rank prepared other training rows than rank 0. Collective."""
    found = gather_from_all(lambda: digest)
    run_on_main(lambda: _compare_rows(found))


def _compare_rows(found: Sequence[str]) -> None:
    if other := [rank for rank, theirs in enumerate(found) if theirs != found[0]]:
        raise ConfigError(
            "The ranks prepared different training rows.",
            values=f"rank {other[0]} has other rows than rank 0"
            + (f", and {len(other) - 1} more" if other[1:] else ""),
            fix="give every machine the same data, tokenizer and chat template",
        )


def _difference(name: str, found: Sequence[Mapping[str, str]]) -> str:
    for rank, theirs in enumerate(found):
        if theirs[name] != found[0][name]:
            return f"{name}: {found[0][name]} on rank 0, {theirs[name]} on rank {rank}"
    return ""
