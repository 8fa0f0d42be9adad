"""The peaks of a deep model from the same model with few layers: for searching, where a full simulation is too slow.

In each phase the peak grows by the same bytes with every layer, once the first and last layers' edges are apart. It is
the largest of several such lines, so a phase may bend at more layers than were tried: what a plan rests on in the end
is simulated in full.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.simulation import capability_of, check_known
from fsdp_trainer.memory.traced_run import trace_run
from fsdp_trainer.model import load_hf_config

# From 2 and 4 layers the backward came out 13 to 27 % too high; from 4 on lines are straight.
LAYERS = (4, 6, 8)


@dataclass(frozen=True)
class Extrapolation:
    """Peak bytes of each phase at `layers` layers. `linear` is False where the layers tried lie on no line: the numbers
    are then those of the last two, and a full simulation must decide."""

    phases: Mapping[str, int]
    layers: int
    linear: bool

    @property
    def allocated(self) -> int:
        """The peak over all phases."""
        return max(self.phases.values())


def extrapolate(config: Config, hardware: Hardware) -> Extrapolation:
    """Return the peaks of `config` on `hardware` from runs with 4, 6 and 8 layers; a shallower model is run as it is.

    Raises ConfigError as `simulate` does, and for a model whose config does not say its layers in the usual way.
    """
    check_known(config)
    section = config.model
    hf_config = load_hf_config(section.path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    text = hf_config.get_text_config()
    layers = text.num_hidden_layers
    if layers <= LAYERS[-1]:
        return Extrapolation(_peaks(config, hardware), layers, linear=True)
    if text is not hf_config or section.trust_remote_code:
        raise ConfigError(
            "This model cannot be made shallower by its config.",
            values=f"model_type {hf_config.model_type}",
            fix="simulate it in full",
        )
    peaks = [find_peaks(config, hardware, layers=count) for count in LAYERS]
    return fit(dict(zip(LAYERS, peaks, strict=True)), layers=layers)


def fit(peaks: Mapping[int, Mapping[str, int]], *, layers: int) -> Extrapolation:
    """Draw a line through each phase's peaks (layers -> phase -> bytes) and read it at `layers`."""
    (first, low), (middle, half), (last, high) = sorted(peaks.items())
    found, linear = {}, True
    for phase, top in high.items():
        slope, rest = divmod(top - half[phase], last - middle)
        found[phase] = top + slope * (layers - last)
        linear = linear and rest == 0 and half[phase] - low[phase] == slope * (middle - first)
    return Extrapolation(found, layers, linear)


def _peaks(config: Config, hardware: Hardware) -> Mapping[str, int]:
    return trace_run(config, world_size=hardware.count, compute_capability=capability_of(hardware)).device.phases


def find_peaks(config: Config, hardware: Hardware, *, layers: int) -> Mapping[str, int]:
    """Return the peak bytes of each phase of a run whose model has so many layers."""
    section = config.model
    hf_config = load_hf_config(section.path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    with tempfile.TemporaryDirectory() as folder:
        shallow = type(hf_config).from_dict(_shallower(hf_config.to_dict(), layers))
        shallow.save_pretrained(folder)
        model = config.model.model_copy(update={"path": str(Path(folder)), "revision": None})
        return _peaks(config.model_copy(update={"model": model}), hardware)


def _shallower(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """Cut the number of layers, and every list that has an entry for each."""
    names = [name for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if name in values]
    before = values[names[0]]
    cut = {name: value[:layers] for name, value in values.items() if isinstance(value, list) and len(value) == before}
    return {**values, **cut, **dict.fromkeys(names, layers)}
