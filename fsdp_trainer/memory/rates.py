"""Rates that are reached on given GPUs: matrix products by shape, attention, memory, links, PCIe and the host.

The figures stand in rates.csv beside this file, each with its source; none comes from a published training run. No
torch.
"""

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.timing import Event, Lane

TILE = 128  # rows and columns of a product that one multiprocessor makes at once
SPLITS = (1, 2, 4, 8)  # parts of the inner dimension that several multiprocessors may share


def causal_pairs(length: float, window: float | None = None) -> float:
    """Return how many keys a query of a row looks at, on average: those before it, `window` at most."""
    if window is None or window >= length:
        return length / 2
    return window * (1 - window / (2 * length))


@dataclass
class Stretch:
    """What operations that run one after the other ask of a GPU; shapes and bytes, no time.

    matrices: products by (rows, columns, inner size, bytes an element). attention: FLOPs of fused kernels by (length
    of a row or document, whether backward, bytes an element). moved: bytes that other operations read and write.
    host: bytes that operations on the host do. operations: how many there are to start.
    """

    matrices: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    attention: Counter[tuple[int, bool, int]] = field(default_factory=Counter)
    moved: float = 0.0
    host: float = 0.0
    operations: float = 0.0

    def add(self, other: "Stretch", *, times: float = 1) -> "Stretch":
        """Add another stretch, `times` over; return this one."""
        for key, count in other.matrices.items():
            self.matrices[key] += count * times  # type: ignore[assignment]
        for key, flops in other.attention.items():
            self.attention[key] += flops * times  # type: ignore[assignment]
        self.moved += times * other.moved
        self.host += times * other.host
        self.operations += times * other.operations
        return self

    @property
    def flops(self) -> float:
        """Floating-point operations of products and attention."""
        products = sum(2 * m * n * k * count for (m, n, k, _), count in self.matrices.items())
        return products + sum(self.attention.values())


