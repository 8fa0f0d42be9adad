"""The prepared data of a run with the tokenizer that made it, and what a person is shown of both before training."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import xxhash
from rich.text import Text
from transformers import AutoTokenizer, GenerationConfig

from fsdp_trainer.checkpoint_manifest import Progress
from fsdp_trainer.config import Config, ModelConfig
from fsdp_trainer.custom_code import digest_of_code, read_custom_code
from fsdp_trainer.data.cache import evaluation_source
from fsdp_trainer.data.describe import format_sample
from fsdp_trainer.data.loader import Window, iterate_windows, steps_per_epoch
from fsdp_trainer.data.prepare import prepare_rows
from fsdp_trainer.data.report import DataReport
from fsdp_trainer.data.rows import Rows
from fsdp_trainer.data.sources import resolve_paths
from fsdp_trainer.data.streaming import RowStream, build_stream, first_rows, stream_digest, stream_windows
from fsdp_trainer.data.template_files import read_chat_template
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.export_checksums import refuse_damaged_sides
from fsdp_trainer.gguf_model import local_model
from fsdp_trainer.model import check_longest_document, load_hf_config
from fsdp_trainer.progress import show_progress
from fsdp_trainer.weight_files import find_folder, open_weights


@dataclass(frozen=True)
class TrainingData:
    """Rows to train and evaluate on. `digest` identifies the training rows: a resume on other rows is another run.

    With data.streaming the rows to train on come from `stream`, and `train` holds the first of them, to be shown.
    `code` identifies the model's own Python code, None where it has none or none is run.
    """

    train: Rows
    stream: RowStream | None
    evaluation: Rows | None
    reports: tuple[tuple[str, DataReport], ...]
    tokenizer: Any
    generation_config: Any
    steps_per_epoch: int | None  # None: a stream, whose length nobody knows
    digest: str
    code: str | None

    def describe(self, *, samples: int, colour: bool) -> Iterator[str | Text]:
        """Yield the log's lines: counts of each data set, then the first rows decoded with their mask."""
        for name, report in self.reports:
            yield from (f"{name}: {line}" for line in report.format_lines())
        for index in range(min(samples, self.train.n_rows)):
            yield f"row {index} (what is trained on is marked):"
            yield format_sample(self.train, index, tokenizer=self.tokenizer, colour=colour)


def check_inputs(config: Config) -> None:
    """Refuse a run whose weights or data files are not there; headers and names are read, nothing else."""
    if config.model.init == "pretrained" and Path(config.model.path).exists():
        open_weights(find_folder(config.model.path))
    for named in (config.data.train, evaluation_source(config.data)):
        if named is not None:
            resolve_paths(named)


