"""Values of FSDP settings as Accelerate's profiles and Transformers' fsdp_config both write them."""

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_trainer.interop.key_table import Outcome, blocked, differs, not_needed, refused
from fsdp_trainer.launch_profile import STRATEGY_NUMBERS, as_bool

STRATEGY_STAGES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}


def read_strategy(value: Any) -> str:
    """Return a strategy's name from its name in any case, or from its number."""
    word = str(value).strip().upper().removeprefix("SHARDINGSTRATEGY.")
    return STRATEGY_NUMBERS.get(word, word)


def find_stage(value: Any) -> int | None:
    """Return the ZeRO stage of a strategy (name or number) or of a reshard_after_forward flag; None for neither."""
    if isinstance(value, bool):
        return 3 if value else 2
    name = read_strategy(value)
    if name in STRATEGY_STAGES:
        return STRATEGY_STAGES[name]
    flag = as_bool(value)
    return None if flag is None else 3 if flag else 2


def judge_wrap_policy(value: str) -> Outcome:
    """Say what becomes of an auto_wrap_policy: decoder layers are sharded one by one in any case."""
    name = value.strip().upper()
    if name == "TRANSFORMER_BASED_WRAP":
        return not_needed("decoder layers are sharded one by one")
    if name in ("SIZE_BASED_WRAP", "NO_WRAP", ""):
        return differs("decoder layers are sharded one by one, whatever their size")
    near = difflib.get_close_matches(name, ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"], n=1)
    return blocked(f"{value} is no wrap policy" + (f"; did you mean {near[0]}?" if near else ""))


def judge_state_dict_type(value: str) -> Outcome:
    """Say what becomes of a state_dict_type: checkpoints are sharded, the exported model is whole."""
    name = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}.get(value, value.upper())
    if name == "SHARDED_STATE_DICT":
        return not_needed("checkpoints are sharded")
    if name == "FULL_STATE_DICT":
        return Outcome("mapped with a difference", "checkpoints are sharded; model/ is whole", {"export.at_end": True})
    if name == "LOCAL_STATE_DICT":
        return differs("checkpoints are sharded, and resume on any number of ranks")
    near = difflib.get_close_matches(name, ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"], n=1)
    return blocked(f"{value} is no state dict type" + (f"; did you mean {near[0]}?" if near else ""))


def judge_layer_classes(value: Any, *, model_type: str | None = None) -> Outcome:
    """Say what becomes of the classes to wrap: a comma list, a list, or one name, spaces allowed.

    Names are compared with the decoder layers that the installed Transformers has, those of `model_type` where that is
    known. A second class lies inside the layer, which is sharded and checkpointed as one.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return blocked("takes the name of a class, or several with commas between")
    names = [name.strip() for name in names if name.strip()]
    known, defined = layer_classes(model_type)
    layers = [name for name in names if name in known]
    for name in names:
        if name not in known and name not in defined and known:
            near = _nearest(name, known)
            where = f"{model_type} models of Transformers" if model_type else "Transformers"
            hint = f"; did you mean {near}?" if near else ""
            return refused(f"{where} has no class {name}{hint} Decoder layers are found by themselves")
    if known and names and not layers:
        wanted = f", which is {known[0]}" if len(known) == 1 else ""
        return refused(f"{', '.join(names)} is not the decoder layer{wanted}; decoder layers are found by themselves")
    if len(names) > 1:
        text = f"WARNING: only the decoder layer ({', '.join(layers)}) is sharded and checkpointed, with all inside it"
        return differs(text)
    return not_needed("decoder layers are found by themselves")


def _nearest(name: str, known: tuple[str, ...]) -> str:
    folded = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.7)
    return folded[close[0]] if close else ""


@cache
def layer_classes(model_type: str | None = None) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the layer classes of Transformers' models and all classes of theirs, read from the text of its modules.

    Nothing is imported. In Transformers 5 the layers that can be checkpointed have GradientCheckpointingLayer as base.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return (), frozenset()
    folder = model_type.replace("-", "_") if model_type else "*"
    layers: dict[str, None] = {}
    classes: set[str] = set()
    for path in sorted((Path(spec.origin).parent / "models").glob(f"{folder}/modeling_*.py")):
        for name, bases in re.findall(r"^class (\w+)(?:\(([^)]*)\))?:", path.read_text(encoding="utf-8"), re.MULTILINE):
            classes.add(name)
            if "GradientCheckpointingLayer" in bases:
                layers[name] = None
    return tuple(layers), frozenset(classes)
