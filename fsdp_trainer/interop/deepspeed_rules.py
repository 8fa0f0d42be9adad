"""The verdicts on DeepSpeed keys that depend on the value, or on what the file says elsewhere.

One function a rule of deepspeed_keys.yaml: the value as the table takes it and the facts of the file in, outcome out.
"""

from typing import Any

from fsdp_trainer.interop.deepspeed_facts import Facts, read_dtype
from fsdp_trainer.interop.deepspeed_optimizer_rules import OPTIMIZER_RULES
from fsdp_trainer.interop.key_table import Outcome, Rules, blocked, differs, mapped, not_needed, refused

# Batch and clipping


def _train_batch(value: int, facts: Facts) -> Outcome:
    batch = facts.batch
    if batch.problem:
        return blocked(batch.problem)
    if "train_micro_batch_size_per_gpu" in facts.values:
        return mapped(batch.equation, batch__global_batch_size=value)
    return mapped(batch.equation, batch__global_batch_size=value, batch__micro_batch_size=batch.micro_batch_size)


def _micro_batch(value: int, facts: Facts) -> Outcome:
    batch = facts.batch
    if batch.problem:
        return blocked(batch.problem)
    if "train_batch_size" in facts.values:
        return mapped(batch__micro_batch_size=value)
    return mapped(batch.equation, batch__micro_batch_size=value, batch__global_batch_size=batch.global_batch_size)


def _accumulation(value: int, facts: Facts) -> Outcome:
    if facts.batch.problem:
        return blocked(facts.batch.problem)
    return mapped(f"follows from the two batch sizes: {facts.batch.equation}")


def _clipping(value: float, facts: Facts) -> Outcome:
    if value < 0:
        return blocked("a norm is not below 0")
    return mapped("" if value else "0 is no clipping", optim__max_grad_norm=value or None)


def _steps_per_print(value: int, facts: Facts) -> Outcome:
    if facts.under_accelerate:
        return not_needed("Accelerate writes infinity over it, so DeepSpeed prints nothing")
    if value < 1:
        return blocked("takes 1 or more")
    if value >= _NEVER:
        return not_needed("so large that DeepSpeed prints nothing; this program's line is log.every_steps")
    return differs("a line of this program's own", log__every_steps=value)


_NEVER = 100_000  # more steps than a fine-tuning has


# Precision


def _bf16(value: bool, facts: Facts) -> Outcome:
    if not value:
        return not_needed("off")
    if facts.precision == "both":
        return blocked("bf16 and fp16 are both switched on: keep one")
    pure = facts.get("bf16.bf16_master_weights_and_grads")
    return mapped(precision="bf16_pure" if pure else "bf16")


def _fp16(value: bool, facts: Facts) -> Outcome:
    if not value:
        return not_needed("off")
    if facts.precision == "both":
        return blocked("bf16 and fp16 are both switched on: keep one")
    return mapped(precision="fp16")


def _autocast(value: bool, facts: Facts) -> Outcome:
    dtype = read_dtype(facts.get("torch_autocast.dtype", default="bf16"))
    if not value:
        return not_needed("off")
    if facts.precision == "both" or dtype not in ("bf16", "fp16"):
        return blocked("autocast and the other sections ask for different types: keep one of bf16 and fp16")
    if facts.get(f"{dtype}.enabled"):
        return not_needed(f"{dtype}.enabled says it")
    return differs("every layer computes in this type; masters stay fp32", precision=dtype)


def _pure_bf16(value: bool, facts: Facts) -> Outcome:
    if not value or facts.precision != "bf16":
        return not_needed("off")
    return differs("updates of the bf16 weights are rounded stochastically", precision="bf16_pure")


def _bf16_states(value: bool, facts: Facts) -> Outcome:
    if not value or facts.precision != "bf16":
        return not_needed("off")
    return differs("the averages are rounded stochastically", optim__state_dtype="bf16")


def _fp32_states(value: bool, facts: Facts) -> Outcome:
    if value or facts.precision == "fp32":
        return not_needed("the averages are fp32")
    return differs("the averages are bf16, rounded stochastically", optim__state_dtype="bf16")


