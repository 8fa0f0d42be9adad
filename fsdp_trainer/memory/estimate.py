"""Memory in closed form: model states by ZeRO stage and recipe, activations, logits, and the tables others published.

Plain arithmetic on counts and sizes, in bytes, without torch; each formula names its source. What they leave out (the
gathered weights, buffers and the order of a step) is in estimate_step.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Recipe:
    """Bytes a parameter: weights at rest, gradients, optimizer state, and what the optimizer's step adds for a moment.

    `compute` is the copy in compute dtype that exists only while gathered; 0 where the weights themselves are used.
    `vector_state`: the state of embeddings, norms and biases where it is another one; None where it is not.
    """

    weights: float
    gradients: float
    optimizer_state: float
    step: float
    compute: float
    vector_state: float | None = None

    @property
    def total(self) -> float:
        """Bytes a parameter at rest, gradients included."""
        return self.weights + self.gradients + self.optimizer_state


# Elements that ShardedAdamW (optim/sharded_adamw.py) takes at once: 16 MiB in fp32, enough to fill a GPU and small
# beside a layer; a multiple of the blocks below.
STEP_PIECE = 2**22
# Block-wise states: one byte (or half) an element and one fp32 scale a block, for two averages. bitsandbytes 0.50 and
# torchao 0.18: 8-bit blocks of 256; torchao 4-bit blocks of 128.
ADAMW_8BIT_STATE = 2 * (1 + 4 / 256)
ADAMW_4BIT_STATE = 2 * (0.5 + 4 / 128)
OPTIMIZER_STATE = {
    "adamw_fp32": 8.0,
    "adamw_bf16": 4.0,
    "adamw8bit_block256": ADAMW_8BIT_STATE,
    "adamw4bit_block128": ADAMW_4BIT_STATE,
    "sgd": 0.0,
    "sgd_momentum_fp32": 4.0,
}
RECIPES: Mapping[str, Recipe] = {
    "fp32": Recipe(4, 4, 8, 0, 0),
    "fp32_foreach": Recipe(4, 4, 8, 4, 0),
    "bf16": Recipe(4, 4, 8, 0, 2),  # also fp16: fp32 master shards, compute in 2 bytes
    "bf16_foreach": Recipe(4, 4, 8, 4, 2),
    "bf16_adamw_8bit": Recipe(4, 4, ADAMW_8BIT_STATE, 0, 2),
    "bf16_pure": Recipe(2, 2, 4, 0, 0),
    "bf16_pure_foreach": Recipe(2, 2, 4, 2, 0),
    "bf16_pure_fp32_state": Recipe(2, 2, 8, 0, 0),
    "bf16_pure_adamw_8bit": Recipe(2, 2, ADAMW_8BIT_STATE, 0, 0),
    "bf16_pure_adamw_4bit": Recipe(2, 2, ADAMW_4BIT_STATE, 0, 0),
    # Each layer's gradient is used and freed inside the backward pass.
    "bf16_pure_adamw_8bit_in_backward": Recipe(2, 0, ADAMW_8BIT_STATE, 0, 0),
}


def estimate_states(parameters: float, *, ranks: int, zero_stage: int, recipe: Recipe = RECIPES["bf16"]) -> float:
    """Return the bytes a rank holds of weights, gradients and optimizer state between steps, as this trainer rests.

    Stages 1 to 3 all rest as shards of 1 / `ranks`; stage 0 holds everything.
    """
    return recipe.total * parameters / (1 if zero_stage == 0 else ranks)


def estimate_zero_states(parameters: float, *, ranks: int, zero_stage: int, optimizer_bytes: float = 12.0) -> float:
    """Return the bytes of the ZeRO paper's Table 1: 2 B weights, 2 B gradients and K = 12 B of optimizer state.

    What each stage shards, ZeRO: Memory Optimizations (arXiv 1910.02054), section 3. Fits engines that keep half
    precision weights whole; here they are whole only inside a step.
    """
    weights, gradients, state = 2 * parameters, 2 * parameters, optimizer_bytes * parameters
    return (
        weights / (ranks if zero_stage >= 3 else 1)
        + gradients / (ranks if zero_stage >= 2 else 1)
        + state / (ranks if zero_stage >= 1 else 1)
    )


def communication_elements(parameters: float, *, zero_stage: int, micro_batches: int = 1) -> float:
    """Return the elements a rank moves in one optimizer step, times (N - 1) / N.

    Stage 3 gathers in forward and backward and reduces, each micro-batch: 3. Stage 2 gathers once a step and reduces
    each micro-batch. Stages 0 and 1 reduce once; 0 gathers nothing and all-reduces, which is 2. Source: the ZeRO
    paper, section 7, and fairscale PR #413; our stages as tests/distributed/test_stages.py counts them.
    """
    if zero_stage == 3:
        return 3 * parameters * micro_batches
    return parameters * (1 + micro_batches) if zero_stage == 2 else 2 * parameters


# --- activations -----------------------------------------------------------------------------------------------------


def estimate_gpt_layer_activations(
    *,
    seq_len: int,
    micro_batch_size: int,
    hidden: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return the bytes one GPT layer keeps: Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198).

    16-bit values, dropout masks, GELU of width 4h and eager attention: `recompute` none, selective (attention scores)
    or full. Wrong for Llama-like models with flash attention; those are counted in estimate_model.py.
    """
    sbh = seq_len * micro_batch_size * hidden
    scores = 0.0 if recompute == "selective" else 5 * heads * seq_len / hidden
    if recompute == "full":
        return 2.0 * sbh
    if sequence_parallel:
        return sbh * (34 + scores) / tensor_parallel
    return sbh * (10 + (24 + scores) / tensor_parallel)


