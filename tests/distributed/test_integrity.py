"""Damage is found before a weight is used, and nothing in a checkpoint is obeyed, whatever file it lies in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweeps.damage import damage_folder, save_two
from tests import checkpoint_runs as runs
from tests import hostile_pickles
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]
NAMES = sorted(hostile_pickles.make(Path("mark")))
# What a payload would have to do first; opening files to read them is what verification is for.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "exec", "compile", "import")
FORBIDDEN += ("os.mkdir", "os.remove", "os.rename", "pickle.find_class", "ctypes", "socket", "builtins.breakpoint")


def tiny(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    return settings(model, "unused.jsonl", folder, **sections)


@pytest.fixture(scope="module")
def saved(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny Llama after one step on two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_on_kept_ranks(runs.train_and_save, 2, tiny(model_folder("llama"), folder), 1, 1, False)
    return folder / "checkpoints" / "step-00000001"


def test_there_are_forty_hostile_pickles() -> None:
    assert len(NAMES) == 40


# The table of contents


def read_hostile_tables(saved: str, folder: str) -> dict[str, tuple[str, list[str], bool]]:
    """Read every hostile pickle as a table; return what was said, what the audit hook saw, whether a mark was left."""
    import sys

    from fsdp_trainer.checkpoint_table import read_table
    from fsdp_trainer.errors import CheckpointError

    place, mark = Path(folder), Path(folder) / "mark"
    seen: list[str] = []
    watching = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writing = event == "open" and any(letter in str(arguments[1]) for letter in "wax+")
        if watching and (writing or event.startswith(FORBIDDEN)):
            seen.append(f"{event} {arguments!r}")

    sys.addaudithook(hook)
    answers = {}
    sizes = {path.name: path.stat().st_size for path in Path(saved).iterdir()}
    read_table(Path(saved), sizes)  # imports whatever it imports lazily, and shows that a good one is read
    for name, content in hostile_pickles.make(mark).items():
        (place / ".metadata").write_bytes(content)
        seen.clear()
        watching = True
        try:
            read_table(place, sizes)
            said = "read"
        except CheckpointError as error:
            said = str(error)
        watching = False
        answers[name] = said, list(seen), mark.exists()
    return answers


def test_no_hostile_table_runs(saved: Path, tmp_path: Path) -> None:
    answers = run_ranks(read_hostile_tables, 1, str(saved), str(tmp_path))[0]
    assert len(answers) == 40
    for name, (said, seen, marked) in answers.items():
        assert said.startswith("The checkpoint's table of contents cannot be read."), (name, said)
        assert not seen, (name, seen)
        assert not marked, name


def test_the_payloads_are_real(tmp_path: Path) -> None:
    """Plain pickle obeys them: otherwise a reader that obeys would pass unnoticed."""
    import pickle

    mark = tmp_path / "mark"
    for name in ("os_system", "inst", "obj", "getattr_chain", "memo_hides_it", "stack_global"):
        mark.unlink(missing_ok=True)
        pickle.loads(hostile_pickles.make(mark)[name])
        assert mark.exists(), name


def read_edited_tables(saved: str, folder: str) -> dict[str, str]:
    """Change one value of a good table at a time, as torch's classes allow, and return what reading it says."""
    import copy
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import TensorProperties

    from fsdp_trainer.checkpoint_table import read_table
    from fsdp_trainer.errors import CheckpointError

    good: Any = pickle.loads((Path(saved) / ".metadata").read_bytes())
    sizes = {path.name: path.stat().st_size for path in Path(saved).iterdir()}
    index = next(iter(good.storage_data))
    entry = good.state_dict_metadata[index.fqn]
    place = good.storage_data[index]

    def put(**changes: Any) -> Callable[[Any], None]:
        return lambda table: table.storage_data.update({index: _StorageInfo(**{**vars(place), **changes})})

    def edit(**changes: Any) -> Callable[[Any], None]:
        return lambda table: vars(table.state_dict_metadata[index.fqn]).update(changes)

    edits: dict[str, Callable[[Any], None]] = {
        "none": lambda table: None,
        "outside": put(relative_path="../step-00000001/__0_0.distcp"),
        "absolute": put(relative_path=str(Path(saved) / "__0_0.distcp")),
        "no_such_file": put(relative_path="__7_0.distcp"),
        "itself": put(relative_path=".metadata"),
        "past_the_end": put(offset=2**40),
        "negative": put(offset=-1),
        "too_short": put(length=1),
        "too_long": put(length=sizes[place.relative_path] - place.offset),
        "transformed": put(transform_descriptors=["zstd"]),
        "huge_shape": edit(size=torch.Size([2**40]), chunks=[copy.copy(entry.chunks[0])] * 2),
        "other_dtype": edit(properties=TensorProperties(dtype=torch.float64)),
        "sparse": edit(properties=TensorProperties(layout=torch.sparse_coo)),
        "no_part": lambda table: table.storage_data.pop(index),
        "no_tensor": lambda table: table.state_dict_metadata.pop(index.fqn),
    }
    said = {}
    for name, change in edits.items():
        table = copy.deepcopy(good)
        change(table)
        (Path(folder) / ".metadata").write_bytes(pickle.dumps(table))
        try:
            read_table(Path(folder), sizes)
            said[name] = "read"
        except CheckpointError as error:
            said[name] = error.values
    return said


