"""DeepSpeed's batch arithmetic: the three sizes, of which one or two may be left out, and the number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.interop.arguments import Arguments


@dataclass(frozen=True)
class Batch:
    """Rows of a step, rows of a micro-batch, ranks; or what is wrong with them, for the key that says it."""

    global_batch_size: int = 1
    micro_batch_size: int = 1
    world_size: int | None = None
    equation: str = ""
    problem: str = ""


def resolve_batch(values: Mapping[str, Any], *, arguments: Arguments | None, world_size: int | None) -> Batch:
    """Derive what the file leaves out as runtime/config.py does, and check the product.

    Without a world size it is derived where all three sizes are there.
    """
    train = values.get("train_batch_size")
    micro = values.get("train_micro_batch_size_per_gpu")
    steps = values.get("gradient_accumulation_steps")
    if arguments is not None and micro is None and (train is None or steps is None):
        micro = arguments.value("per_device_train_batch_size")
    for name, size in (("train_batch_size", train), ("micro-batch size", micro), ("accumulation", steps)):
        if size is not None and size < 1:
            return Batch(problem=f"{name} {size} is below 1", world_size=world_size)
    if train is None and micro is None:
        return Batch(
            problem="neither train_batch_size nor train_micro_batch_size_per_gpu is given", world_size=world_size
        )
    if train is not None and train % ((micro or 1) * (steps or 1)):
        product = " x ".join(f"{size} {what}" for size, what in ((micro, "micro"), (steps, "accumulation")) if size)
        return Batch(problem=f"{train} is not {product} x ranks for any number of ranks", world_size=world_size)
    if world_size is None:
        if train is None or micro is None or steps is None:
            return Batch(problem="the rows of a step depend on the number of GPUs: give --world-size N")
        return _checked(train, micro, steps, train // (micro * steps))
    return _checked(train, micro, steps, world_size)


def derive_size(source: str, sizes: Mapping[str, Any], world_size: int | None) -> int | None:
    """Return the one size that is "auto" where the other two and the number of GPUs are known and give a whole number.

    `source` is train_batch_size, micro_batch or accumulation, as the table of keys calls them.
    """
    name = {"micro_batch": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"}
    others = {one: size for one, size in sizes.items() if one != name.get(source, source)}
    numbers = [size for size in others.values() if isinstance(size, int) and size > 0]
    if source not in ("train_batch_size", *name) or world_size is None or len(numbers) != 2:
        return None
    if source == "train_batch_size":
        return numbers[0] * numbers[1] * world_size
    train = others["train_batch_size"]
    other = next(size for one, size in others.items() if one != "train_batch_size")
    return train // (other * world_size) if train % (other * world_size) == 0 else None


def _checked(train: int | None, micro: int | None, steps: int | None, world: int) -> Batch:
    given = [f"{size} {what}" for size, what in ((micro, "micro"), (steps, "accumulation")) if size]
    product = (micro or 1) * (steps or 1) * world
    if train is not None and (train % product or (len(given) == 2 and train != product)):
        shown = " x ".join([*(given or ["1 or more rows"]), f"{world} ranks"])
        which = f", which is {product}" if len(given) == 2 else "" if not given else " x a whole number"
        return Batch(problem=f"{train} is not {shown}{which}", world_size=world)
    train = product if train is None else train
    if micro is None:
        micro = train // product  # DeepSpeed's: one micro-batch is as large as it can be
    steps = steps or train // (micro * world)
    return Batch(train, micro, world, f"{train} = {micro} micro x {steps} accumulation x {world} ranks")
