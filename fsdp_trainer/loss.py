"""Cross-entropy over the supervised positions alone, computed where the output head lives.

The head's weight is whole only while FSDP runs the head module, so the loss is that module's forward during training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from fsdp_trainer.attention import Documents
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.router_loss import RouterLoss, check_router_logits

# Elements of one chunk's logits: 2**26 fp32 values are 256 MiB, small beside any layer's gathered weights, and large
# enough that the matrix product is not starved (1365 positions of a 49k vocabulary, 441 of a 152k one).
CHUNK_ELEMENTS = 2**26
# Rows of the head whose gradient is added at once where its sum is handed over as it is; 64 MiB at a width of 4096.
_HEAD_ROWS = 8192


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its logits after the head: multiply, then soft-cap with cap * tanh(x / cap)."""

    multiplier: float = 1.0
    softcap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return transformed logits in the dtype given."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class Supervision:
    """What the head needs for the loss.

    positions, targets: int64 [n]; flat indices into batch * seq, and the token to predict there.
    scale: fp32 scalar tensor by which the summed loss is multiplied before the backward pass.

    Not a dataclass: FSDP casts the tensors inside those as well as bare ones, and a scale in bf16 would be off by up to
    0.4 %, one in fp16 infinite (torch 2.14, distributed/utils.py, `_apply_to_tensors`).
    """

    def __init__(self, positions: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> None:
        self.positions, self.targets, self.scale = positions, targets, scale


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of hidden @ weight.T, with both gradients computed in the forward, chunk by chunk.

    The scale enters the gradients in fp32 before they are rounded to the compute dtype: scaled afterwards, fp16
    gradients would underflow first, which is what loss scaling is there to prevent.
    """

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, scale, transform: LogitTransform, chunk_tokens: int):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = grad_bias = None
        # Sums of several chunks are kept in fp32: adding bf16 chunks in bf16 would lose bits that one product keeps.
        sum_dtype = weight.dtype if hidden.shape[0] <= chunk_tokens else torch.float32
        takes = getattr(weight, "grad_dtype", None) or weight.dtype
        for start in range(0, max(1, hidden.shape[0]), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            loss, grad_logits = _chunk_loss(
                hidden[rows], weight, bias, targets[rows], scale, transform, needs_grad=any(ctx.needs_input_grad[:3])
            )
            total += loss
            if grad_logits is None:
                continue
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if needs_weight and sum_dtype == takes != weight.dtype:
                grad_weight = _add_product(grad_weight, grad_logits, hidden[rows])
            elif needs_weight:
                product = torch.mm(grad_logits.t(), hidden[rows])
                grad_weight = product.to(sum_dtype) if grad_weight is None else grad_weight.add_(product)
                del product
            if needs_bias:
                summed = grad_logits.sum(0, dtype=torch.float32)
                grad_bias = summed if grad_bias is None else grad_bias.add_(summed)
            del grad_logits  # or it would live beside the next chunk's logits
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.weight_dtype, ctx.bias_dtype = takes, weight.dtype
        ctx.mark_non_differentiable(total)
        return total * scale, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        grad_hidden, grad_weight, grad_bias = ctx.grads
        ctx.grads = None
        upstream = grads[0]
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(upstream.to(grad_hidden.dtype))
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(upstream.to(grad_weight.dtype)).to(ctx.weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.mul_(upstream).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _add_product(total: torch.Tensor | None, grad_logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Add a chunk's gradient of the head to its fp32 sum, some rows of the table at a time: never a second table."""
    if total is None:
        total = torch.zeros(grad_logits.shape[1], hidden.shape[1], dtype=torch.float32, device=hidden.device)
    for start in range(0, total.shape[0], _HEAD_ROWS):
        part = slice(start, start + _HEAD_ROWS)
        total[part].add_(torch.mm(grad_logits[:, part].t(), hidden))
    return total


def _chunk_loss(hidden, weight, bias, targets, scale, transform: LogitTransform, *, needs_grad: bool):
    """Return the summed loss of one chunk and the scaled gradient of its raw logits in the compute dtype."""
    logits = transform.apply(F.linear(hidden, weight, bias).float())
    target_logits = logits.gather(1, targets[:, None])
    largest = logits.amax(dim=-1, keepdim=True)
    # d tanh(u) = 1 - tanh(u)**2, from the capped logits that the next line overwrites
    through_cap = None if transform.softcap is None or not needs_grad else 1.0 - (logits / transform.softcap) ** 2
    # In place, and one exponential for loss and gradient: one fp32 chunk is the largest buffer there is.
    grad = logits.sub_(largest).exp_()
    sums = grad.sum(dim=-1, keepdim=True)
    loss = (sums.log() + largest - target_logits).sum()
    if not needs_grad:
        return loss, None
    factor = scale * transform.multiplier
    grad *= factor / sums
    grad.scatter_add_(1, targets[:, None], -factor.expand_as(largest))
    if through_cap is not None:
        grad *= through_cap
    return loss, grad.to(hidden.dtype)


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: torch.Tensor,
    *,
    transform: LogitTransform = LogitTransform(),
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scaled loss to call backward on, unscaled summed loss), both fp32 scalars.

    hidden [n, hidden], weight [vocabulary, hidden], targets int64 [n]. n may be 0: the loss is then 0 and connected,
    so that a rank without supervised tokens still takes part in every reduction. Measured against whole logits on the
    supervised rows of a 49k vocabulary on CPU: as fast at any chunk size.
    """
    chunk = chunk_tokens or max(256, CHUNK_ELEMENTS // weight.shape[0])
    if not torch.is_grad_enabled():
        # What a Function is told its inputs need is the same under no_grad: an evaluation would make every gradient,
        # two thirds of the products and an fp32 table of the head's size, to throw them away.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, scale, transform, chunk)  # type: ignore[return-value]


def plain_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    supervision: Supervision,
    *,
    transform: LogitTransform,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same two scalars from whole logits [batch * seq, vocabulary] in fp32, as other trainers compute it."""
    logits = transform.apply(F.linear(hidden, weight, bias)).float()
    labels = torch.full((hidden.shape[0],), -100, dtype=torch.int64, device=hidden.device)
    labels[supervision.positions] = supervision.targets
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total * supervision.scale, total.detach()