def _check_overflow(value: bool, facts: Facts) -> Outcome:
    if facts.precision != "bf16":
        return not_needed("bf16 is off")
    if not value:
        return mapped("a loss or gradient that is not finite stops the run", train__on_nonfinite="error")
    return differs("such a step is skipped, but not more than 3 in a row", train__on_nonfinite="skip")


def _scaler(setting: str, same: Any, difference: str) -> Any:
    def rule(value: Any, facts: Facts) -> Outcome:
        if isinstance(value, int | float) and value < 0:
            return blocked("takes 0 or more")
        if facts.precision != "fp16":
            return not_needed("fp16 is off")
        if value == same:
            return mapped(f"as torch's gradient scaler: {setting}")
        return differs(difference)

    return rule


def _communication_dtype(value: str, facts: Facts) -> Outcome:
    dtype = read_dtype(value)
    if dtype is None:
        return blocked("takes fp32, bf16 or fp16")
    if dtype == "fp16" and facts.precision != "fp16":
        return refused("sums in fp16 overflow without the gradient scaler of fp16")
    return mapped(sharding__reduce_dtype=dtype)


def _accumulation_dtype(value: str, facts: Facts) -> Outcome:
    dtype = read_dtype(value)
    if dtype is None:
        return blocked("takes fp32, bf16 or fp16")
    if dtype == "fp32":
        return mapped("gradients are summed over micro-batches in fp32")
    return differs("gradients are summed over micro-batches in fp32, which loses less")


def _parameter_dtype(value: str, facts: Facts) -> Outcome:
    if read_dtype(value) == facts.precision:
        return mapped("what precision says")
    return refused(f"precision is {facts.precision}: weights compute in that")


# ZeRO

_STAGES = (
    "nothing is sharded",
    "optimizer state is sharded; weights rest as shards too, and are gathered for the forward pass",
    "optimizer state and gradients are sharded; weights rest as shards too, and are gathered for the forward pass",
    "weights, gradients and optimizer state are sharded",
)


def _stage(value: int, facts: Facts) -> Outcome:
    if not 0 <= value <= 3:
        return blocked("takes 0, 1, 2 or 3")
    return mapped(_STAGES[value], sharding__zero_stage=value)


def _zero_flag(value: bool, facts: Facts) -> Outcome:
    if not value:
        return mapped(_STAGES[0], sharding__zero_stage=0)
    return mapped("the old form of stage 1", sharding__zero_stage=1)


_NVME = "there is no NVMe offloading; host memory stands in"


def _offload_optimizer(value: str, facts: Facts) -> Outcome:
    device = value.strip().lower()
    if device == "none":
        return not_needed("nothing is offloaded")
    if device not in ("cpu", "nvme"):
        return blocked("takes none, cpu or nvme")
    everything = facts.stage == 3 and facts.device("offload_param") != "none"
    target = "params" if everything else "optimizer"
    if facts.stage == 0:
        return refused("offloading needs stage 1, 2 or 3, at DeepSpeed too")
    if device == "nvme":
        return refused(_NVME, sharding__offload=target)
    if everything:
        return mapped("with offload_param: weights, gradients and optimizer state", sharding__offload=target)
    return mapped("optimizer state and gradients, as ZeRO-Offload", sharding__offload=target)


def _offload_param(value: str, facts: Facts) -> Outcome:
    device = value.strip().lower()
    if device == "none":
        return not_needed("nothing is offloaded")
    if device not in ("cpu", "nvme"):
        return blocked("takes none, cpu or nvme")
    if facts.stage != 3:
        return not_needed(f"WARNING: DeepSpeed reads this at stage 3 only, and this is stage {facts.stage}")
    if device == "nvme":
        return refused(_NVME, sharding__offload="params")
    if facts.device("offload_optimizer") == "none":
        return differs("gradients and optimizer state go with the weights", sharding__offload="params")
    return mapped(sharding__offload="params")


def _cpu_offload(value: bool, facts: Facts) -> Outcome:
    if not value:
        return not_needed("off")
    if "zero_optimization.offload_optimizer.device" in facts.values:
        return blocked("the old name of offload_optimizer, which is given too: DeepSpeed takes one of them")
    return _renamed(_offload_optimizer("cpu", facts), "offload_optimizer: {device: cpu}")


