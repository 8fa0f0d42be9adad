"""Out of memory on a rank: the run ends with what is known of it in out_of_memory.json, and not with a traceback."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FsdpTrainerError, OutOfMemory
from fsdp_trainer.launch import LAUNCHER
from fsdp_trainer.memory.postmortem import (
    GIB,
    batch_shape,
    drop_frames,
    find_cause,
    find_limit,
    find_module,
    holders,
    layer_of,
    measure_device,
    read_message,
)
from fsdp_trainer.memory.predicted import find_predicted
from fsdp_trainer.out_of_memory_page import FILE, describe_place, finish_page, forget
from fsdp_trainer.report.out_of_memory_text import format_out_of_memory
from fsdp_trainer.run import Run
from fsdp_trainer.runtime import Runtime
from fsdp_trainer.training_folder import describe_devices


class Last:
    """What the run is at: set as it goes on, and read only when memory has run out."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.step = 0
        self.window: Any = None


@contextmanager
def out_of_memory_is_explained(
    config: Config, runtime: Runtime, *, plan: Mapping[str, Any] | None = None
) -> Iterator[Last]:
    """Turn what says that memory has run out, of this rank or heard from another, into OutOfMemory.

    Which rank fails first writes out_of_memory.json, and a snapshot for torch's memory viewer. `plan` is what plan.json
    says of this run.
    """
    last = Last()
    if runtime.is_main:
        forget(Path(config.output_dir))
    explained: FsdpTrainerError
    try:
        yield last
        return
    except Exception as error:
        found = None if isinstance(error, OutOfMemory) and error.heard else find_cause(error)
        if found is None:
            raise
        cause, place = found
        record = _examine(cause, place, last, config, runtime)
        drop_frames(error)
        error.__cause__ = error.__context__ = None
        del error, cause, found
    # Outside of the handler: inside it the exception, and all that its frames held, would still be there.
    record |= _predict(config, runtime, plan)
    explained = _tell(record, config, runtime)
    raise explained


def _examine(cause: BaseException, place: str, last: Last, config: Config, runtime: Runtime) -> dict[str, Any]:
    """Collect what is known while everything is as it was when memory ran out."""
    text, device, run = str(cause), runtime.device, last.run
    said = measure_device(device, read_message(text)) if place == "device" else read_message(text)
    module = find_module(cause, run.model if run is not None else None)
    state = run.optimizer.state.values() if run is not None else ()
    held = holders(
        parameters=run.model.parameters() if run is not None else (),
        buffers=run.model.buffers() if run is not None else (),
        optimizer_state=[value for values in state for value in values.values() if isinstance(value, torch.Tensor)],
        host_gradients=run.host_gradients.tensors() if run is not None and run.host_gradients is not None else (),
        device=device if place == "device" else torch.device("cpu"),
        allocated=said.get("allocated"),
    )
    limit = find_limit(said) if place == "device" else None
    sizes = {name: said.get(name) for name in ("requested", "free", "total", "allocated", "reserved")}
    return {
        "version": 1,
        "rank": runtime.rank,
        "place": place,
        "phase": runtime.phases.current,
        "rehearsal": runtime.phases.rehearsing,
        "step": last.step,
        "layer": layer_of(module),
        "module": module,
        **{f"{name}_gib": None if size is None else size / GIB for name, size in sizes.items()},
        "limit_gib": None if limit is None else limit / GIB,
        "largest": [{"category": name, "gib": size / GIB} for name, size in held],
        "batch": batch_shape(last.window),
        "snapshot": _keep_snapshot(config, runtime) if place == "device" else None,
        "message": text.splitlines()[0][:500] if text else type(cause).__name__,
        "devices": describe_devices(runtime),
        "settings": config.to_dict(),
    }


def _keep_snapshot(config: Config, runtime: Runtime) -> str | None:
    """Write what the allocator holds, block by block, for pytorch.org/memory_viz; None where there is no allocator."""
    if runtime.device.type != "cuda":
        return None
    name = f"memory_snapshot_rank{runtime.rank}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(Path(config.output_dir) / name))
    except (OSError, RuntimeError):
        return None
    return name


def _predict(config: Config, runtime: Runtime, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        prediction = find_predicted(plan, config, describe_devices(runtime))
    except Exception:  # a model, a card or a setting that the closed form does not know
        prediction = None
    return {"predicted_gib": prediction.allocated_gib if prediction is not None else None}


def _tell(record: dict[str, Any], config: Config, runtime: Runtime) -> OutOfMemory:
    """Leave the record for the launcher, where no other rank did, and return the error that ends this rank.

    Without the launcher of this package nobody comes after the ranks, so this one works out the page itself.
    """
    folder = Path(config.output_dir)
    record |= {"advice": [], "command": ""}
    first = True
    try:
        with (folder / FILE).open("x", encoding="utf-8") as file:
            json.dump(record, file)
    except FileExistsError:
        first = False
    except OSError:  # a full disk: the error says what it can
        pass
    if first and os.environ.get(LAUNCHER) != "1":
        return OutOfMemory(format_out_of_memory(finish_page(folder, command=_command(runtime)) or record))
    where = f"rank {runtime.rank}, {describe_place(record)}"
    return OutOfMemory("Out of memory.", values=where, fix=f"see {folder / FILE}")


def _command(runtime: Runtime) -> list[str]:
    """Return a command that does what this process was started for; nothing for a notebook and several machines."""
    on_one = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size)) == runtime.world_size
    if Path(sys.argv[0]).name != "train.py" or not on_one:
        return []
    return ["fsdp-trainer", "train", "--processes", str(runtime.world_size), *sys.argv[1:]]
