"""Proof, on a small copy with real numbers, that no token sees a later one nor another document of its row.

An architecture that computes attention in code of its own gets no mask here, since Transformers makes none for our
attention's name: it trains looking at the future, with a loss that only looks good. So nothing is taken for granted.
For every model at its start a later token is changed, and no earlier output may move; with packing a document is
changed, and no other's may; and what windows and chunks hide is compared with plain Transformers.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_trainer.attention import Documents, choose_attention
from fsdp_trainer.caches import remembered
from fsdp_trainer.custom_code import building_arguments, digest_of_code, one_at_a_time, read_custom_code
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.model import find_parts, modules_in_fp32
from fsdp_trainer.rotary import choose_tables_by_document
from fsdp_trainer.small_copy import shrink

LENGTHS = (24, 17)  # tokens of the two documents: beyond the small copy's windows and chunks of 8
TOLERANCE = 1e-3  # of the largest output; a token that is seen moves it by percents
MAX_PARAMETERS = 4 * 10**7  # a config whose sizes have names of their own stays too large
SEED = 5
_MODULES = ("attention", "causality", "model", "rotary", "small_copy")

PADDING = 8  # tokens behind a row

Outputs = Callable[..., torch.Tensor]  # of token ids, document ids or None and how many tokens at the end are padding


@dataclass(frozen=True)
class Leaks:
    """How far an output moved that may not move, as a share of the largest: by a later token, by another document, by
    padding behind the row."""

    later: float
    document: float
    padding: float = 0.0

    @property
    def most(self) -> float:
        """The largest of them."""
        return max(self.later, self.document, self.padding)


def prove(
    hf_config: Any,
    *,
    attention: str,
    packing: bool,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> tuple[str, ...]:
    """Refuse a model whose tokens see what they may not, or that does not compute in `dtype`; return what to log.

    Where plain Transformers lets the same be seen (a router that chooses tokens, not experts), that is said and no
    error. The answer is kept by architecture, code and versions.
    """
    words = {"attention": attention, "packing": packing, "trust_remote_code": trust_remote_code}
    try:
        words |= {"hidden_beyond": _least_window(hf_config, seq_len), "dtype": dtype}
        small = shrink(hf_config)
        config = json.dumps([{**small.to_dict(), "_name_or_path": None}, words], sort_keys=True, default=str)
        own = str(digest_of_code(read_custom_code(small))) if trust_remote_code else ""
        return tuple(remembered("causality", [config, own], _MODULES, lambda: _try(small, **words)))
    except ConfigError:
        raise
    except Exception as error:  # whatever it is, it is no statement about the model
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return (f"not tried on a small copy whether tokens see only what came before: {reason}",)


def _try(
    small: Any,
    *,
    attention: str,
    packing: bool,
    hidden_beyond: int | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> tuple[str, ...]:
    def build(implementation: str | None) -> Any:
        config = copy.deepcopy(small)
        more = building_arguments(config, trust_remote_code=trust_remote_code)
        more |= {"attn_implementation": implementation} if implementation else {}
        with one_at_a_time(trust_remote_code=trust_remote_code):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **more)

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(None).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        ours = _with_values(build(choose_attention(attention, small)))
        choose_tables_by_document(ours)

        def plain() -> Any:
            twin = build("eager" if attention == "eager" else None).eval()
            twin.load_state_dict(ours.state_dict())
            return twin

        try:
            found = _leaks(_our_outputs(ours), packing=packing)
        except ConfigError:  # it has its reason already, such as a mask of the model's own
            raise
        except Exception as error:
            _plain_outputs(plain())(_tokens(), None)  # where this fails as well, nothing is said about the model
            raise ConfigError(
                f"{type(ours).__name__} does not run without a mask and a cache, as training needs it.",
                values=f"on a small copy, which plain Transformers runs: {type(error).__name__}: {str(error)[:200]}",
                fix="use another architecture, or report this one",
            ) from error
        _check_dtypes(ours, dtype)
        if found.most <= TOLERANCE and hidden_beyond is None:
            return ()
        return _judge(ours, plain(), found, packing=packing, hidden_beyond=hidden_beyond)


def _check_dtypes(model: Any, dtype: torch.dtype) -> None:
    """Refuse a model of which a product meets two dtypes, laid out as sharding.py casts it: fakes let that pass."""
    narrow = copy.deepcopy(model)
    kept = {id(p) for module in modules_in_fp32(narrow, dtype) for p in module.parameters(recurse=False)}
    for parameter in narrow.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    try:
        _our_outputs(narrow)(_tokens(), None)
    except RuntimeError as error:
        if "dtype" in str(error):
            raise ConfigError(
                f"{type(model).__name__} does not compute in {str(dtype).removeprefix('torch.')} here.",
                values=f"on a small copy: {str(error).splitlines()[0]}",
                fix="set precision: fp32, or report this architecture",
            ) from error


def _judge(ours: Any, plain: Any, found: Leaks, *, packing: bool, hidden_beyond: int | None) -> tuple[str, ...]:
    name = type(ours).__name__
    looks_ahead = found.later > TOLERANCE
    # Code of a model's own is no measure of itself.
    is_measure = looks_ahead and type(ours).__module__.startswith("transformers.models.")
    is_meant = is_measure and _leaks(_plain_outputs(plain), packing=False).later > TOLERANCE
    if looks_ahead and not is_meant:
        raise _refusal(f"{name} lets tokens see those that come after them here.", found.later)
    if packing and found.document > TOLERANCE:
        raise _refusal(
            f"{name} carries one document of a packed row into another.", found.document, fix="set data.packing: false"
        )
    if found.padding > TOLERANCE:
        raise _refusal(f"{name} computes a row in another way where padding follows it.", found.padding)
    apart = _apart(ours, plain, packing=packing) if hidden_beyond is not None else 0.0
    if apart > TOLERANCE:
        fix = f"set data.seq_len to at most {hidden_beyond}, or use another architecture"
        raise _refusal(f"{name} has a window or chunks that do not reach its attention here.", apart, fix=fix)
    return (f"tokens of {name} see some that come after them, as they do in plain Transformers",) if looks_ahead else ()


def _apart(ours: Any, plain: Any, *, packing: bool) -> float:
    """Return how far our outputs are from plain Transformers', each document alone there."""
    first, second = _tokens().split(LENGTHS, dim=1)
    expected = _plain_outputs(plain)(first, None)
    apart = _share(_our_outputs(ours)(first, None) - expected, expected)
    if packing:
        expected = torch.cat([expected, _plain_outputs(plain)(second, None)], dim=1)
        packed = _our_outputs(ours)(_tokens(), _documents())
        apart = max(apart, _share(packed - expected, expected))
    return apart