def _cpu_offload_param(value: bool, facts: Facts) -> Outcome:
    if not value:
        return not_needed("off")
    if "zero_optimization.offload_param.device" in facts.values:
        return blocked("the old name of offload_param, which is given too: DeepSpeed takes one of them")
    return _renamed(_offload_param("cpu", facts), "offload_param: {device: cpu}")


def _renamed(outcome: Outcome, name: str) -> Outcome:
    return Outcome(outcome.kind, f"old name of {name}; {outcome.text}".rstrip("; "), outcome.settings, outcome.blocks)


def _nvme_detail(value: Any, facts: Facts) -> Outcome:
    used = "nvme" in (facts.device("offload_optimizer"), facts.device("offload_param"))
    return not_needed("goes with device: nvme" if used else "DeepSpeed reads it with device: nvme only")


def _gather_on_save(value: bool, facts: Facts) -> Outcome:
    dtype = facts.precision if facts.precision in ("bf16", "fp16") else "fp32"
    if value:
        return mapped("model/ is written at the end", export__at_end=True, export__dtype=dtype)
    text = "model/ is written at the end all the same, whole; DeepSpeed would leave shards to convert"
    return differs(text, export__at_end=True, export__dtype=dtype)


def _hpz(value: int, facts: Facts) -> Outcome:
    world = facts.batch.world_size
    if value <= 1 or facts.stage != 3:
        return not_needed("off" if value <= 1 else f"of stage 3, and this is stage {facts.stage}")
    if world is not None and value >= world:
        return not_needed(f"the group is all {world} ranks, which is plain stage 3")
    if world is not None and world % value:
        return refused(f"{world} ranks do not make groups of {value}")
    return differs(
        "weights are kept in groups from the forward to the backward pass", sharding__reshard_after_forward=value
    )


def _mics(value: int, facts: Facts) -> Outcome:
    world = facts.batch.world_size
    if value <= 0 or facts.stage != 3:
        return not_needed("off" if value <= 0 else f"of stage 3, and this is stage {facts.stage}")
    if world is None or world % value or value == 1:
        return refused(f"{world} ranks do not make copies of {value} ranks each")
    if value == world:
        return not_needed(f"one copy over all {world} ranks, which is plain stage 3")
    return mapped("one copy a group (HYBRID_SHARD)", sharding__replicate=world // value)


def _tracker(name: str) -> Any:
    def rule(value: bool, facts: Facts) -> Outcome:
        on = [one for one in _TRACKERS if facts.values.get(f"{one}.enabled")]
        if not value:
            return not_needed("off")
        return differs("the rows of metrics.jsonl", log__trackers=[_TRACKERS[one] for one in on])

    return rule


_TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}

RULES: Rules = {
    **OPTIMIZER_RULES,
    "train_batch": _train_batch,
    "micro_batch": _micro_batch,
    "accumulation": _accumulation,
    "clipping": _clipping,
    "steps_per_print": _steps_per_print,
    "communication_dtype": _communication_dtype,
    "accumulation_dtype": _accumulation_dtype,
    "parameter_dtype": _parameter_dtype,
    "bf16": _bf16,
    "fp16": _fp16,
    "autocast": _autocast,
    "pure_bf16": _pure_bf16,
    "bf16_states": _bf16_states,
    "fp32_states": _fp32_states,
    "check_overflow": _check_overflow,
    "loss_scale": _scaler("found as the run goes", 0, "the scale is not fixed: it starts at 2**16 and is found"),
    "scale_power": _scaler("starts at 2**16", 16, "the scale starts at 2**16, and halves until gradients fit"),
    "scale_window": _scaler("doubled after 2000 steps", 2000, "the scale is doubled after 2000 good steps"),
    "hysteresis": _scaler("", None, "the scale halves at every overflow, without a lower bound"),
    "stage": _stage,
    "zero_flag": _zero_flag,
    "offload_optimizer": _offload_optimizer,
    "offload_param": _offload_param,
    "cpu_offload": _cpu_offload,
    "cpu_offload_param": _cpu_offload_param,
    "nvme_detail": _nvme_detail,
    "gather_on_save": _gather_on_save,
    "hpz": _hpz,
    "mics": _mics,
    "tensorboard": _tracker("tensorboard"),
    "wandb": _tracker("wandb"),
    "comet": _tracker("comet"),
}
