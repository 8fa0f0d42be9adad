"""What the GPUs of a run are: memory, rates and links, by name, from a file of one's own, or as found in this machine.

The numbers stand in hardware.csv beside this file, each with its source; what is not known is left empty and refused
where it would be needed. Units there: GiB (2**30), dense TFLOP/s, GB/s (1e9) in one direction.
"""

import csv
import difflib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.machine import machine_bytes, may_have_gpus

GIB = 2**30
CPU = "CPU"
# What a run starts on a machine without a GPU when nothing says how many processes (launch.py).
CPU_RANKS = 1
# Above this, one machine is not what anybody means: 64xH100 is eight machines of eight.
MAX_GPUS_PER_NODE = 8
# One adapter of 100 Gbit/s for the whole machine, where hardware.csv names no usual build: an assumption.
NODE_ADAPTER_BYTES = 12.5e9
# PCIe 4.0 with 16 lanes, for a card that the catalogue does not know: an assumption.
PCIE_BYTES = 32e9


@dataclass(frozen=True)
class Hardware:
    """The GPUs of a run, or its CPU ranks. Bytes, FLOP/s (dense) and bytes/s; links count one direction of one GPU.

    CPU ranks (`is_cpu`) share the RAM of one machine with all else their processes hold: `usable_bytes` is that RAM
    divided by the ranks, and no rate of theirs is known (0).
    `usable_bytes` is what torch reports as the total of a GPU: its context and NCCL's buffers come out of it.
    `bf16_flops` is 0 where bf16 is only emulated. `link_bandwidth` is the slowest link on a ring through the GPUs of
    one node (PCIe, where bridges join only pairs), `node_bandwidth` one GPU's share of the network, `pcie_bandwidth`
    what joins a GPU and its host.
    """

    name: str
    count: int
    gpus_per_node: int
    nodes: int
    memory_bytes: int
    usable_bytes: int
    bf16_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    node_bandwidth: float
    p2p: bool
    source: str
    fp16_flops: float = 0.0
    compute_capability: str = ""
    pcie_bandwidth: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """True for ranks on CPU, whose tensors lie in the machine's RAM."""
        return self.name == CPU

    @property
    def capability(self) -> float:
        """The CUDA compute capability as a number; 8.0 for other makers, CPUs and where a file does not say."""
        try:
            return float(self.compute_capability)
        except ValueError:
            return 8.0

    @property
    def outside_bytes(self) -> int:
        """What of `usable_bytes` torch's allocator cannot have: the context, and NCCL's buffers with several GPUs."""
        if self.is_cpu:
            return 0
        found = read_overheads(self.capability)
        return found["context"] + (found["distributed"] if self.count > 1 else 0)

    def __str__(self) -> str:
        shape = f"{self.gpus_per_node}x{self.name}"
        return shape if self.nodes == 1 else f"{self.nodes}x{shape}"


@dataclass(frozen=True)
class _Card:
    """One row of hardware.csv; None where the file has no number."""

    name: str
    aliases: tuple[str, ...]
    memory_gib: float
    usable_gib: float | None
    bf16_tflops: float | None
    fp16_tflops: float
    memory_gbs: float
    link_gbs: float | None
    link: str
    pcie_gbs: float
    node_gbs: float | None
    p2p: str
    compute_capability: str
    source: str


def parse_gpus(text: str | Path) -> Hardware:
    """Read `8xA100-80GB`, `2x8xH100` (nodes x GPUs), `4090`, `2xCPU`, or the path of a YAML file that describes GPUs.

    Raises ConfigError with the nearest names where a name is unknown or fits cards of different memory.
    """
    words = str(text).strip()
    if isinstance(text, Path) or words.lower().endswith((".yaml", ".yml")):
        return _from_file(Path(words))
    nodes, gpus, name = _split_count(words)
    if _is_cpu(name):
        _check_count(nodes, gpus, written=words)
        return _cpu_ranks(nodes=nodes or 1, ranks_per_node=gpus)
    card = _find_card(name, written=words)
    nodes, gpus = _shape(nodes, gpus, written=words)
    return _build(card, nodes=nodes, gpus_per_node=gpus)