def test_a_table_that_lies_about_files_and_sizes_is_refused(saved: Path, tmp_path: Path) -> None:
    said = run_ranks(read_edited_tables, 1, str(saved), str(tmp_path))[0]
    assert said.pop("none") == "read"
    assert len(said) == 14
    assert [name for name, text in said.items() if text == "read"] == []
    assert "is no file of this checkpoint" in said["outside"]


# Every other file


def load_hostile_files(settings: dict[str, Any], saved: str, folder: str) -> list[tuple[str, str, bool]]:
    """Put each pickle in place of each file, with a manifest that fits it, and return what loading says."""
    from fsdp_trainer.checkpoint_manifest import describe_file, read_state, write_state
    from fsdp_trainer.errors import CheckpointError

    run, mark = runs.build(settings), Path(folder) / "mark"
    answers = []
    for name, content in hostile_pickles.make(mark).items():
        for file in ("__0_0.distcp", "__1_0.distcp", "state.json", ".metadata"):
            bad = Path(folder) / "step-00000001"
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(saved, bad)
            (bad / file).write_bytes(content)
            if file != "state.json":  # whoever can write there can also make the hashes fit
                state = read_state(bad)
                write_state(bad, state | {"files": state["files"] | {file: describe_file(bad / file)}})
            try:
                runs.load(run, bad)
                said = "loaded"
            except CheckpointError as error:
                said = str(error)
            answers.append((f"{name} in {file}", said, mark.exists()))
    return answers