def load_training_data(
    config: Config, *, is_writer: bool, show: bool, check: Callable[[], None] = lambda: None
) -> TrainingData:
    """Load the tokenizer and prepare the rows of `data.train` and `data.eval`, from the cache where they are in it.

    Only a rank with `is_writer` builds; `show` draws its progress, `check` is called now and then and may raise. Of a
    stream only the first records are read.
    """

    def after_records(count: int) -> None:
        check()
        advance(count)

    # The model before its tokenizer: a wrong path would otherwise be called the tokenizer's fault.
    hf_config = load_hf_config(
        config.model.path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    tokenizer = load_tokenizer(config.model)
    # The template that trained goes with the exported model, wherever it came from.
    tokenizer.chat_template = read_chat_template(config.data.chat_template, tokenizer=tokenizer)
    vocab_size = hf_config.get_text_config().vocab_size
    generation_config = load_generation_config(config.model)
    stop_ids = _stop_ids(generation_config, hf_config)
    sources = {"train": config.data.train, "eval": evaluation_source(config.data)}
    prepared, stream = {}, None
    if config.data.streaming:
        stream = build_stream(
            config.data, tokenizer=tokenizer, seed=config.train.seed, vocab_size=vocab_size, stop_ids=stop_ids
        )
        prepared["train"] = first_rows(stream)
        del sources["train"]
    for split, source in sources.items():
        if source is not None:
            with show_progress(f"preparing {split} data", total=None, is_main=is_writer and show) as advance:
                prepared[split] = prepare_rows(
                    source,
                    data=config.data,
                    tokenizer=tokenizer,
                    seed=config.train.seed,
                    split=split,  # type: ignore[arg-type]
                    vocab_size=vocab_size,
                    stop_ids=stop_ids,
                    is_writer=is_writer,
                    on_records=after_records,
                )
    for name, (_, report) in prepared.items():
        # A later record of a stream may be as long as data.seq_len lets it.
        longest = config.data.seq_len if stream and name == "train" else report.longest_tokens
        check_longest_document(hf_config, longest_tokens=longest)
    train = prepared["train"][0]
    batch = config.batch.global_batch_size
    return TrainingData(
        train=train,
        stream=stream,
        evaluation=prepared["eval"][0] if "eval" in prepared else None,
        reports=tuple((_report_name(name, stream), report) for name, (_, report) in prepared.items()),
        tokenizer=tokenizer,
        generation_config=generation_config,
        steps_per_epoch=None if stream else steps_per_epoch(train.n_rows, global_batch_size=batch),
        digest=stream_digest(stream, first=identify_rows(train)) if stream else identify_rows(train),
        code=digest_of_code(read_custom_code(hf_config)) if config.model.trust_remote_code else None,
    )


def _report_name(name: str, stream: RowStream | None) -> str:
    return "train (the first records of the stream)" if stream and name == "train" else name


def training_windows(
    data: TrainingData, config: Config, *, progress: Progress, stop: int, rank: int, world_size: int
) -> Generator[Window, None, None]:
    """Yield what `rank` feeds in the steps from `progress` on, up to step `stop`."""
    if data.stream is not None:
        return stream_windows(
            data.stream,
            start=progress.step,
            stop=stop,
            resume_at=progress.stream,
            global_batch_size=config.batch.global_batch_size,
            micro_batch_size=config.batch.micro_batch_size,
            rank=rank,
            world_size=world_size,
        )
    return iterate_windows(
        data.train,
        start=progress.step,
        stop=stop,
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        rank=rank,
        world_size=world_size,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        seq_len=config.data.seq_len,
        packing=config.data.packing,
    )


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the model's tokenizer, or the one that `model.tokenizer` names."""
    path = local_model(model.tokenizer or model.path)
    refuse_damaged_sides(Path(path))
    revision = {"revision": model.revision} if model.revision else {}
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code, **revision)
    # Exception: what is broken in tokenizer.json is told by the Rust library in a class of no name.
    except Exception as error:
        raise ConfigError(
            "The tokenizer cannot be loaded.",
            values=shorten(f"{path}: {error}", 300),
            fix="set model.tokenizer to a folder with tokenizer.json, or to a hub id that can be reached",
        ) from error


def load_generation_config(model: ModelConfig) -> GenerationConfig | None:
    """Load the model's generation config; None where it has none."""
    try:
        return GenerationConfig.from_pretrained(local_model(model.path), revision=model.revision or "main")
    except (OSError, RecursionError):  # many models have none; one that cannot be read is none
        return None


def _stop_ids(generation_config: GenerationConfig | None, hf_config: Any) -> tuple[int, ...]:
    """Return the tokens at which generation stops: of the generation config, or else of the model's."""
    for config in (generation_config, hf_config, hf_config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (found,)
    return ()


def identify_rows(rows: Rows) -> str:
    """Return a digest of prepared rows and, where they are mixed, of the weights: what the order of rows rests on."""
    digest = xxhash.xxh3_128()
    for array in (rows.tokens, rows.supervised, rows.document_starts, rows.row_documents):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    if rows.weights is not None:
        digest.update(repr((rows.weights, rows.source_rows.tolist())).encode())  # type: ignore[union-attr]
    return digest.hexdigest()