def card_names() -> tuple[str, ...]:
    """Return the names of all cards in the catalogue, as `parse_gpus` takes them."""
    return tuple(card.name for card in _catalogue())


def card_name(device: str, *, memory_bytes: int | None = None) -> str:
    """Return the catalogue's name of a device as torch names it, or CPU; ConfigError where it is not in there."""
    if _is_cpu(device):
        return CPU
    return _find_card(device, written=device, gib=memory_bytes / GIB if memory_bytes else None).name


def detect() -> Hardware:
    """Describe the CUDA or ROCm GPUs of this machine, or its CPU where it has none.

    Memory and peer access of GPUs are as measured, rates from the catalogue; where the cards differ, the smallest
    counts. Raises ConfigError where none of the catalogue is like them. Another process asks torch: this one gets no
    context on any GPU, which would take memory from a run and could not be hidden from a simulation afterwards.
    """
    found = _ask_torch() if may_have_gpus() else []
    if not found:
        return _cpu_ranks(nodes=1, ranks_per_node=CPU_RANKS)
    name, total, peers = min(found, key=lambda device: device[1])
    card = _find_card(name, written=name, gib=total / GIB)
    return replace(
        _build(card, nodes=1, gpus_per_node=len(found)),
        usable_bytes=total,
        p2p=peers,
        source=f"this machine ({name}); rates: {card.source}",
    )


_QUESTION = """
import json, torch
count = torch.cuda.device_count()
found = [torch.cuda.get_device_properties(index) for index in range(count)]
peers = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
print(json.dumps([(device.name, device.total_memory, peers) for device in found]))
"""


def _ask_torch() -> list[tuple[str, int, bool]]:
    """Return name, bytes and access to all peers of each GPU that torch sees."""
    asked = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise ConfigError(
            "The GPUs of this machine cannot be described.",
            values=asked.stderr.strip()[-500:] or f"torch ended with exit code {asked.returncode}",
            fix="name them, such as --gpus 8xH100-80GB, or --gpus CPU",
        )
    return [(name, total, peers) for name, total, peers in json.loads(asked.stdout.splitlines()[-1])]


def _cpu_ranks(*, nodes: int, ranks_per_node: int) -> Hardware:
    share = machine_bytes() // ranks_per_node
    return Hardware(
        name=CPU,
        count=nodes * ranks_per_node,
        gpus_per_node=ranks_per_node,
        nodes=nodes,
        memory_bytes=share,
        usable_bytes=share,
        bf16_flops=0.0,
        memory_bandwidth=0.0,
        link_bandwidth=0.0,
        node_bandwidth=0.0,
        p2p=False,
        source="the RAM of this machine, as far as this process may use it",
    )


# --- names -----------------------------------------------------------------------------------------------------------

_COUNT = r"(\d{1,5})\s*[x×*]\s*"


def _split_count(words: str) -> tuple[int | None, int, str]:
    """Take `2x8xH100` apart into nodes (None: not said), GPUs a node (or all of them) and the card's name."""
    both = re.fullmatch(_COUNT + _COUNT + r"(\D.*|\d{4}.*)", words, re.IGNORECASE)
    if both:
        return int(both[1]), int(both[2]), both[3]
    before = re.fullmatch(_COUNT + r"(.*\S)", words, re.IGNORECASE)
    # `4090x2`: what stands before the x is a card, not a count.
    after = re.fullmatch(r"(.*\S)\s*[x×*]\s*(\d{1,4})", words, re.IGNORECASE)
    if after and (_is_cpu(after[1]) or _matches(after[1])):
        return None, int(after[2]), after[1]
    if before:
        return None, int(before[1]), before[2]
    return None, 1, words


def _is_cpu(name: str) -> bool:
    return name.strip().lower() == CPU.lower()


def _check_count(nodes: int | None, gpus: int, *, written: str) -> None:
    if gpus < 1 or nodes == 0:
        raise ConfigError("There must be at least one GPU.", values=f"--gpus {written}", fix="such as 2xRTX4090")


