"""What would make a run fit that does not: each worked out by the closed form, on other settings or other GPUs."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.candidate_estimates import HOST_SYSTEM_BYTES, ClosedForm, Judged, Limits
from fsdp_trainer.memory.candidates import SEARCHED, with_settings
from fsdp_trainer.memory.hardware import GIB, MAX_GPUS_PER_NODE, Hardware, card_names, parse_gpus
from fsdp_trainer.memory.plan import QUALITIES

SHORTEST_ROW, MOST_GPUS = 512, 64
RAM_STEP = 8 * GIB  # what a person can buy or ask for


def find_remedies(config: Config, closed: ClosedForm, *, host_bytes: int | None) -> tuple[str, ...]:
    """Return what makes something fit, one change at a time; nothing where no single change does.

    `closed` is the closed form of the plan in which nothing fits. Each remedy names the best quality that then fits.
    """
    found = (
        *_free(config, closed, host_bytes),
        *_shorter(config, closed, host_bytes),
        *_more_ram(config, closed),
        *_more_gpus(config, closed, host_bytes),
        *_larger_card(config, closed, host_bytes),
    )
    return tuple(found)


def _free(config: Config, closed: ClosedForm, host_bytes: int | None) -> Iterator[str]:
    """Settings that the user fixed, left to the plan: one of them, or all."""
    held = [name for name in SEARCHED if name in closed.fixed]
    found = [
        f"leave {name} to the plan ({fit.sketch.quality})"
        for name in held
        if (fit := _first_fit(config, closed, closed.hardware, host_bytes, fixed=closed.fixed - {name}))
    ]
    if not found and len(held) > 1:
        fit = _first_fit(config, closed, closed.hardware, host_bytes, fixed=closed.fixed - set(held))
        found = [f"leave {', '.join(held)} to the plan ({fit.sketch.quality})"] if fit else []
    yield from found


def _shorter(config: Config, closed: ClosedForm, host_bytes: int | None) -> Iterator[str]:
    seq_len = config.data.seq_len // 2
    while seq_len >= SHORTEST_ROW:
        shorter = with_settings(config, {"data.seq_len": seq_len})
        if fit := _first_fit(shorter, closed, closed.hardware, host_bytes):
            yield f"data.seq_len {seq_len} ({fit.sketch.quality})"
            return
        seq_len //= 2


def _more_ram(config: Config, closed: ClosedForm) -> Iterator[str]:
    """The least host RAM of the best quality that fits the GPUs."""
    if closed.limits.host is None or closed.hardware.is_cpu:
        return
    fit = _first_fit(config, closed, closed.hardware, None, least_host=True)
    if fit is not None:
        needed = -(-(int(fit.host) + HOST_SYSTEM_BYTES) // RAM_STEP) * RAM_STEP
        yield f"host RAM {needed // GIB} GiB a machine ({fit.sketch.quality})"


def _more_gpus(config: Config, closed: ClosedForm, host_bytes: int | None) -> Iterator[str]:
    hardware = closed.hardware
    if hardware.is_cpu:
        return
    count = hardware.count * 2
    while count <= MOST_GPUS:
        in_node = min(count, max(hardware.gpus_per_node, MAX_GPUS_PER_NODE))
        more = replace(hardware, count=count, gpus_per_node=in_node, nodes=count // in_node)
        if count % in_node == 0 and (fit := _first_fit(config, closed, more, host_bytes)):
            yield f"{count} GPUs: {more} ({fit.sketch.quality})"
            return
        count *= 2


def _larger_card(config: Config, closed: ClosedForm, host_bytes: int | None) -> Iterator[str]:
    """The next larger card of the catalogue, as many of them."""
    for larger in sorted(_larger(closed.hardware), key=lambda hardware: hardware.usable_bytes):
        if fit := _first_fit(config, closed, larger, host_bytes):
            yield f"{larger} ({fit.sketch.quality})"
            return


def _larger(hardware: Hardware) -> Iterator[Hardware]:
    for name in card_names():
        try:
            found = parse_gpus(f"{hardware.nodes}x{hardware.gpus_per_node}x{name}")
            float(found.compute_capability)
        except (ConfigError, ValueError):  # memory not published, or of a maker that is not simulated
            continue
        if found.memory_bytes > hardware.memory_bytes and not hardware.is_cpu:
            yield found


def _first_fit(
    config: Config,
    closed: ClosedForm,
    hardware: Hardware,
    host_bytes: int | None,
    *,
    fixed: Collection[str] | None = None,
    least_host: bool = False,
) -> Judged | None:
    """Return the best quality of which something surely fits, with one row at a time and full checkpointing."""
    fixed = closed.fixed if fixed is None else frozenset(fixed)
    lean = {"batch.micro_batch_size": 1}
    if not {"activation_checkpointing.mode", "activation_checkpointing.every_n"} & fixed:
        lean |= {"activation_checkpointing.mode": "full", "activation_checkpointing.every_n": 1}
    if least_host:
        lean["checkpoint.async_save"] = False
    lean = {name: value for name, value in lean.items() if name not in fixed}
    asked = ClosedForm(
        closed.shape,
        hardware,
        Limits.of(hardware, host_bytes),
        fixed=fixed | set(lean),
        memory_factor=closed.memory_factor,
    )
    try:
        sketches = asked.sketch_all(with_settings(config, lean))
    except ConfigError:  # the batch does not divide over so many, or the precision is not theirs
        return None
    for quality in QUALITIES:
        own = [asked.judge(sketch) for sketch in sketches if sketch.quality == quality]
        fitting = [judged for judged in own if judged.fits]
        if fitting:
            return min(fitting, key=lambda judged: judged.host) if least_host else fitting[0]
    return None
