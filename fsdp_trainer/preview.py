"""What a run would train on, before any training: the counts, lengths, rows and warnings of the prepared data.

It prepares through the same function as a run, so it cannot say something else.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from fsdp_trainer.config import Config
from fsdp_trainer.data.describe import format_length_bars, format_sample, save_length_plot
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.model import check_row_length
from fsdp_trainer.training_data import TrainingData, load_training_data
from fsdp_trainer.units import format_number

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class DataPreview:
    """Prepared data with the settings they were prepared by; `cache` is where the rows were left, None for nowhere."""

    data: TrainingData
    config: Config
    cache: Path | None

    @property
    def steps(self) -> int | None:
        """Count the optimizer steps of the run; None for a stream without train.max_steps."""
        if self.config.train.max_steps is not None:
            return self.config.train.max_steps
        per_epoch = self.data.steps_per_epoch
        return None if per_epoch is None else per_epoch * self.config.train.epochs

    def to_dict(self) -> dict[str, Any]:
        """Return every count as plain values, by data set."""
        return {
            "data_sets": {name: asdict(report) for name, report in self.data.reports},
            "steps_per_epoch": self.data.steps_per_epoch,
            "steps": self.steps,
            "global_batch_size": self.config.batch.global_batch_size,
            "cache": None if self.cache is None else str(self.cache),
        }

    def format_lines(self, *, samples: int, colour: bool) -> Iterator[str | Text]:
        """Yield what a person reads: counts and lengths of each data set, steps, and rows with their targets marked."""
        for name, report in self.data.reports:
            yield from (f"{name}: {line}" for line in report.format_facts())
            yield f"{name}: records by length in tokens"
            yield from format_length_bars(report)
            for warning in report.warnings:
                yield Text(f"{name}: warning: {warning}", style="yellow" if colour else "")
        batch = self.config.batch.global_batch_size
        if self.data.steps_per_epoch is not None:
            steps = format_number(self.data.steps_per_epoch, "step")
            yield f"{steps} an epoch, of {format_number(batch, 'row')} each; {self.steps:,} in the run"
        rows = self.data.train
        for index in np.unique(np.linspace(0, rows.n_rows - 1, min(samples, rows.n_rows), dtype=np.int64)).tolist():
            yield f"row {index} (what is trained on is marked):"
            yield format_sample(rows, index, tokenizer=self.data.tokenizer, colour=colour)
        if self.cache is not None:
            yield f"prepared rows are in {self.cache}; a run with these settings uses them"


@contextmanager
def preview_data(config: Config, *, write: bool, show: bool) -> Iterator[DataPreview]:
    """Prepare the data of a run; with `write` into the cache that the run reads, else into a folder that goes again."""
    if write and config.data.streaming:
        raise ConfigError(
            "A stream has no rows to write: they are made while training reads it.",
            values="--write, data.streaming: true",
            fix="leave out --write, or set data.streaming: false",
        )
    check_row_length(config.model, seq_len=config.data.seq_len)
    with tempfile.TemporaryDirectory() as scratch:
        settings = config if write else _with_cache(config, scratch)
        data = load_training_data(settings, is_writer=True, show=show)
        yield DataPreview(data=data, config=config, cache=_folder_of(data) if write else None)


def check_plot(path: Path | None) -> None:
    """Refuse a picture whose file name does not say how to write it, before any data is read."""
    if path is not None and path.suffix.lower() not in _PICTURES:
        raise ConfigError(
            "The name of the picture does not say what kind it is.",
            values=f"--plot {path}",
            fix=f"give a file that ends in {', '.join(_PICTURES)}",
        )


def save_plot(preview: DataPreview, path: Path) -> None:
    """Draw how long the records of each data set are."""
    save_length_plot(preview.data.reports, path, seq_len=preview.config.data.seq_len)


def _with_cache(config: Config, folder: str) -> Config:
    data = config.data.model_copy(update={"cache_dir": folder})
    return config.model_copy(update={"data": data})


def _folder_of(data: TrainingData) -> Path | None:
    """The folder of the training rows: their arrays are files of it, mapped."""
    name = getattr(data.train.tokens, "filename", None)
    return None if name is None else Path(name).parent