def _shape(nodes: int | None, gpus: int, *, written: str) -> tuple[int, int]:
    """Return (nodes, GPUs a node); more than eight of one kind are machines of eight."""
    _check_count(nodes, gpus, written=written)
    if nodes is not None or gpus <= MAX_GPUS_PER_NODE:
        return nodes or 1, gpus
    if gpus % MAX_GPUS_PER_NODE:
        raise ConfigError(
            "So many GPUs stand in several machines, and how many in each cannot be told from the number.",
            values=f"--gpus {written}",
            fix="write NODESxGPUSxNAME, such as 3x4xA100-80GB",
        )
    return gpus // MAX_GPUS_PER_NODE, MAX_GPUS_PER_NODE


def _words(name: str) -> list[str]:
    """Split a name into what tells cards apart: `NVIDIA A100-SXM4-80GB`, `a100 sxm4 80g` -> a100, sxm4, 80."""
    text = re.sub(r"\b(nvidia|geforce|tesla|quadro|amd|radeon|instinct)\b", "", name.lower().replace("_", " "))
    # A lone g is a unit only in a word of its own: A10G is a card.
    text = re.sub(r"(?<=\d)\s*gi?b\b", "", re.sub(r"(?<![a-z0-9])(\d+)\s*g\b", r"\1", text))
    return re.findall(r"[a-z0-9]+", text)


def _plain(name: str) -> str:
    return "".join(_words(name))


def _matches(name: str) -> list[_Card]:
    """The cards a name can mean: exactly one by name or alias, else all that begin with it."""
    words, wanted = _words(name), _plain(name)
    if not wanted:
        return []
    for card in _catalogue():
        memory = f"{card.memory_gib:.0f}"
        # With its memory said although the card's name does without: `4090 24GB`.
        shorter = "".join(word for word in words if word != memory) if memory in words[1:] else wanted
        for own in (card.name, *card.aliases):
            if _plain(own) in (wanted, shorter) or set(words) == set(_words(own)):
                return [card]
    # A name without its memory, such as A100: more digits or letters of another card (L40 and L40S) do not count.
    longer = re.compile(re.escape(wanted) + r"(pcie|sxm\d?|nvl)?\d*")
    return [card for card in _catalogue() if longer.fullmatch(_plain(card.name)) and not wanted.isdigit()]


def _find_card(name: str, *, written: str, gib: float | None = None) -> _Card:
    """Return the one card a name means; `gib` (measured) decides between sizes of one card."""
    cards = _matches(name)
    if gib is not None and len(cards) > 1:
        cards = sorted(cards, key=lambda card: abs(card.memory_gib - gib))[:1]
    if len(cards) == 1:
        return cards[0]
    if cards:
        raise ConfigError(
            "This name fits several GPUs.",
            values=f"{written}: {', '.join(card.name for card in cards)}",
            fix=f"name the one you mean, such as {cards[0].name}",
        )
    raise ConfigError(
        "This GPU is not in the catalogue.",
        values=f"{written}; nearest: {', '.join(_nearest(name))}",
        fix="use one of these names, or a YAML file that describes it (docs/memory.md)",
    )


def _nearest(name: str) -> list[str]:
    by_plain = {_plain(word): card.name for card in _catalogue() for word in (card.name, *card.aliases)}
    close = difflib.get_close_matches(_plain(name), list(by_plain), n=6, cutoff=0.4)
    names = list(dict.fromkeys(by_plain[word] for word in close))[:3]
    return names or ["RTX4090", "A100-80GB", "H100-80GB"]


# --- the catalogue ---------------------------------------------------------------------------------------------------