def attach_loss(
    model: nn.Module,
    *,
    decoder: nn.Module,
    head: Any,
    transform: LogitTransform,
    kind: str,
    chunk_tokens: int | None,
    router_loss: RouterLoss | None = None,
) -> None:
    """Let `model(..., supervision=...)` return (scaled loss, summed loss) and leave every other call as it was.

    The scaled loss has the router loss in it while training, the summed one never; see [Note: router loss].

    Both forwards are changed on the instances, so names, state dicts and `generate` are untouched, and FSDP's hooks
    (on the module call) gather the head's weight around the loss.
    """
    model_forward, head_forward = model.forward, head.forward

    def forward_head(hidden: torch.Tensor, supervision: Supervision | None = None):
        if supervision is None:
            return head_forward(hidden)
        weight, bias = head.weight, getattr(head, "bias", None)
        flat = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)  # Mamba's residual stays in fp32
        if kind == "plain":
            return plain_cross_entropy(flat, weight, bias, supervision, transform=transform)
        return chunked_cross_entropy(
            flat.index_select(0, supervision.positions),
            weight,
            bias,
            supervision.targets,
            supervision.scale,
            transform=transform,
            chunk_tokens=chunk_tokens,
        )

    def forward_model(
        *args: Any,
        supervision: Supervision | None = None,
        document_ids=None,
        document_lengths=None,
        lengths=None,
        **kwargs: Any,
    ):
        if supervision is None:
            return model_forward(*args, **kwargs)
        documents = Documents(document_ids, document_lengths)
        balances = router_loss is not None and model.training
        if router_loss is not None:
            kwargs["output_router_logits"] = balances
        # No cache while training: inside a checkpointed layer it would be appended to twice.
        outputs = decoder(*args, use_cache=False, documents=documents, **kwargs)
        if document_ids is not None and not documents.windows:
            raise ConfigError(
                f"{type(model).__name__} hands no keyword arguments on to its attention, so documents packed into one "
                "row could see each other.",
                values="its decoder ran without calling the attention of this trainer",
                fix="use another architecture, or report this one",
            )
        scaled, total = head(outputs.last_hidden_state, supervision=supervision)
        if router_loss is not None and balances and supervision.positions.numel():
            width = outputs.last_hidden_state.shape[1]
            value = router_loss.compute(check_router_logits(outputs), lengths=lengths, width=width)
            scaled = scaled + value * (supervision.scale * supervision.positions.numel())
        return scaled, total

    head.forward, model.forward = forward_head, forward_model


