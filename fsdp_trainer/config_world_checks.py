"""Checks of the settings that need the number of ranks: groups, accumulation, whole copies."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdp_trainer.config_checks import show_settings
from fsdp_trainer.config_reading import Problem
from fsdp_trainer.units import format_number

if TYPE_CHECKING:
    from fsdp_trainer.config import Config


def check_world_problems(config: "Config", world_size: int) -> list[Problem]:
    """Return what is wrong with the settings on this number of ranks."""
    checks = (_groups, _accumulation, _whole_copies, _paged)
    return [problem for check in checks for problem in check(config, world_size)]


def _groups(config: "Config", world_size: int) -> Iterator[Problem]:
    replicate, group = config.sharding.replicate, config.sharding.reshard_after_forward
    if replicate > 1 and (world_size % replicate or world_size == replicate):
        reason = "does not divide the number of ranks" if world_size % replicate else "leaves nothing to shard"
        copies = [n for n in range(2, world_size) if world_size % n == 0]
        is_whole = world_size == replicate and config.sharding.offload == "none"  # stage 0 cannot be offloaded
        fix = f"set sharding.replicate to one of {copies}" if copies else "leave out sharding.replicate"
        yield Problem(
            f"sharding.replicate {reason}",
            f"{format_number(world_size, 'rank')} / {replicate} copies = {world_size / replicate:g} ranks a copy",
            fix + (", or sharding.zero_stage: 0 for whole copies" if is_whole else ""),
            ("sharding.replicate",),
        )
        return
    shard = world_size // replicate
    if group is not None and (shard % group or group >= shard):
        groups = [n for n in range(2, shard) if shard % n == 0]
        fix = f"set it to one of {groups}, or leave it out" if groups else "leave it out"
        yield Problem(
            "sharding.reshard_after_forward must be a divisor of the ranks that shard a copy, and smaller",
            f"{shard} of {format_number(world_size, 'rank')} hold a copy, groups of {group}",
            fix,
            ("sharding.reshard_after_forward", "sharding.replicate"),
        )


def _accumulation(config: "Config", world_size: int) -> Iterator[Problem]:
    size, micro = config.batch.global_batch_size, config.batch.micro_batch_size
    rows = micro * world_size
    if size % rows:
        lower, upper = size // rows * rows, -(-size // rows) * rows
        near = f"{lower} or {upper}" if lower else f"{upper}"
        yield Problem(
            "batch.global_batch_size is not micro_batch_size x accumulation x ranks for any whole accumulation",
            f"{size} = {micro} x accumulation x {world_size} gives accumulation = {size / rows:g}",
            f"set batch.global_batch_size: {near}, or change batch.micro_batch_size or the number of processes",
            ("batch.global_batch_size", "batch.micro_batch_size"),
        )


def _whole_copies(config: "Config", world_size: int) -> Iterator[Problem]:
    if config.sharding.offload == "optimizer" and config.sharding.zero_stage == 0 and world_size > 1:
        yield Problem(
            "offloading the optimizer at stage 0 would keep a whole copy of it in host memory for every rank",
            f"{show_settings(config, 'sharding.offload', 'sharding.zero_stage')}, {format_number(world_size, 'rank')}",
            "set sharding.zero_stage: 3 (or 1 or 2), or sharding.offload: none",
            ("sharding.offload", "sharding.zero_stage"),
        )


def _paged(config: "Config", world_size: int) -> Iterator[Problem]:
    if config.optim.name == "paged_adamw_8bit" and config.sharding.zero_stage > 0 and world_size > 1:
        yield Problem(
            "paged moments are for a process that owns whole parameters, and here several own shards of each",
            f"{show_settings(config, 'optim.name', 'sharding.zero_stage')}, {format_number(world_size, 'rank')}",
            "set optim.name: adamw_8bit, of which each rank holds its share, or sharding.zero_stage: 0",
            ("optim.name", "sharding.zero_stage"),
        )
