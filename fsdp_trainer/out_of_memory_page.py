"""The page about a run that ran out of memory: what would free how much, worked out when the ranks are gone. No torch.

A rank leaves out_of_memory.json; the advice and the command that goes on are added here, and the page is written.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FsdpTrainerError, OutOfMemory, OutputError
from fsdp_trainer.memory.advice import Advice, Shortage, advise
from fsdp_trainer.memory.hardware import CPU, Hardware, card_name, parse_gpus
from fsdp_trainer.memory.machine import machine_bytes
from fsdp_trainer.resume_rules import RULES
from fsdp_trainer.run_folder import DEVICES, STATUS, parse_json, write_json, write_status, write_text_atomically

FILE, PAGE = "out_of_memory.json", "out_of_memory.html"
GIB = 2**30


def forget(folder: Path) -> None:
    """Remove what an earlier attempt left: the page is of the last one. Checkpoints and snapshots stay."""
    for name in (FILE, PAGE):
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return what out_of_memory.json holds, None where there is none."""
    found = _read_object(folder / FILE)
    return found if found is not None and found.get("version") == 1 else None


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def leave_host_kill(config: Config, *, processes: int, machines: int = 1) -> int:
    """Record that the kernel killed a process of this run for want of RAM; return OutOfMemory's exit code.

    Which one had what is not known: it had no time to say.
    """
    folder = Path(config.output_dir)
    step = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        step = int(parse_json((folder / STATUS).read_text(encoding="utf-8"))["step"])
    sizes = dict.fromkeys(("requested", "free", "allocated", "reserved", "limit", "predicted"))
    devices = _read_object(folder / DEVICES) or {"device": CPU, "memory_bytes": None}
    record = {
        "version": 1,
        "rank": None,
        "place": "host",
        "phase": None,
        "step": step,
        "layer": None,
        "module": None,
        **{f"{name}_gib": size for name, size in sizes.items()},
        "total_gib": machine_bytes() / GIB,
        "largest": [],
        "batch": None,
        "snapshot": None,
        "message": "the kernel killed a process of the run",
        "devices": {**devices, "ranks": processes, "ranks_per_node": max(1, processes // machines)},
        "settings": config.to_dict(),
    }
    message = (
        f"Out of host memory.\n  found: the kernel killed a process of the run after step {step}\n  to fix: see {FILE}"
    )
    with suppress(OutputError):
        write_json(folder, FILE, record)
        write_status(folder, state="failed", exit_code=OutOfMemory.exit_code, step=step, message=message)
    return OutOfMemory.exit_code


def describe_place(record: Mapping[str, Any]) -> str:
    """Say where it was, what was asked and what was free, in one line."""
    where = f"{record['phase']} of step {record['step']}" if record["step"] else f"{record['phase']}"
    if record["module"]:
        where += f" in {record['module']}"
    asked = f", asked for {_size(record['requested_gib'])}" if record["requested_gib"] is not None else ""
    free = f", {_size(record['free_gib'])} free" if record["free_gib"] is not None else ""
    total = f" of {_size(record['total_gib'])}" if record["total_gib"] is not None else ""
    return f"{where}{asked}{free}{total}"


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"


def finish_page(folder: Path, *, command: Sequence[str] = ()) -> dict[str, Any] | None:
    """Add the advice and the command that goes on to out_of_memory.json, write the page, and return the whole.

    `command` is what started the run; empty where no command did. None where no rank left a record.
    """
    record = read_record(folder)
    if record is None:
        return None
    advice: list[Advice] = []
    try:
        config, hardware = Config.from_dict(record["settings"]), _hardware(record["devices"])
        advice = advise(config, hardware, _shortage(record, hardware))
    except FsdpTrainerError as error:  # a model or a card that the closed form does not know
        record["no_advice"] = str(error).splitlines()[0]
    record["advice"] = [row.to_json() for row in advice]
    chosen = next((row for row in advice if row.fits and row.settings), None)
    record["refused"] = _refused(folder, chosen)
    record["command"] = _go_on(command, chosen, folder, record["refused"])
    with suppress(OutputError, OSError):
        write_json(folder, FILE, record)
        write_text_atomically(folder / PAGE, _format_html(record))
    return record


def _hardware(devices: Mapping[str, Any]) -> Hardware:
    """Describe what the run was on; the memory is the shortage's matter."""
    card = CPU if devices["device"] == CPU else card_name(devices["device"], memory_bytes=devices["memory_bytes"])
    per_node = devices["ranks_per_node"]
    if card == CPU:
        return parse_gpus(f"{devices['ranks'] // per_node}x{per_node}x{card}")
    # Not by the text for several machines of few GPUs: that has its own rule of eight.
    one = parse_gpus(f"1x{card}")
    return replace(one, count=devices["ranks"], gpus_per_node=per_node, nodes=devices["ranks"] // per_node)


def _shortage(record: Mapping[str, Any], hardware: Hardware) -> Shortage:
    limit, allocated, asked = (record[f"{name}_gib"] for name in ("limit", "allocated", "requested"))
    if record["place"] == "host":  # what was asked for did not fit in what was left: so much more than all is needed
        machine = machine_bytes()
        return Shortage("host", machine, None if asked is None else machine + round(asked * GIB))
    if limit is None:
        return Shortage("device", hardware.usable_bytes - hardware.outside_bytes)
    needed = (allocated + (asked or 0)) * GIB if allocated is not None else limit * GIB
    return Shortage("device", round(limit * GIB), round(needed))


def _refused(folder: Path, chosen: Advice | None) -> list[str]:
    """Return the settings of the advice with which the checkpoints that are there cannot be gone on from."""
    if chosen is None or not any((folder / "checkpoints").glob("step-*")):
        return []
    return [name for name in chosen.settings if RULES[name].verdict == "refused"]


def _go_on(command: Sequence[str], chosen: Advice | None, folder: Path, refused: Sequence[str]) -> str:
    if chosen is None or not command:
        return ""
    words = [*command, *(f"--{name}={str(value).lower()}" for name, value in chosen.settings.items())]
    if refused:
        words.append(f"--output_dir={folder}-that-fits")
    return shlex.join(words)


def _format_html(record: Mapping[str, Any]) -> str:
    from fsdp_trainer.report.out_of_memory_html import out_of_memory_section  # here: jinja2 is slow to import
    from fsdp_trainer.report.page import format_page

    return format_page("Out of memory", out_of_memory_section(record))