def find_logit_transform(model: nn.Module, *, decoder: nn.Module, head: nn.Module, hf_config: Any) -> LogitTransform:
    """Read the model's logit multiplier and soft-cap from its config and prove them on the model's own forward.

    The proof runs the model's forward once with its decoder and head replaced by stand-ins that pass numbers through;
    it needs no weights. Raises ConfigError for an architecture that does something else to its logits.
    """
    vocab_size = hf_config.get_text_config().vocab_size
    probe = torch.linspace(-40.0, 40.0, 8 * vocab_size)[::vocab_size].reshape(1, 8, 1)
    _check_head(model, head)
    try:
        found = _run_with_stand_ins(model, decoder=decoder, head=head, hidden=probe)
    # The model does more than decoder and head (BERT), or less alone (the assistant of Gemma 4).
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{type(model).__name__} is not a decoder followed by an output head.",
            values=f"model_type {hf_config.model_type}: {type(error).__name__}: {str(error).splitlines()[0]}",
            fix="name a decoder-only causal language model",
        ) from error
    # Still on meta: the model's forward went around its decoder's (OPT calls the decoder's own decoder).
    passed_through = found.shape == probe.shape and not found.is_meta
    softcap = getattr(hf_config, "final_logit_softcapping", None)
    for multiplier in _multipliers(hf_config) if passed_through else ():
        transform = LogitTransform(multiplier, softcap)
        if torch.allclose(found.float(), transform.apply(probe), rtol=1e-5, atol=1e-6):
            return transform
    became = f"{found.flatten().tolist()[:2]}..." if passed_through else f"a tensor of shape {list(found.shape)}"
    raise ConfigError(
        f"{type(model).__name__} makes its logits in a way this trainer does not know.",
        values=f"{probe.flatten().tolist()[:2]}... became {became}",
        fix="use another architecture, or report this one",
    )


def _multipliers(hf_config: Any) -> Iterator[float]:
    """Yield what the logits of architectures are multiplied by, under the names that configs have for it."""
    yield 1.0
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):  # Cohere, Falcon H1, Granite, which divides
        if value := getattr(hf_config.get_text_config(), name, None):
            yield from (value, 1.0 / value)


def _check_head(model: nn.Module, head: nn.Module) -> None:
    """Refuse a head that is more than one linear map, whose forward the loss takes the place of (Dory scales there)."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ConfigError(
            f"{type(model).__name__} makes its logits in a way this trainer does not know.",
            values=f"its output head is {type(head).__name__}, not a linear layer",
            fix="use another architecture, or report this one",
        )


class _DecoderOutput(BaseModelOutputWithPast):
    """A decoder's output in which everything an architecture may ask for besides the hidden states is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _run_with_stand_ins(model: nn.Module, *, decoder: nn.Module, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    stand_ins: list[tuple[nn.Module, Callable[..., Any]]] = [
        (decoder, lambda *a, **k: _DecoderOutput(last_hidden_state=hidden)),
        (head, lambda states: states),
    ]
    originals = [module.__dict__.get("forward") for module, _ in stand_ins]
    try:
        for module, stand_in in stand_ins:
            module.forward = stand_in
        with torch.no_grad():
            return model(input_ids=torch.zeros(1, hidden.shape[1], dtype=torch.int64), use_cache=False).logits
    finally:
        for (module, _), original in zip(stand_ins, originals, strict=True):
            if original is None:
                del module.forward
            else:
                module.forward = original