@dataclass(frozen=True)
class Rates:
    """What one GPU of `hardware` reaches. FLOP/s, bytes/s, seconds; `values` are those of rates.csv."""

    hardware: Hardware
    values: Mapping[str, float]

    def matrix_seconds(self, rows: int, columns: int, inner: int, *, element_bytes: int, count: float = 1) -> float:
        """Seconds of `count` products [rows, inner] x [inner, columns], the larger of computing and moving.

        Products fill the multiprocessors in waves of tiles; a last wave that is not full takes as long as a full one.
        """
        if not (rows and columns and inner and count):
            return 0.0
        flops = 2.0 * rows * columns * inner
        computing = flops / (self._matrix_rate(element_bytes) * self._filled(rows, columns, inner))
        moved = element_bytes * (rows * columns + rows * inner + columns * inner)
        return count * max(computing, moved / self.memory_rate)

    def _matrix_rate(self, element_bytes: int) -> float:
        peak = self.hardware.bf16_flops or self.hardware.fp16_flops
        if element_bytes >= 4:  # TF32 is off by default
            return peak * self.values["fp32_share"]
        return peak * self.values["matrix_share"] * self.values["typical_share"]

    def _filled(self, rows: int, columns: int, inner: int) -> float:
        """The share of multiprocessors at work: 1 where tiles fill every wave."""
        tiles = -(-rows // TILE) * -(-columns // TILE)
        wasted = rows * columns / (tiles * TILE * TILE)
        processors = self.values["multiprocessors"]
        shares = []
        for split in SPLITS:
            if split == 1 or inner >= split * 1024:
                waves = -(-tiles * split // processors)
                shares.append(tiles * split / (processors * waves))
        return wasted * max(shares)

    def attention_seconds(self, flops: float, *, seq_len: int, backward: bool, element_bytes: int) -> float:
        """Seconds of a fused attention kernel over rows (or documents) of `seq_len`."""
        peak = self.hardware.bf16_flops or self.hardware.fp16_flops
        share = self.values["fp32_share"] if element_bytes >= 4 else self.values["attention_share"]
        rate = peak * share * seq_len / (seq_len + self.values["attention_half_length"])
        return flops / (rate * (self.values["attention_backward_share"] if backward else 1.0))

    @property
    def memory_rate(self) -> float:
        """Bytes/s of operations that only move."""
        return self.hardware.memory_bandwidth * self.values["memory_share"]

    def compute_events(self, stretch: Stretch) -> list[Event]:
        """Return a stretch as the compute stream's time, and the host's; what only waits to be started is compute."""
        matrices = sum(
            self.matrix_seconds(rows, columns, inner, element_bytes=size, count=count)
            for (rows, columns, inner, size), count in stretch.matrices.items()
        )
        matrices += sum(
            self.attention_seconds(flops, seq_len=length, backward=backward, element_bytes=size)
            for (length, backward, size), flops in stretch.attention.items()
        )
        memory = stretch.moved / self.memory_rate
        started = stretch.operations * self.values["launch_seconds"]
        events = [Event("matrices", max(matrices, started - memory)), Event("memory", memory)]
        return [*events, Event("host", self.host_seconds(stretch.host), "host")] if stretch.host else events

    def pcie_seconds(self, size: float) -> float:
        """Seconds of a copy between host and GPU, one direction."""
        return size / (self.hardware.pcie_bandwidth * self.values["pcie_share"])

    def host_seconds(self, size: float) -> float:
        """Seconds in which a process reads and writes `size` bytes of host memory, all of a machine at it."""
        return size * self.hardware.gpus_per_node / self.values["host_bytes_per_second"]

    def data_seconds(self, tokens: float) -> float:
        """Seconds in which a process makes a window of so many tokens."""
        return tokens / self.values["loader_tokens_per_second"]

    def lane(self, ranks: int, *, stride: int = 1) -> Lane:
        """What a group of `ranks`, `stride` apart, sends over."""
        return "links" if ranks * stride <= self.hardware.gpus_per_node else "network"

    def message_seconds(self, sent: float, ranks: int, *, stride: int = 1) -> float:
        """Seconds in which each of a group's ranks sends `sent` bytes around a ring.

        Between machines every adapter takes part: a ring that passes through several GPUs of a machine leaves it by all
        of theirs (NCCL makes a ring for each), and is then no faster than the links inside.
        """
        if ranks <= 1 or not sent:
            return 0.0
        hardware, values = self.hardware, self.values
        inside = max(1, min(ranks, hardware.gpus_per_node // stride))
        share = values["link_share" if hardware.p2p else "link_share_through_host"]
        rate = hardware.link_bandwidth * share if inside > 1 else float("inf")
        if self.lane(ranks, stride=stride) == "network":
            rate = min(rate, inside * hardware.node_bandwidth * values["network_share"])
        latency = values["collective_seconds"] + (ranks - 1) * values["hop_seconds"]
        return sent / rate + latency


def read_rates(hardware: Hardware) -> Rates | None:
    """Return the rates of these GPUs; None where what every prediction needs is not known."""
    needed = [hardware.bf16_flops or hardware.fp16_flops, hardware.memory_bandwidth, hardware.pcie_bandwidth]
    needed += [hardware.link_bandwidth] if hardware.gpus_per_node > 1 else []
    needed += [hardware.node_bandwidth] if hardware.nodes > 1 else []
    if not all(needed):
        return None
    return Rates(hardware, _values(hardware.name, hardware.capability))


@cache
def _values(card: str, capability: float) -> dict[str, float]:
    """The rates of one card: rows that name it, else those of its generation."""
    found: dict[str, float] = {}
    named: dict[str, float] = {}
    with Path(__file__).with_name("rates.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["card"] == card:
                named[row["rate"]] = float(row["value"])
            elif not row["card"] and float(row["from_capability"]) <= capability < float(row["below_capability"]):
                found[row["rate"]] = float(row["value"])
    return found | named