def estimate_zero_infinity_activations(
    *, seq_len: int, micro_batch_size: int, hidden: int, heads: int, layers: int, every: int = 1
) -> tuple[float, float]:
    """Return the bytes of the checkpoints and of what lies between two, ZeRO-Infinity (arXiv 2104.07857), section 3.

    One checkpoint every `every` layers; 16-bit values and eager attention, as in the formula above.
    """
    tokens = micro_batch_size * seq_len
    return 2 * tokens * hidden * layers / every, tokens * every * (16 * hidden + 2 * heads * seq_len)


# --- loss ------------------------------------------------------------------------------------------------------------

# Bytes a logit at the peak of (forward, backward, both) over the inputs: whole logits cast with .float(), and the
# same compiled. apple/ml-cross-entropy README, 8192 tokens of a 256,000 vocabulary on an A100.
PUBLISHED_BYTES_PER_LOGIT = {"baseline": (12, 8, 14), "compile": (2, 6, 8)}


HEAD_ROWS = 8192  # loss.py


@dataclass(frozen=True)
class LossMemory:
    """What the loss holds, in bytes: at its worst in the forward, from there to its backward, and at worst in that.

    `weight_gradient` is the part that already is the head's gradient, made in the forward (chunked loss).
    """

    forward: float
    kept: float
    backward: float
    weight_gradient: float = 0.0


def estimate_loss(
    *,
    tokens: int,
    vocab: int,
    hidden: int,
    kind: str,
    chunk_tokens: int | None = None,
    compute_bytes: int = 2,
    bytes_per_logit: float | None = None,
    hands_over_sum: bool = False,
) -> LossMemory:
    """Return what loss.py's two kinds of loss take on top of the last hidden states; every token supervised.

    plain: logits in compute dtype, their fp32 copy and its log-softmax (kept), then two gradients beside it: 12 bytes
    at the peak where one that keeps `outputs.logits` has 14. `bytes_per_logit` replaces that peak (8 compiled).
    chunked: one chunk's logits twice, the hidden states' copy and gradient, and the head's gradient, summed in fp32
    where there is more than one chunk. `hands_over_sum`: that sum is the gradient, and grows some rows at a time.
    """
    if kind == "plain":
        logits = tokens * vocab
        peak = bytes_per_logit if bytes_per_logit is not None else 12.0
        # Made last and freed first: the logits in compute dtype count in the forward only where they outlive the cast.
        return LossMemory(forward=logits * min(peak, 8.0), kept=logits * min(peak, 4.0), backward=logits * peak)
    chunk = min(tokens, chunk_tokens or max(256, 2**26 // vocab))
    table = vocab * hidden
    several = chunk < tokens
    whole = several and not hands_over_sum
    weight_gradient = table * (4 if several else compute_bytes)
    rows = 2 * tokens * hidden * compute_bytes  # gathered rows and their gradient
    in_chunk = chunk * vocab * (4 + compute_bytes)
    rows_at_once = min(vocab, HEAD_ROWS) * hidden * several
    in_product = chunk * vocab * compute_bytes + (table if whole else rows_at_once) * compute_bytes
    cast = table * compute_bytes * whole
    kept = rows + weight_gradient
    # One chunk has no earlier chunk's gradient beside its logits.
    forward = kept + max(in_chunk, in_product) if several else max(rows + in_chunk, kept + in_product)
    return LossMemory(forward=forward, kept=kept, backward=kept + cast, weight_gradient=weight_gradient)


# --- DeepSpeed's estimator -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeepSpeedEstimate:
    """Bytes a GPU and on the CPU of one node, as DeepSpeed's own estimator prints them."""

    gpu: float
    cpu: float


def estimate_deepspeed(
    parameters: float,
    *,
    largest_layer: float,
    gpus_per_node: int,
    zero_stage: int,
    offload: str = "none",
    nodes: int = 1,
    zero_init: bool = True,
    buffer_factor: float = 1.5,
) -> DeepSpeedEstimate:
    """Return what DeepSpeed's estimators give (runtime/zero/stage_1_and_2.py and stage3.py, 2026): states alone.

    `offload`: none, optimizer, or params+optimizer (stage 3). Its documentation's 15.93 GB for stage 2 without offload
    is from an older formula, 4P + 16P / N.
    """
    gpus = gpus_per_node * nodes
    if zero_stage == 2:
        if offload == "optimizer":
            return DeepSpeedEstimate(2 * parameters, parameters * max(4 * gpus, 16) * buffer_factor)
        return DeepSpeedEstimate(
            2 * parameters + 18 * parameters / gpus, 4 * parameters * gpus_per_node * buffer_factor
        )
    layer = 4 * largest_layer
    whole = 4 * parameters * gpus_per_node  # every process builds the model before it is sharded
    if offload == "params+optimizer":
        share = 18 * parameters / nodes
        return DeepSpeedEstimate(layer, (share if zero_init else max(whole, share)) * buffer_factor)
    if offload == "optimizer":
        share = 16 * parameters / nodes
        return DeepSpeedEstimate(
            layer + 2 * parameters / gpus, (share if zero_init else max(whole, share)) * buffer_factor
        )
    return DeepSpeedEstimate(
        layer + 18 * parameters / gpus, (layer * gpus_per_node if zero_init else whole) * buffer_factor
    )