def _refusal(what: str, moved: float, *, fix: str = "use another architecture, or report this one") -> ConfigError:
    return ConfigError(
        what, values=f"on a small copy outputs that may not change moved by {100 * moved:.2g} % of the largest", fix=fix
    )


def _least_window(config: Any, seq_len: int) -> int | None:
    """Return the least window or chunk of attention in a config that is shorter than a row."""
    values = config.get_text_config().to_dict()
    sizes = [value for key, value in values.items() if "window" in key or "chunk" in key]
    shorter = (size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and 0 < size < seq_len)
    return min(shorter, default=None)


def _with_values(model: Any) -> Any:
    """Give every parameter values of which none hides what another does: no zeros, no ones."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.normal_(mean=0.5, std=0.05)
    return model.eval()


def _tokens() -> torch.Tensor:
    return torch.arange(3, 3 + sum(LENGTHS))[None]


def _documents() -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS))[None]


def _our_outputs(model: Any) -> Outputs:
    decoder: nn.Module = find_parts(model).decoder

    def outputs(ids: torch.Tensor, documents: torch.Tensor | None, padding: int = 0) -> torch.Tensor:
        lengths = None if documents is None else [torch.bincount(documents[0]).tolist()]
        spans = lengths[0] if lengths else [ids.shape[1] - padding]
        positions = torch.cat([torch.arange(span) for span in spans] + [torch.zeros(padding, dtype=torch.long)])[None]
        return decoder(
            input_ids=ids, position_ids=positions, use_cache=False, documents=Documents(documents, lengths)
        ).last_hidden_state

    return outputs


def _plain_outputs(model: Any) -> Outputs:
    decoder: nn.Module = find_parts(model).decoder
    return lambda ids, *_: decoder(input_ids=ids, use_cache=False).last_hidden_state


def _leaks(outputs: Outputs, *, packing: bool) -> Leaks:
    """Change the last token of a row, what follows it, and one document of two; see what moves before and beside."""
    whole, first = _tokens(), LENGTHS[0]
    alone = whole[:, :first]
    changed = alone.clone()
    changed[0, -1] += 60
    base = outputs(alone, None)
    later = _share((outputs(changed, None) - base)[:, :-1], base)
    padded = torch.cat([alone, alone[:, :1].expand(-1, PADDING)], dim=1)  # as the loader pads
    padding = _share(outputs(padded, None, PADDING)[:, :first] - base, base)
    if not packing:
        return Leaks(later, 0.0, padding)
    base = outputs(whole, _documents())
    other = whole.clone()
    other[:, :first] += 60
    return Leaks(later, _share((outputs(other, _documents()) - base)[:, first:], base), padding)


def _share(difference: torch.Tensor, base: torch.Tensor) -> float:
    if not base.isfinite().all():
        raise ValueError("its outputs are not finite")
    return float(difference.abs().max() / base.abs().max())
