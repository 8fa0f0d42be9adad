"""The chunked loss against torch's own cross-entropy: value, every gradient, dtype, and no supervised token."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fsdp_trainer.loss import LogitTransform, Supervision, chunked_cross_entropy, plain_cross_entropy

HIDDEN, VOCAB, ROWS = 24, 50, 13
TRANSFORMS = {
    "none": LogitTransform(),
    "softcap": LogitTransform(softcap=2.0),
    "multiplier": LogitTransform(multiplier=0.25),
    "both": LogitTransform(multiplier=3.0, softcap=2.0),
}


def _inputs(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    return hidden, weight, offset if bias else None, targets  # type: ignore[return-value]


def _torch_loss(hidden, weight, bias, targets, transform: LogitTransform) -> torch.Tensor:
    logits = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float()) * transform.multiplier
    if transform.softcap:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 64, None])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torch(chunk_tokens: int | None, name: str, bias: bool) -> None:
    transform, scale = TRANSFORMS[name], torch.tensor(0.3)
    hidden, weight, offset, targets = _inputs(bias=bias)
    scaled, total = chunked_cross_entropy(
        hidden, weight, offset, targets, scale, transform=transform, chunk_tokens=chunk_tokens
    )
    scaled.backward()
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    ours = [leaf.grad for leaf in leaves]
    expected = _torch_loss(hidden, weight, offset, targets, transform)
    theirs = torch.autograd.grad(expected * scale, leaves)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert scaled.item() == pytest.approx(0.3 * expected.item(), rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_supervised_rows_alone_equal_whole_logits() -> None:
    hidden, weight, _, targets = _inputs()
    positions = torch.tensor([1, 2, 7, 12])
    scale = torch.tensor(0.5)
    plain = plain_cross_entropy(
        hidden, weight, None, Supervision(positions, targets[positions], scale), transform=LogitTransform(softcap=3.0)
    )
    plain_grads = torch.autograd.grad(plain[0], [hidden, weight])
    chunked = chunked_cross_entropy(
        hidden[positions],
        weight,
        None,
        targets[positions],
        scale,
        transform=LogitTransform(softcap=3.0),
        chunk_tokens=3,
    )
    chunked_grads = torch.autograd.grad(chunked[0], [hidden, weight])
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(chunked_grads, plain_grads)


@pytest.mark.parametrize("chunk_tokens", [4, None])
def test_bf16_inputs_give_an_fp32_loss(chunk_tokens: int | None) -> None:
    """Report 13: cross-entropy in bf16 has a grid of 0.25 at a loss of 36."""
    hidden, weight, _, targets = _inputs(torch.bfloat16)
    scaled, total = chunked_cross_entropy(hidden, weight, None, targets, torch.tensor(1.0), chunk_tokens=chunk_tokens)
    logits = F.linear(hidden, weight).float()  # the same bf16 logits, the loss in fp32
    expected = F.cross_entropy(logits, targets, reduction="sum")
    assert scaled.dtype == total.dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=1e-3)
    grads = torch.autograd.grad(scaled, [hidden, weight])
    theirs = torch.autograd.grad(expected, [hidden, weight])
    for mine, other in zip(grads, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert ((mine.float() - other.float()).norm() / other.float().norm()).item() < 1e-2


def test_many_bf16_chunks_do_not_lose_small_gradients() -> None:
    hidden, weight, _, targets = _inputs(torch.bfloat16)
    hidden, targets = hidden.detach().repeat(64, 1).requires_grad_(), targets.repeat(64)
    scaled, _ = chunked_cross_entropy(hidden, weight, None, targets, torch.tensor(1.0), chunk_tokens=2)
    (grad,) = torch.autograd.grad(scaled, [weight])
    exact = torch.autograd.grad(_torch_loss(hidden, weight, None, targets, LogitTransform()), [weight])[0]
    assert ((grad.double() - exact.double()).norm() / exact.double().norm()).item() < 1e-2


def test_no_supervised_token_is_a_connected_zero() -> None:
    """Report 108: a rank without supervised tokens must still run the same backward as the others."""
    hidden, weight, _, _ = _inputs()
    nothing = torch.zeros(0, dtype=torch.int64)
    scaled, total = chunked_cross_entropy(hidden[nothing], weight, None, nothing, torch.tensor(0.1))
    scaled.backward()
    assert total.item() == 0.0
    assert weight.grad is not None and not weight.grad.any() and hidden.grad is not None and not hidden.grad.any()


def test_fp16_gradients_are_scaled_before_they_are_rounded() -> None:
    """Unscaled, gradients below 6e-8 vanish in fp16; the loss scale must reach them first."""
    hidden, weight, _, targets = _inputs(torch.float16)
    tiny, loss_scale = 1e-7, 2.0**16
    scaled, _ = chunked_cross_entropy(hidden, weight, None, targets, torch.tensor(tiny * loss_scale))
    (grad,) = torch.autograd.grad(scaled, [hidden])
    exact = torch.autograd.grad(_torch_loss(hidden, weight, None, targets, LogitTransform()), [hidden])[0]
    recovered = grad.double() / (tiny * loss_scale)
    assert ((recovered - exact.double()).norm() / exact.double().norm()).item() < 1e-2


@pytest.mark.parametrize("chunk_tokens", [3, None])
def test_no_gradient_is_computed_for_what_needs_none(chunk_tokens: int | None) -> None:
    hidden, weight, _, targets = _inputs()
    frozen = weight.detach()
    scaled, _ = chunked_cross_entropy(hidden, frozen, None, targets, torch.tensor(1.0), chunk_tokens=chunk_tokens)
    scaled.backward()
    assert frozen.grad is None and hidden.grad is not None
    with torch.no_grad():
        again, total = chunked_cross_entropy(
            hidden, frozen, None, targets, torch.tensor(1.0), chunk_tokens=chunk_tokens
        )
    assert not again.requires_grad and total.item() == pytest.approx(scaled.item())


@pytest.mark.parametrize("chunk_tokens", [4, None])
def test_evaluation_makes_no_gradient(chunk_tokens: int | None) -> None:
    """One product a chunk, the logits: an evaluation of a 128k vocabulary made 3 GiB of gradients to throw away."""
    hidden, weight, bias, targets = _inputs()
    scale = torch.tensor(1.0)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        _, total = chunked_cross_entropy(hidden, weight, bias, targets, scale, chunk_tokens=chunk_tokens)
    assert counter.get_total_flops() == 2 * ROWS * HIDDEN * VOCAB
    trained = chunked_cross_entropy(hidden, weight, bias, targets, scale, chunk_tokens=chunk_tokens)[1]
    assert torch.equal(total, trained)
