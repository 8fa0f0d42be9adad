"""Whatever stands in a file, an import ends with settings that load or with an error in three parts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.accelerate_profile import import_accelerate
from fsdp_trainer.interop.deepspeed import import_deepspeed
from fsdp_trainer.interop.folder import write_import
from fsdp_trainer.interop.key_table import load_table
from fsdp_trainer.interop.report import format_report
from fsdp_trainer.interop.trainer import import_trainer
from fsdp_trainer.interop.verdicts import Import

WORDS = [
    "auto",
    "cpu",
    "nvme",
    "none",
    "true",
    "False",
    "no",
    "",
    " ",
    "2e8",
    "3",
    "adamw",
    "Adam",
    "bf16",
    "fp16",
    "log",
]
WORDS += ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "cosine", "FULL_SHARD", "HYBRID_SHARD", "DEEPSPEED", "FSDP"]
WORDS += ["full_shard offload", "\u201cfalse\u201d", "a\nb", "1_000", "0x10", "-1", "1e999", "steps", "epoch"]
NUMBERS = [0, 1, 2, 3, 8, -1, 0.0, 0.5, 1e-5, 2e8, 15099494.4, -0.5, 10**25, 1e300, 2**63]
VALUES = st.sampled_from(
    [*WORDS, *NUMBERS, True, False, None, [], [1], ["a", 2], {}, {"x": 1}, [0.9, 0.99], {"enabled": True}]
)
IMPORTS: dict[str, tuple[Callable[[Path], Import], dict[str, Any]]] = {
    "deepspeed_keys": (
        lambda path: import_deepspeed(path, world_size=4),
        {"train_micro_batch_size_per_gpu": 2, "optimizer.type": "AdamW", "scheduler.type": "WarmupLR"},
    ),
    "accelerate_keys": (lambda path: import_accelerate(path), {"distributed_type": "FSDP", "num_processes": 4}),
    "arguments_keys": (lambda path: import_trainer(path, world_size=4), {"per_device_train_batch_size": 2}),
}


@pytest.mark.parametrize("table", IMPORTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_values_are_imported_or_refused(table: str, data: st.DataObject) -> None:
    read, base = IMPORTS[table]
    names = sorted(name for name in load_table(table).entries if not name.endswith("deepspeed_config_file"))
    chosen = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=5))
    nested: dict[str, Any] = {}
    for name, value in {**base, **chosen}.items():
        *sections, leaf = name.split(".")
        place = nested
        for section in sections:
            inner = place.get(section)
            place[section] = dict(inner) if isinstance(inner, dict) else {}
            place = place[section]
        place[leaf] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"  # JSON is YAML
        path.write_text(json.dumps(nested))
        try:
            found = read(path)
            write_import(found, Path(folder) / "out", allow=True)
        except ConfigError:
            assert not (Path(folder) / "out").exists()
            return
        config = Config.load(Path(folder) / "out" / "run.yaml")
        assert found.processes == 4 or "num_processes" in chosen
        assert config.check_world(found.processes or 1) >= 1
        assert not [one for one in found.verdicts if one.blocks]


@pytest.mark.parametrize("command", ["deepspeed", "accelerate", "trainer"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xef\xbb\xbf",
        b"\xff\xfe{\x00}\x00",
        b"\x00",
        b'{"a": "\xe9"}',
        b"[]",
        b"[1, 2]",
        b"{",
        b"a: [",
        b'"x"',
        b"\x1b[31m",
    ],
    ids=repr,
)
def test_files_that_hold_no_settings(command: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    read = {"deepspeed": import_deepspeed, "accelerate": import_accelerate, "trainer": import_trainer}[command]
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert "file.json" in str(caught.value)


MICRO = {"train_micro_batch_size_per_gpu": 2}
TWO_NAMES = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "none"}}
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefgh"
)


@pytest.mark.parametrize(
    ("command", "text", "part"),
    [
        ("deepspeed", json.dumps({**MICRO, "zero_optimization": {"stage": 2.5}}), "zero_optimization.stage (1:"),
        ("deepspeed", '{"train_micro_batch_size_per_gpu": 2.5}', "train_micro_batch_size_per_gpu (1:2)"),
        ("deepspeed", json.dumps({**MICRO, "fp16": {"enabled": True, "loss_scale": -1}}), "fp16.loss_scale"),
        (
            "deepspeed",
            json.dumps({**MICRO, "zero_optimization": TWO_NAMES}),
            "zero_optimization.cpu_offload",
        ),
        ("deepspeed", json.dumps({**MICRO, **{f"unknown_{n}": n for n in range(3000)}}), "and 2980 more"),
        ("deepspeed", '{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "\\udfff"}}', "half of a character"),
        ("trainer", '{"per_device_train_batch_size": 2, "output_dir": "\\ud800"}', "half of a character"),
        ("accelerate", BOMB + "distributed_type: FSDP\n", "more than 100000 values"),
        ("accelerate", "distributed_type: FSDP\nfsdp_config: &f {again: *f}\n", "not valid YAML"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_be_is_refused_at_once(command: str, text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    read = {
        "deepspeed": lambda: import_deepspeed(path, world_size=2),
        "accelerate": lambda: import_accelerate(path),
        "trainer": lambda: import_trainer(path, world_size=2),
    }[command]
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        write_import(read(), tmp_path / "out", allow="unknown" not in text)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 3000
    assert time.monotonic() - began < 5  # a list of lists that stand in one another took half a minute
    assert not (tmp_path / "out").exists()


def test_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**MICRO, "a\x1b[31m\nb": 1}), encoding="utf-8")
    report = format_report(import_deepspeed(path, world_size=2))
    assert "\x1b" not in report and "  a\\x1b[31m\\nb: 1\n" in report


@pytest.mark.parametrize("command", [import_deepspeed, import_accelerate, import_trainer])
def test_places_without_a_file(command: Callable[[Path], Import], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, part in (("pipe", "is no file"), ("loop", "does not exist"), ("x" * 300, "cannot be read")):
        with pytest.raises(ConfigError, match=part):
            command(tmp_path / name)
