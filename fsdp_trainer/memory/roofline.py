"""How long a step takes on given GPUs, from the work it holds: a prediction for comparing plans, not a measurement."""

from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.work import Work

# Shares of the peaks that training reaches: assumptions of the usual size. Against published tokens per second a
# roofline with these came out 9 % fast on 8 H100, 12 % fast on 128 H100 and 15 % slow on 64 A100.
MATRIX_SHARE, MEMORY_SHARE, LINK_SHARE = 0.70, 0.80, 0.75


def predict_seconds(work: Work, hardware: Hardware, *, half: bool) -> float | None:
    """Return the seconds of a step, communication wholly overlapped with compute; None where a rate is not known.

    `half` says that matrix products run in bf16 or fp16; fp32 ones at a half of that at best (TF32 is off by default,
    so this too is a lower bound on the time).
    """
    peak = hardware.bf16_flops or hardware.fp16_flops
    if not half:
        peak /= 2
    sent_in_node = sum(size for ranks, size in work.sent.items() if ranks <= hardware.gpus_per_node)
    sent_outside = sum(work.sent.values()) - sent_in_node
    if not peak or not hardware.memory_bandwidth or (sent_in_node and not hardware.link_bandwidth):
        return None
    if sent_outside and not hardware.node_bandwidth:
        return None
    compute = work.flops / (MATRIX_SHARE * peak) + work.moved / (MEMORY_SHARE * hardware.memory_bandwidth)
    communication = 0.0
    if sent_in_node:
        communication += sent_in_node / (LINK_SHARE * hardware.link_bandwidth)
    if sent_outside:
        communication += sent_outside / (LINK_SHARE * hardware.node_bandwidth)
    return max(compute, communication)
