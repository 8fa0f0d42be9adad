"""One optimizer step and one evaluation forward: the only place that knows what a step is.

Nothing here reads a tensor's value on the host, so the same lines run on fake tensors; the loop reads the results.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_trainer.data.loader import MicroBatch, Window
from fsdp_trainer.loss import Supervision
from fsdp_trainer.optim.host_gradients import unscale_norm
from fsdp_trainer.run import Run


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device, each an fp32 scalar that is equal on every rank.

    loss: mean over the window's supervised tokens of all ranks and micro-batches. grad_norm: global, before clipping.
    skipped: 1 when the gradient was not finite and the weights were left as they were, else 0.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor


def train_step(run: Run, window: Window, *, learning_rate: float, optimizer_step: int) -> StepOutput:
    """Accumulate the window's gradients, clip by the global norm, and move the weights once.

    `optimizer_step` is how often the run has moved its weights before; a skipped step does not count.

    The labels are what a profile shows and what the memory ledger takes its phases from.
    """
    with run.runtime.tensors():
        loss_sum, *_last = accumulate_gradients(run, window)  # held to the end of the step, as they say
        with run.runtime.phases.enter("clip"):
            grad_norm = _clip_gradients(run)
        with run.runtime.phases.enter("step"):
            skipped = _move_weights(run, grad_norm, learning_rate, optimizer_step)
        run.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss_sum)
        return StepOutput(loss_sum / window.supervised_tokens, grad_norm, skipped)


def accumulate_gradients(run: Run, window: Window) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add up the window's gradients, micro-batch by micro-batch; return this rank's summed loss, fp32 on the device.

    And the last micro-batch's scaled and summed loss: let go of here, the measured peak of a step in bf16 with
    `offload: optimizer` was 5 bytes above the predicted (tests/distributed/test_ledger.py).
    """
    loss_sum = torch.zeros((), dtype=torch.float32, device=run.runtime.device)
    scale = _backward_scale(run, window.supervised_tokens)
    for index, micro_batch in enumerate(window.micro_batches):
        run.sharding.before_micro_batch(is_last=index == len(window.micro_batches) - 1)
        with run.runtime.phases.enter("forward"):
            scaled_loss, summed_loss = _forward(run, micro_batch, scale)
        with run.runtime.phases.enter("backward"):
            scaled_loss.backward()
        loss_sum += summed_loss
    # A gathered weight would hide the update from the next forward.
    run.sharding.reshard_all()
    return loss_sum, scaled_loss, summed_loss


@torch.no_grad()
def eval_step(run: Run, micro_batch: MicroBatch) -> torch.Tensor:
    """Return this rank's summed loss over the micro-batch's supervised tokens, an fp32 scalar on the device."""
    with run.runtime.tensors(), run.runtime.phases.enter("evaluate"):
        one = torch.ones((), dtype=torch.float32, device=run.runtime.device)
        return _forward(run, micro_batch, one)[1]


def _backward_scale(run: Run, supervised_tokens: int) -> torch.Tensor:
    """Return the factor from a summed loss to what backward is called on.

    FSDP averages gradients over ranks, so the window's mean over all ranks needs the world size once; the count is
    the whole window's, so a rank or micro-batch with few supervised tokens weighs no more than its tokens.
    """
    assert supervised_tokens > 0, "a prepared row has a supervised token"
    factor = run.runtime.world_size / supervised_tokens
    scale = torch.full((), factor, dtype=torch.float32, device=run.runtime.device)
    return scale if run.scaler is None else run.scaler.scale(scale)


def _forward(run: Run, micro_batch: MicroBatch, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    place = run.runtime.place
    return run.model(
        input_ids=place(micro_batch.input_ids),
        position_ids=place(micro_batch.position_ids),
        document_ids=None if micro_batch.document_ids is None else place(micro_batch.document_ids),
        document_lengths=micro_batch.document_lengths,
        lengths=None if micro_batch.lengths is None else place(micro_batch.lengths),
        supervision=Supervision(place(micro_batch.supervised_positions), place(micro_batch.targets), scale),
    )


def _clip_gradients(run: Run) -> torch.Tensor:
    """Scale all gradients down to `max_grad_norm` by their true global norm; return the norm before that.

    Whatever the scaler has put on them comes off first.
    """
    if run.host_gradients is not None:
        return run.host_gradients.clip(run.config.optim.max_grad_norm, scaler=run.scaler)
    on_host = run.sharding.offload_params
    if run.scaler is not None and not on_host:
        run.scaler.unscale_(run.optimizer)
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    norm = _total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if run.scaler is not None and on_host:
        norm, factor = unscale_norm(norm.float(), run.scaler, run.runtime.device)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
    if run.config.optim.max_grad_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, run.config.optim.max_grad_norm, norm)
    return norm.float()


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    # The norm of a bf16 tensor comes back in bf16, 0.4 % wide, unless told otherwise.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def _move_weights(run: Run, grad_norm: torch.Tensor, learning_rate: float, optimizer_step: int) -> torch.Tensor:
    """Step the optimizer unless the global norm is not finite; every rank has the same norm, so all agree.

    The fused kernel takes the verdict as a device scalar (`found_inf`) and leaves weights, moments and step counts
    alone, so nothing is read on the host. Only there can a step be skipped; config.py refuses the rest.
    """
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    # Read by ShardedAdamW; torch's AdamW counts by itself, on the device.
    run.optimizer.optimizer_step = optimizer_step  # type: ignore[attr-defined]
    skipped = (~torch.isfinite(grad_norm)).float()
    if run.config.optim.implementation == "fused":
        run.optimizer.found_inf = skipped  # type: ignore[attr-defined]
    run.optimizer.step()
    if run.scaler is not None:
        # Not `scaler.step`: it would look for gradients again, and where they are on the host it finds none.
        run.scaler.update()
    return skipped