@cache
def _catalogue() -> tuple[_Card, ...]:
    with Path(__file__).with_name("hardware.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_read_card(row) for row in csv.DictReader(file))


def read_overheads(capability: float) -> dict[str, int]:
    """Return bytes by name of overheads.csv for a GPU of this compute capability; the sources stand there."""
    with Path(__file__).with_name("overheads.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["name"]: round(float(row["mib"]) * 2**20)
            for row in csv.DictReader(file)
            if float(row["from_capability"]) <= capability < float(row["below_capability"])
        }


def _read_card(row: Mapping[str, str]) -> _Card:
    def number(key: str) -> float | None:
        return float(row[key]) if row[key] else None

    return _Card(
        name=row["name"],
        aliases=tuple(row["aliases"].split("|")) if row["aliases"] else (),
        memory_gib=float(row["memory_gib"]),
        usable_gib=number("usable_gib"),
        bf16_tflops=number("bf16_tflops"),
        fp16_tflops=float(row["fp16_tflops"]),
        memory_gbs=float(row["memory_gbs"]),
        link_gbs=number("link_gbs"),
        link=row["link"],
        pcie_gbs=float(row["pcie_gbs"]),
        node_gbs=number("node_gbs"),
        p2p=row["p2p"],
        compute_capability=row["compute_capability"],
        source=row["source"],
    )


def _build(card: _Card, *, nodes: int, gpus_per_node: int) -> Hardware:
    if card.usable_gib is None:
        raise ConfigError(
            f"How much of a {card.name}'s memory torch can use is not known here.",
            values=f"{card.name}: {card.memory_gib:.0f} GiB sold, usable part not published",
            fix=f"write a YAML file with `like: {card.name}` and usable_gib as torch reports it (docs/memory.md)",
        )
    return _assemble(card, usable_gib=card.usable_gib, nodes=nodes, gpus_per_node=gpus_per_node)


def _assemble(card: _Card, *, usable_gib: float, nodes: int, gpus_per_node: int) -> Hardware:
    bridged = card.link == "bridge" and gpus_per_node <= 2
    linked = card.link_gbs is not None and (card.link == "all" or bridged)
    return Hardware(
        name=card.name,
        count=nodes * gpus_per_node,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        memory_bytes=int(card.memory_gib * GIB),
        usable_bytes=int(usable_gib * GIB),
        bf16_flops=(card.bf16_tflops or 0.0) * 1e12,
        memory_bandwidth=card.memory_gbs * 1e9,
        link_bandwidth=(card.link_gbs if linked and card.link_gbs else card.pcie_gbs) * 1e9,
        node_bandwidth=card.node_gbs * 1e9 if card.node_gbs else NODE_ADAPTER_BYTES / gpus_per_node,
        p2p=card.p2p == "yes" or (card.p2p == "bridge" and bridged),
        source=card.source,
        fp16_flops=card.fp16_tflops * 1e12,
        compute_capability=card.compute_capability,
        pcie_bandwidth=card.pcie_gbs * 1e9,
    )


# --- a file of one's own ---------------------------------------------------------------------------------------------

# Key of the file -> (field of Hardware, factor to its unit).
_FILE_NUMBERS = {
    "memory_gib": ("memory_bytes", GIB),
    "usable_gib": ("usable_bytes", GIB),
    "bf16_tflops": ("bf16_flops", 1e12),
    "fp16_tflops": ("fp16_flops", 1e12),
    "memory_gbs": ("memory_bandwidth", 1e9),
    "link_gbs": ("link_bandwidth", 1e9),
    "node_gbs": ("node_bandwidth", 1e9),
    "pcie_gbs": ("pcie_bandwidth", 1e9),
}
_FILE_KEYS = {*_FILE_NUMBERS, "like", "name", "gpus_per_node", "nodes", "p2p", "compute_capability"}
# Of any unit above: no GPU comes near, and sums of it stay numbers.
MOST_OF_A_UNIT = 1e6
_NEEDED_ALONE = ("name", "usable_gib", "bf16_tflops", "memory_gbs", "link_gbs")


def _from_file(path: Path) -> Hardware:
    """Build Hardware from a YAML mapping: a card of the catalogue (`like`) with changes, or all of it."""
    data = _read_yaml(path)
    unknown = sorted(set(map(str, data)) - _FILE_KEYS)
    if unknown:
        raise _file_error(path, f"unknown keys {', '.join(unknown)}", f"use {', '.join(sorted(_FILE_KEYS))}")
    _check_words(data, path)
    numbers = {key: _file_number(data, key, path) for key in _FILE_NUMBERS if key in data}
    nodes, gpus = (_file_count(data, key, path) for key in ("nodes", "gpus_per_node"))
    if "like" in data:
        card = _find_card(str(data["like"]), written=str(data["like"]))
        usable = numbers.get("usable_gib", card.usable_gib)
        hardware = (
            _build(card, nodes=nodes, gpus_per_node=gpus)
            if usable is None
            else _assemble(card, usable_gib=usable, nodes=nodes, gpus_per_node=gpus)
        )
    else:
        missing = [key for key in _NEEDED_ALONE if key not in data]
        if missing:
            raise _file_error(path, f"{', '.join(missing)} missing", "add them, or `like:` a card of the catalogue")
        hardware = _bare(numbers, name=str(data["name"]), nodes=nodes, gpus_per_node=gpus)
    changes: dict[str, Any] = {
        field: numbers[key] * unit for key, (field, unit) in _FILE_NUMBERS.items() if key in numbers
    }
    changes |= {field: int(changes[field]) for field in ("memory_bytes", "usable_bytes") if field in changes}
    changes |= {key: str(data[key]) for key in ("name", "compute_capability") if key in data}
    if "p2p" in data:
        if not isinstance(data["p2p"], bool):
            raise _file_error(path, f"p2p: {data['p2p']}", "true or false")
        changes["p2p"] = data["p2p"]
    hardware = replace(hardware, source=f"{path.name}; {hardware.source}".rstrip("; "), **changes)
    if hardware.usable_bytes > hardware.memory_bytes:
        raise _file_error(path, "usable_gib is more than memory_gib", "give usable_gib as torch reports it")
    return hardware


def _bare(numbers: Mapping[str, float], *, name: str, nodes: int, gpus_per_node: int) -> Hardware:
    """A card the catalogue does not know; unnamed numbers take the careful value."""
    usable = int(numbers["usable_gib"] * GIB)
    return Hardware(
        name=name,
        count=nodes * gpus_per_node,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        memory_bytes=usable,
        usable_bytes=usable,
        bf16_flops=numbers["bf16_tflops"] * 1e12,
        memory_bandwidth=numbers["memory_gbs"] * 1e9,
        link_bandwidth=numbers["link_gbs"] * 1e9,
        node_bandwidth=NODE_ADAPTER_BYTES / gpus_per_node,
        p2p=False,
        source="",
        fp16_flops=numbers["bf16_tflops"] * 1e12,
        pcie_bandwidth=PCIE_BYTES,
    )


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    from ruamel.yaml import YAML  # names need no YAML reader, and the command answers sooner without it
    from ruamel.yaml.error import YAMLError

    try:
        data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, YAMLError) as error:
        raise _file_error(path, str(error).splitlines()[0], "give a readable YAML file") from error
    if not isinstance(data, Mapping):
        raise _file_error(path, "not a mapping", "write `key: value` lines, such as `like: H100-80GB`")
    return data


