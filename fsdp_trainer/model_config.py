"""What config.json may not say, looked at as text: before Transformers builds lists, modules or code from it.

Needs no torch, so that a local folder is looked at before any process is started.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.run_folder import parse_json

# Of a model far larger than any there is. With 100,000 layers Transformers took minutes, with 2**60 all memory.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim"), 2**17),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2**17),
    **dict.fromkeys(("hidden_size", "intermediate_size", "n_embd", "n_inner", "d_model", "ffn_dim"), 2**24),
    "vocab_size": 2**28,
}
# Transformers fetches and runs a kernel of the hub where one of these names it, whatever the model's own code may do.
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")


def refuse_hostile_config(path: str, *, file: Path | None = None, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for a config.json that cannot be meant, or that names code of the hub which is not trusted.

    `path` is the model's, for the message; `file` its config.json where that is not in the folder `path`.
    """
    file = file or Path(path) / "config.json"
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return  # whoever reads it next says more of it
    except ValueError as error:
        raise ConfigError(
            "The model's config.json cannot be used.",
            values=f"model.path: {path} ({error})",
            fix="correct config.json, or take it anew from where the model comes from",
        ) from None
    for key, value in _entries(found):
        most = _MOST.get(key)
        if most is not None and isinstance(value, int | float) and value > most:
            raise ConfigError(
                "The model's config.json describes no model.",
                values=f"model.path: {path}, {key}: {value}; no model has more than {most:,}",
                fix="give the config.json that belongs to the weights",
            )
        if not trust_remote_code and _IMPLEMENTATION.fullmatch(key):
            named = [text for text in (value.values() if isinstance(value, dict) else [value]) if isinstance(text, str)]
            if kernels := [text for text in named if "/" in text]:
                raise ConfigError(
                    "The model's config.json names a kernel of the hub: code that would be fetched and run.",
                    values=f"model.path: {path}, {key}: {kernels[0]}",
                    fix=f"take {key} out of config.json (model.attention says which attention is used), or read that "
                    "code and set model.trust_remote_code: true",
                )


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from _entries(inner)
