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


def format_model_card(
    config: Config,
    *,
    progress: Progress,
    versions: Mapping[str, str],
    dtype: str,
    evaluation: tuple[int, float] | None = None,
    chat: bool = False,
) -> str:
    """Return the card as Markdown. Paths are those the user wrote in the settings, no others.

    `evaluation` is the step and the loss (mean over held-out targets, natural logarithm) of the last evaluation;
    `chat` says that the tokenizer has a chat template.
    """
    data, held_out = _format_sources(config.data.train), config.data.eval
    measured = [("evaluation loss", f"{evaluation[1]:.4f} after step {evaluation[0]:,}")] if evaluation else []
    if measured and held_out is not None:
        share = f"{held_out:.3g} of the training data, held out" if isinstance(held_out, float) else None
        measured.append(("evaluation data", share or _format_sources(held_out)))  # type: ignore[arg-type]
    settings = [(f"{section}.{name}", getattr(getattr(config, section), name)) for section, name in _SETTINGS]
    settings.insert(0, ("precision", config.precision))
    lines = [
        "---",
        *_front_matter(config),
        "---",
        "",
        f"# {Path(config.output_dir).name}",
        "",
        _first_sentence(config),
        "",
        "```python",
        *_usage(chat=chat),
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| training data | {data} |",
        *(f"| {name} | {value} |" for name, value in measured),
        f"| optimizer steps | {progress.optimizer_steps:,} ({progress.skipped_steps:,} skipped) |",
        f"| tokens seen | {progress.tokens_seen:,}, of which {progress.supervised_tokens_seen:,} were targets |",
        f"| weights | {dtype} |",
        *(f"| {name} | {_show(value)} |" for name, value in settings if value not in (None, ())),
        f"| versions | {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))} |",
        "",
        "Evaluate it on your own data before use"
        + (
            ": the loss above is that of the held-out data alone."
            if measured
            else ": nothing here says how good it is."
        ),
    ]
    return "\n".join(lines) + "\n"


def _first_sentence(config: Config) -> str:
    trained = "all parameters but the frozen ones" if config.model.freeze else "all parameters"
    if config.model.init == "pretrained":
        return f"A causal language model: `{config.model.path}`, fine-tuned with fsdp_trainer ({trained} were trained)."
    return (
        f"A causal language model in the architecture of `{config.model.path}`, trained from random weights with "
        "fsdp_trainer."
    )


def _usage(*, chat: bool) -> list[str]:
    prompt = '[{"role": "user", "content": "Who are you?"}]' if chat else '"Once upon a time"'
    return [
        "from transformers import pipeline",
        "",
        'generate = pipeline("text-generation", model="path/to/this/folder")',
        f"print(generate({prompt}, max_new_tokens=100))",
    ]


def _front_matter(config: Config) -> list[str]:
    base, named = config.model.path, config.data.train
    paths = [one if isinstance(one, str) else one.path for one in (named if isinstance(named, tuple) else (named,))]
    data_sets = list(dict.fromkeys(path for path in paths if _is_hub_id(path)))
    return [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if _is_hub_id(base) and config.model.init == "pretrained" else []),
        *(["datasets:", *(f"- {path}" for path in data_sets)] if data_sets else []),
        "tags: [fsdp, full-fine-tuning]",
    ]


def _is_hub_id(path: str) -> bool:
    """Tell an owner/name of the hub from a path; a file's ending is no part of a name there."""
    is_file = Path(path).suffix.lower() in (
        ".jsonl",
        ".json",
        ".parquet",
        ".csv",
        ".tsv",
        ".txt",
        ".arrow",
        ".gz",
        ".zst",
    )
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)) and not is_file and not Path(path).exists()


def _format_sources(named: str | SourceConfig | tuple[str | SourceConfig, ...]) -> str:
    entries = named if isinstance(named, tuple) else (named,)
    return ", ".join(
        entry if isinstance(entry, str) else entry.path + (f" (weight {entry.weight:g})" if entry.weight else "")
        for entry in entries
    )


def _show(value: object) -> str:
    return ", ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)