def _check_words(data: Mapping[Any, Any], path: Path) -> None:
    """The name stands in messages, and in the first line of a settings file; the capability chooses overheads."""
    if "name" in data and (not str(data["name"]).strip() or not str(data["name"]).isprintable()):
        raise _file_error(path, f"name: {str(data['name'])!r}", "one line of letters and digits, such as H100-80GB")
    if "name" in data and _is_cpu(str(data["name"])):
        raise _file_error(path, f"name: {data['name']}", "another name: ranks on CPU are written --gpus 2xCPU")
    capability = str(data.get("compute_capability", ""))
    if re.fullmatch(r"\d+(\.\d+)?", capability) and "context" not in read_overheads(float(capability)):
        raise _file_error(path, f"compute_capability: {capability}", "as NVIDIA gives it, such as 8.9")


def _file_number(data: Mapping[Any, Any], key: str, path: Path) -> float:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_OF_A_UNIT:
        raise _file_error(path, f"{key}: {value}", f"a number from 0 to {MOST_OF_A_UNIT:,.0f}")
    return float(value)


def _file_count(data: Mapping[Any, Any], key: str, path: Path) -> int:
    value = data.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _file_error(path, f"{key}: {value}", "a whole number, 1 or more")
    return value


def _file_error(path: Path, values: str, fix: str) -> ConfigError:
    return ConfigError("The description of the GPUs cannot be used.", values=f"{path}: {values}", fix=fix)
