"""The README.md of an exported model: what was trained, on what, how far, and with which settings and versions."""

import re
from collections.abc import Mapping
from pathlib import Path

from fsdp_trainer.checkpoint_manifest import Progress
from fsdp_trainer.config import Config, SourceConfig

CARD = "README.md"
# What a reader needs to judge or repeat the training; everything else is in the run's config.yaml.
_SETTINGS = (
    ("model", "revision"),
    ("model", "freeze"),
    ("data", "train_on"),
    ("data", "seq_len"),
    ("data", "packing"),
    ("batch", "global_batch_size"),
    ("optim", "name"),
    ("optim", "lr"),
    ("optim", "betas"),
    ("optim", "weight_decay"),
    ("optim", "max_grad_norm"),
    ("schedule", "name"),
    ("train", "seed"),
)


def format_model_card(config: Config, *, progress: Progress, versions: Mapping[str, str], dtype: str) -> str:
    """Return the card as Markdown. Paths are those the user wrote in the settings, no others."""
    data = _format_sources(config.data.train)
    start = "trained from" if config.model.init == "pretrained" else "with new weights in the architecture of"
    settings = [(f"{section}.{name}", getattr(getattr(config, section), name)) for section, name in _SETTINGS]
    settings.insert(0, ("precision", config.precision))
    lines = [
        "---",
        *_front_matter(config),
        "---",
        "",
        f"# {Path(config.output_dir).name}",
        "",
        f"A causal language model, {start} `{config.model.path}` with all parameters"
        + (" but the frozen ones" if config.model.freeze else "")
        + " by fsdp_trainer.",
        "",
        "| | |",
        "|---|---|",
        f"| training data | {data} |",
        f"| optimizer steps | {progress.optimizer_steps:,} ({progress.skipped_steps:,} skipped) |",
        f"| tokens seen | {progress.tokens_seen:,}, of which {progress.supervised_tokens_seen:,} were targets |",
        f"| weights | {dtype} |",
        *(f"| {name} | {_show(value)} |" for name, value in settings if value not in (None, ())),
        f"| versions | {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))} |",
        "",
        "Evaluate it on your own data before use: nothing here says how good it is.",
    ]
    return "\n".join(lines) + "\n"


def _front_matter(config: Config) -> list[str]:
    base = config.model.path
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not base.startswith(".") and not Path(base).exists()
    return [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if is_hub_id and config.model.init == "pretrained" else []),
        "tags: [fsdp, full-fine-tuning]",
    ]


def _format_sources(named: str | SourceConfig | tuple[str | SourceConfig, ...]) -> str:
    entries = named if isinstance(named, tuple) else (named,)
    return ", ".join(
        entry if isinstance(entry, str) else entry.path + (f" (weight {entry.weight:g})" if entry.weight else "")
        for entry in entries
    )


def _show(value: object) -> str:
    return ", ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)
