"""What is on disk when a name promises it: files before the rename, folders after it, and the old ones go last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import checkpoint_runs as runs
from tests.ranks import run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]
Call = tuple[str, str]


def recorded(action: Callable[[], object]) -> list[Call]:
    """Call `action` and return, in order, which files it opened for writing, synced, renamed and removed.

    Opening, renaming and removing have audit events; os.fsync has none, and is recorded on its way to the system. An
    exchange of two names goes to the system's library, where it is seen to be looked up.
    """
    import sys

    calls: list[Call] = []
    recording, sync = True, os.fsync

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not recording:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            calls.append(("write", str(arguments[0])))
        elif event == "os.rename":
            calls.append(("rename", f"{arguments[0]} {arguments[1]}"))
        elif event == "ctypes.dlsym" and arguments[1] == "renameat2":  # looked up once a call, and called at once
            calls.append(("exchange", ""))
        elif event in ("os.remove", "os.rmdir"):
            calls.append(("remove", str(arguments[0])))

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        sync(number)
        calls.append(("sync", os.readlink(f"/proc/self/fd/{number}")))

    sys.addaudithook(hook)
    os.fsync = fsync
    try:
        action()
    finally:
        recording, os.fsync = False, sync
    return calls


def record_saves(run_settings: dict[str, Any], asynchronous: bool) -> list[Call]:
    """Save twice, keeping one, and return what this rank did to files in the second save and its prune."""
    run = runs.build(run_settings)
    group = runs.save_group()
    runs.save(run, 1, process_group=group).wait()
    return recorded(lambda: runs.save(run, 2, process_group=group, asynchronous=asynchronous, keep_latest=1).wait())


def assert_in_order(calls: list[Call], *, target: Path, parts: set[str]) -> None:
    """Everything in the folder is synced before it gets its name, its parent after, and nothing goes before that."""
    temporary = target.with_name(f".{target.name}.tmp")
    published = calls.index(("rename", f"{temporary} {target}"))
    before, after = calls[:published], calls[published + 1 :]
    # state.json is written under another name and moved; whatever is written must be synced after its last opening.
    written = {name for what, name in before if what == "write" and name.startswith(f"{temporary}/")}
    assert {Path(name).name for name in written} >= parts, "some file was written in a way that is not seen"
    for name in written:
        last_opened = max(index for index, call in enumerate(before) if call == ("write", name))
        assert ("sync", name) in before[last_opened:], f"{name} is not synced"
    inside = [index for index, (_, name) in enumerate(before) if name.startswith(f"{temporary}/")]
    assert ("sync", str(temporary)) in before[max(inside) :], "the folder is not synced after its last file"
    assert after[0] == ("sync", str(target.parent)), "the new name is not durable before anything else is done"
    assert [call for call in before if call[0] == "remove"] == [], "something goes before the new one is published"


def test_a_save_is_durable_before_it_counts(model_folder: ModelFolder, tmp_path: Path) -> None:
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        config = settings(model_folder("llama"), "unused.jsonl", folder)
        main, other = run_ranks(record_saves, 2, config, asynchronous)
        target, old = (folder / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
        assert_in_order(main, target=target, parts={"__0_0.distcp", ".metadata.tmp"})

        # The other rank's file is synced before that rank says so, which rank 0 waits for.
        part = str(target.with_name(f".{target.name}.tmp") / "__1_0.distcp")
        assert other == [("write", part), ("sync", part)]

        # The old one loses its name, durably, before a file of it goes.
        doomed = old.with_name(f".{old.name}.deleting")
        unpublished = main.index(("rename", f"{old} {doomed}"))
        assert unpublished > main.index(("sync", str(target.parent)))
        assert main[unpublished + 1] == ("sync", str(old.parent))
        assert all(index > unpublished for index, call in enumerate(main) if call[0] == "remove")


def record_export(run_settings: dict[str, Any], folder: str) -> list[Call]:
    from tests.export_runs import export

    run = runs.build(run_settings)
    export(run, Path(folder))
    return recorded(lambda: export(run, Path(folder)))


def test_an_export_is_durable_before_it_counts(model_folder: ModelFolder, tmp_path: Path) -> None:
    target = tmp_path / "model"
    calls, _ = run_ranks(record_export, 2, settings(model_folder("llama"), "unused.jsonl", tmp_path), str(target))
    part = target.with_name(".model.tmp")
    exchanged = calls.index(("exchange", ""))
    for file in target.iterdir():  # safetensors opens its files outside Python, so what lies there now counts
        assert ("sync", str(part / file.name)) in calls[:exchanged], file.name
    assert calls[exchanged - 1] == ("sync", str(part))
    assert calls[exchanged + 1] == ("sync", str(tmp_path))
    renamed = [name.split()[1] for what, name in calls if what == "rename"]
    assert renamed and all(name.startswith(f"{part}/") for name in renamed), "files are made within it, nothing else"
    assert all(index > exchanged for index, call in enumerate(calls) if call[0] == "remove")
