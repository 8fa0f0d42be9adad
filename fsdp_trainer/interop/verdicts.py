"""What becomes of each key of another tool's file: mapped, mapped with a difference, not needed, or refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_trainer.interop.places import Key

Kind = Literal["mapped", "mapped with a difference", "not needed", "refused"]
KINDS: tuple[Kind, ...] = ("refused", "mapped with a difference", "mapped", "not needed")


@dataclass(frozen=True)
class Verdict:
    """What becomes of one key.

    `settings` are the dotted settings it becomes; those of a refused key are what would stand in for it. `blocks` says
    that nothing can stand in: the file must be corrected.
    """

    key: Key
    kind: Kind
    text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    blocks: bool = False

    def with_note(self, note: str) -> "Verdict":
        """Return the same verdict with one more remark."""
        return replace(self, text=f"{self.text}; {note}" if self.text else note) if note else self


@dataclass(frozen=True)
class Added:
    """A setting that no key of the file asks for, and why it is written all the same."""

    name: str
    value: Any
    why: str


_IN_FP32 = "computes, and masters, sums of gradients and the loss are fp32"
_MASTERS = {
    "bf16": f"bf16 {_IN_FP32}",
    "fp16": f"fp16 {_IN_FP32}",
    "bf16_pure": "weights and their updates are bf16, rounded stochastically: there are no fp32 masters",
    "fp32": "everything is fp32: weights, gradients, sums and averages",
}


@dataclass(frozen=True)
class Import:
    """All that an import found: verdicts in the order of the file, what was added, and the number of processes."""

    source: str
    tool: str
    verdicts: tuple[Verdict, ...]
    added: tuple[Added, ...] = ()
    processes: int | None = None
    notes: tuple[str, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)  # further top-level keys of the profile
    use_cpu: bool = False

    def of_kind(self, kind: Kind) -> list[Verdict]:
        """Return the verdicts of one kind."""
        return [verdict for verdict in self.verdicts if verdict.kind == kind]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the report says beside the keys: the notes, and what the precision keeps in fp32."""
        masters = _MASTERS.get(self.settings().get("precision", ""), "")
        return (*self.notes, *([masters] if masters else []))

    def settings(self) -> dict[str, Any]:
        """Return the settings by dotted name: those added first, then the file's."""
        found = {added.name: added.value for added in self.added}
        for verdict in self.verdicts:
            found |= verdict.settings
        return found
