"""Which change frees how much for a run that ran out of memory, by the closed form, and whether it then fits.

Each change is one setting, the rest as it was and the global batch the same. The closed form is raised to what the run
was seen to need. No torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FsdpTrainerError
from fsdp_trainer.memory.estimate_step import find_peak
from fsdp_trainer.memory.hardware import GIB, Hardware
from fsdp_trainer.memory.quick import quick_timeline, simulate_quick

# As the planner has it (memory/candidate_estimates.py): by so much the closed form was too low at most.
MARGIN = 0.07
HOST_SYSTEM_BYTES = 2 * GIB
SHORTEST_ROW = 128
LEAST_SHARE = 0.005  # what frees less is no advice


@dataclass(frozen=True)
class Shortage:
    """What ran out. `limit`: bytes that a GPU had for tensors, or a machine for all its processes. `needed`: bytes that
    were asked of it in all, None where nobody could say."""

    place: Literal["device", "host"]
    limit: int
    needed: int | None = None


@dataclass(frozen=True)
class Advice:
    """One change. frees_gib and peak_gib are of a GPU, or of a machine's RAM. gives_up: what it changes of training."""

    change: str
    settings: Mapping[str, Any]
    frees_gib: float
    peak_gib: float
    fits: bool
    slower_percent: float | None
    gives_up: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values as out_of_memory.json holds them."""
        return dict(vars(self)) | {"settings": dict(self.settings)}


def advise(config: Config, hardware: Hardware, shortage: Shortage) -> list[Advice]:
    """Return the changes that free something, what fits first, then by what they give up and the time they cost.

    Where no single change fits, one that takes several together is added if that does. Raises ConfigError for a model
    or a card that the closed form does not know.
    """
    asked = _Question(config, hardware, shortage)
    found = [row for change in _changes(config, hardware) if (row := asked.judge(*change)) is not None]
    more = replace(hardware, count=2 * hardware.count, nodes=2 * hardware.nodes)
    if not hardware.is_cpu and (row := asked.judge(f"{more.count} GPUs ({more})", {}, hardware=more)) is not None:
        found.append(row)
    if not any(row.fits for row in found) and (several := _together(asked, found)) is not None:
        found.append(several)
    return sorted(found, key=_order)


class _Question:
    def __init__(self, config: Config, hardware: Hardware, shortage: Shortage) -> None:
        self._config, self._hardware, self._shortage = config, hardware, shortage
        before = simulate_quick(config, hardware)
        self._seconds = before["step_seconds"]
        predicted = self._bytes(before, config, hardware)
        needed = shortage.needed or 0
        self._factor = max(1.0, needed / predicted) if predicted else 1.0
        self._before = predicted * self._factor

    def _bytes(self, prediction: Mapping[str, Any], config: Config, hardware: Hardware) -> float:
        if self._shortage.place == "device":
            return sum(find_peak(quick_timeline(config, hardware))[2].values())
        return max(prediction["host_node_gib"].values()) * GIB

    def judge(
        self, change: str, settings: Mapping[str, Any], gives_up: str = "", *, hardware: Hardware | None = None
    ) -> Advice | None:
        """Work out a change; None where it is none, cannot be made, or frees nothing."""
        try:
            made = _with(self._config, settings)
            on = hardware or self._hardware
            made.check_world(on.count)
            found = simulate_quick(made, on)
        except FsdpTrainerError:
            return None
        peak = self._bytes(found, made, on) * self._factor
        if self._before - peak < LEAST_SHARE * self._before:
            return None
        slower = None
        if self._seconds and found["step_seconds"]:
            slower = 100 * (found["step_seconds"] / self._seconds - 1)
        fits = peak * (1 + MARGIN) <= self._shortage.limit
        return Advice(change, settings, (self._before - peak) / GIB, peak / GIB, fits, slower, gives_up)


def _changes(config: Config, hardware: Hardware) -> Iterator[tuple[Any, ...]]:
    """Yield (words, settings, what it gives up), those that cost least first."""

    def one(name: str, value: Any, gives_up: str = "") -> tuple[str, dict[str, Any], str]:
        return f"{name}: {str(value).lower() if isinstance(value, bool) else value}", {name: value}, gives_up

    if config.loss.kind != "chunked":
        yield one("loss.kind", "chunked")
    rows = config.batch.micro_batch_size
    yield from (one("batch.micro_batch_size", fewer) for fewer in dict.fromkeys((rows // 2, 1)) if 0 < fewer < rows)
    yield from (one("sharding.zero_stage", stage) for stage in (2, 3) if stage > config.sharding.zero_stage)
    if config.activation_checkpointing.mode != "full":
        yield one("activation_checkpointing.mode", "full")
    if config.checkpoint.async_save:
        yield one("checkpoint.async_save", False)
    if config.data.workers > 1:
        yield one("data.workers", 1)
    if config.sharding.offload != "none":
        yield one("sharding.offload", "none")
    elif not hardware.is_cpu:  # on CPU it is the same memory
        yield from (one("sharding.offload", where) for where in ("optimizer", "params"))
    if config.optim.state_dtype != "bf16":
        yield one("optim.state_dtype", "bf16", "AdamW's averages are rounded to bf16")
    if "8bit" not in config.optim.name:
        yield one("optim.name", "adamw_8bit", "AdamW's averages are kept in 8 bits")
    if config.precision != "bf16_pure":
        yield one("precision", "bf16_pure", "no fp32 weights")
    if config.data.seq_len // 2 >= SHORTEST_ROW:
        yield one("data.seq_len", config.data.seq_len // 2, "longer documents are cut: other rows train")


def _order(row: Advice) -> tuple[Any, ...]:
    return not row.fits, bool(row.gives_up), row.slower_percent or 0.0, *((-row.frees_gib,) if not row.fits else ())


def _together(asked: _Question, found: list[Advice]) -> Advice | None:
    """Take the changes one after another, those that give nothing up and free most first, until they fit together."""
    taken: list[Advice] = []
    for row in sorted(found, key=lambda row: (bool(row.gives_up), -row.frees_gib)):
        if not row.settings or any(row.settings.keys() & other.settings.keys() for other in taken):
            continue
        tried = _merged(asked, [*taken, row])
        if tried is None:  # the two cannot be together
            continue
        taken.append(row)
        if tried.fits:
            for other in sorted(taken[:-1], key=lambda row: row.frees_gib):  # those that the last made needless
                fewer = [row for row in taken if row is not other]
                if (smaller := _merged(asked, fewer)) is not None and smaller.fits:
                    taken, tried = fewer, smaller
            return tried
    return None


def _merged(asked: _Question, rows: list[Advice]) -> Advice | None:
    settings = {name: value for row in rows for name, value in row.settings.items()}
    words = ", ".join(row.change for row in rows)
    return asked.judge(words, settings, "; ".join(row.gives_up for row in rows if row.gives_up))


def _with(config: Config, settings: Mapping[str, Any]) -> Config:
    found = config.to_dict()
    for name, value in settings.items():
        place = found
        *sections, key = name.split(".")
        for section in sections:
            place = place[section]
        place[key] = value
    return Config.from_dict(found)