def test_no_pickle_runs_from_any_file_of_a_checkpoint(saved: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    config = tiny(model_folder("llama"), tmp_path)
    answers = run_ranks(load_hostile_files, 1, config, str(saved), str(tmp_path), timeout=120.0)[0]
    assert len(answers) == 160
    for name, said, marked in answers:
        assert said != "loaded", name
        assert not marked, name


def load_padded_part(settings: dict[str, Any], saved: str, folder: str) -> str:
    """Overwrite the tensors' bytes with a pickle but keep sizes, hashes and table right; return what loading says."""
    from fsdp_trainer.checkpoint_manifest import describe_file, read_state, write_state
    from fsdp_trainer.errors import CheckpointError

    bad, mark = Path(folder) / "step-00000001", Path(folder) / "mark"
    shutil.copytree(saved, bad)
    content = hostile_pickles.make(mark)["os_system"]
    part = bad / "__0_0.distcp"
    part.write_bytes(content + part.read_bytes()[len(content) :])
    state = read_state(bad)
    write_state(bad, state | {"files": state["files"] | {part.name: describe_file(part)}})
    try:
        runs.load(runs.build(settings), bad)
    except CheckpointError as error:
        return f"{error} {mark.exists()}"
    return "loaded"


def test_a_tensor_replaced_by_a_pickle_is_not_obeyed(saved: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    said = run_ranks(load_padded_part, 1, tiny(model_folder("llama"), tmp_path), str(saved), str(tmp_path))[0]
    assert said.startswith("The checkpoint cannot be read.")
    assert said.endswith("False")


# Bytes


def find_and_load(settings: dict[str, Any], damaged: str) -> tuple[str | None, list[str], str, list[str]]:
    """Return what auto finds and says, what an explicit load says, and which tensors that load has changed."""
    from fsdp_trainer.checkpoint_search import find_checkpoint
    from fsdp_trainer.errors import CheckpointError

    run, notes = runs.build(settings), []
    before = runs.local_digests(run)
    found = find_checkpoint(Path(run.config.output_dir), resume="auto", log=notes.append)
    try:
        runs.load(run, Path(damaged))
        said = "loaded"
    except CheckpointError as error:
        said = str(error)
    return found and found.name, notes, said, runs.differing(before, runs.local_digests(run))


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_one_flipped_bit_is_found_by_all_ranks_and_auto_falls_back(
    file: str, saved: Path, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """The kind that every format loads in silence: a bit inside a tensor."""
    for step in (1, 2):
        shutil.copytree(saved, tmp_path / "checkpoints" / f"step-{step:08d}")
    bad = tmp_path / "checkpoints" / "step-00000002" / file
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 1
    bad.write_bytes(content)
    answers = run_ranks(find_and_load, 2, tiny(model_folder("llama"), tmp_path), str(bad.parent))
    for rank, (found, notes, said, changed) in enumerate(answers):
        assert found == "step-00000001"
        assert [f"{file} is damaged" in note for note in notes] == ([True] if rank == 0 else [])
        assert f"{file} is damaged" in said
        assert changed == [], "a damaged checkpoint has touched the run"


def find_without_intact(output_dir: str) -> str:
    import torch.distributed as dist

    from fsdp_trainer.checkpoint_search import find_checkpoint
    from fsdp_trainer.errors import CheckpointError

    dist.init_process_group("gloo")
    try:
        return str(find_checkpoint(Path(output_dir), resume="auto"))
    except CheckpointError as error:
        return str(error)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(saved: Path, tmp_path: Path) -> None:
    """The kind of auto-resume that begins at step 0 again and overwrites the run."""
    shutil.copytree(saved, tmp_path / "checkpoints" / "step-00000001")
    part = tmp_path / "checkpoints" / "step-00000001" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    for message in run_ranks(find_without_intact, 2, str(tmp_path)):
        assert message.startswith("No checkpoint of this run is intact.")
        assert "__1_0.distcp is damaged" in message


def damaged_in_every_way(first: str, other: str) -> tuple[dict[str, int], dict[str, int], int]:
    count = damage_folder(Path(first), flips=200, others=40, clean=30, seed=11, other=Path(other))
    return dict(count.tried), dict(count.found), count.false_alarms


def test_every_damage_is_found_and_no_intact_one_refused(
    saved: Path, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """A seeded share of `python -m benchmarks.sweeps.damage`."""
    run_on_kept_ranks(runs.train_and_save, 2, tiny(model_folder("llama"), tmp_path), 2, 2, False)
    other = tmp_path / "checkpoints" / "step-00000002"
    tried, found, false_alarms = run_ranks(damaged_in_every_way, 1, str(saved), str(other), timeout=120.0)[0]
    assert found == tried
    assert sum(tried.values()) > 350
    assert false_alarms == 0


def test_every_damage_of_an_export_is_found_and_no_intact_one_refused(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    run_ranks(save_two, 2, tiny(model_folder("llama"), tmp_path), str(tmp_path))
    folders = [str(tmp_path / f"model-{step}") for step in (1, 2)]
    tried, found, false_alarms = run_ranks(damaged_in_every_way, 1, *folders, timeout=120.0)[0]
    assert found == tried
    assert sum(tried.values()) > 350
    assert {"parts exchanged", "checksums.json missing"} <= set(tried)
    assert any(kind.endswith(".safetensors of another one") for kind in tried)
    assert false_alarms == 0


def verified(folder: str) -> str:
    """Return what the command says of a folder."""
    import contextlib
    import io

    from fsdp_trainer.cli import main

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), contextlib.suppress(SystemExit):
        main(["verify", folder])
    return out.getvalue() + error.getvalue()


def test_the_command_verifies_checkpoints_and_exports(saved: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    run_ranks(save_two, 1, tiny(model_folder("llama"), tmp_path), str(tmp_path))
    checkpoint = Path(shutil.copytree(saved, tmp_path / saved.name))
    for folder, file in ((checkpoint, "__0_0.distcp"), (tmp_path / "model-1", "config.json")):
        assert "every byte is as it was written" in run_ranks(verified, 1, str(folder))[0]
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert f"{file} is damaged" in run_ranks(verified, 1, str(folder))[0]
    assert "The folder does not exist." in run_ranks(verified, 1, str(tmp_path / "none"))[0]
    (tmp_path / "notes").mkdir()
    assert "neither a checkpoint nor an export" in run_ranks(verified, 1, str(tmp_path / "notes"))[0]
    run = tmp_path / "run"
    shutil.copytree(saved, run / "checkpoints" / saved.name)
    shutil.copytree(tmp_path / "model-2", run / "model")
    assert run_ranks(verified, 1, str(run))[0].count("every byte is as it was written") == 2, "all that a run has"


def read_with_named_members(saved: str) -> tuple[bool, bool]:
    """Pickle a good table as Python 3.11.2 does, enum members by getattr; return whether it is so, and read equal."""
    import pickle

    import torch.distributed.checkpoint.metadata as dcp

    from fsdp_trainer.checkpoint_table import read_table

    folder = Path(saved)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    before = read_table(folder, sizes)
    table = folder / ".metadata"
    content = table.read_bytes()

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, dcp._MEM_FORMAT_ENCODING):
                return getattr, (type(value), value.name)
            return NotImplemented

    with table.open("wb") as file:
        Pickler(file, protocol=4).dump(pickle.loads(content))
    try:
        return b"getattr" in table.read_bytes(), read_table(folder, sizes) == before
    finally:
        table.write_bytes(content)


def test_a_table_written_by_an_older_python_is_read(saved: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickle an enum's member as getattr(enum, name): a checkpoint of theirs was lost."""
    assert run_ranks(read_with_named_members, 1, str(saved)) == [(True, True)]
