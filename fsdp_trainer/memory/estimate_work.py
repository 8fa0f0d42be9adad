"""What the parts of a step ask of a GPU, in closed form: matrix products, attention, bytes that operations move.

Products are exact. Bytes follow Transformers' modeling files run eagerly, operation by operation as the traced run
counts them. No torch here.
"""

from fsdp_trainer.memory.estimate import ADAMW_8BIT_STATE, HEAD_ROWS, STEP_PIECE, Recipe
from fsdp_trainer.memory.estimate_model import (
    Attention,
    ModelShape,
    count_layer_parameters,
    count_matrices,
    count_parameters,
)
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.rates import Stretch

# Bytes an element that a norm reads and writes: (in fp32, tensors of the compute dtype), forward and backward.
NORM_MOVES = {
    "rms": ((28, 4), (84, 9)),
    "gemma": ((44, 2), (100, 6)),
    "olmo": ((44, 2), (100, 6)),
    "layer": ((0, 2), (0, 5)),
    "cohere": ((48, 2), (110, 6)),
}
# How many operations that is, forward and backward.
NORM_OPERATIONS = {"rms": (7, 16), "gemma": (9, 18), "olmo": (8, 18), "layer": (1, 2), "cohere": (10, 20)}
# Tensors of the compute dtype that rotary positions move for an element of queries and keys, and operations.
ROTARY_MOVES, ROTARY_OPERATIONS = (10, 13), (12, 16)
ROTARY_IN_FP32 = {"cohere": (22, 33)}
# The same for an element of the MLP's width: by whether it is gated, and for an activation made of many operations.
MLP_MOVES = {True: (5, 9), False: (2, 3)}
ACTIVATION_MOVES = {"gelu_new": (18, 28)}
# Bytes of a score, forward and backward: torch's math form, which works in fp32, and eager attention besides two of the
# compute dtype.
MATH_SCORES, EAGER_SCORES = (22, 14), (20, 24)
SOFTCAP = (15, 13)  # bytes of a score more
# Adding to the residual stream, and joining gradients that meet there.
RESIDUAL_MOVES = (6, 12)
LAYER_OPERATIONS = (14, 40)


def layer_forward(shape: ModelShape, settings: StepSettings, *, index: int) -> Stretch:
    """Return one decoder layer's forward over a micro-batch."""
    stretch = _layer_products(shape, settings, index=index, backward=False)
    stretch.moved = _layer_moved(shape, settings, index=index, backward=False)
    stretch.operations = LAYER_OPERATIONS[0] + shape.rules.norms * NORM_OPERATIONS[shape.rules.norm][0]
    stretch.operations += ROTARY_OPERATIONS[0]
    return stretch


def layer_backward(shape: ModelShape, settings: StepSettings, *, index: int) -> Stretch:
    """Return one decoder layer's backward, without a recomputed forward: two products for each of the forward."""
    stretch = _layer_products(shape, settings, index=index, backward=True)
    stretch.moved = _layer_moved(shape, settings, index=index, backward=True)
    stretch.operations = LAYER_OPERATIONS[1] + shape.rules.norms * NORM_OPERATIONS[shape.rules.norm][1]
    stretch.operations += ROTARY_OPERATIONS[1]
    return stretch


def layer_recomputed(shape: ModelShape, settings: StepSettings, *, index: int) -> Stretch:
    """Return what checkpointing runs again: the forward up to the last tensor that is needed (torch stops there).

    That is the last product's input, so that product and the sum with the residual stream are not.
    """
    stretch, b = layer_forward(shape, settings, index=index), settings.compute_bytes
    if index < shape.dense_layers:
        stretch.matrices[settings.tokens, shape.hidden, shape.ffn, b] -= 1
        stretch.moved -= 3 * b * settings.tokens * shape.hidden
        stretch.operations -= 2
    return stretch


def _layer_products(shape: ModelShape, settings: StepSettings, *, index: int, backward: bool) -> Stretch:
    stretch, size = Stretch(), settings.compute_bytes
    for columns, inner, rows in _linears(shape, settings, index=index):
        if backward:
            stretch.matrices[rows, inner, columns, size] += 1  # the input's gradient
            stretch.matrices[columns, inner, rows, size] += 1  # the weight's
        else:
            stretch.matrices[rows, columns, inner, size] += 1
    _add_attention(stretch, shape, settings, index=index, backward=backward)
    return stretch


def _linears(shape: ModelShape, settings: StepSettings, *, index: int) -> list[tuple[int, int, int]]:
    """Return (outputs, inputs, rows) of every product of a layer's forward with a weight."""
    h, q, kv, tokens = shape.hidden, shape.query_size, shape.kv_size, settings.tokens
    found = [(q + 2 * kv, h, tokens)] if shape.rules.fused_qkv else [(q, h, tokens), (kv, h, tokens), (kv, h, tokens)]
    found.append((h, q, tokens))
    experts = shape.experts if index >= shape.dense_layers else None
    widths = [shape.ffn] if experts is None else [experts.shared_ffn] * (experts.shared_ffn > 0)
    for width in widths:
        found += [(width, h, tokens)] * (2 if shape.rules.gated else 1) + [(h, width, tokens)]
    if experts is not None:
        found.append((experts.count, h, tokens))
        rows = tokens * experts.per_token // experts.count  # evenly spread
        found += [(2 * experts.ffn, h, rows), (h, experts.ffn, rows)] * experts.count
    return found


def _add_attention(stretch: Stretch, shape: ModelShape, settings: StepSettings, *, index: int, backward: bool) -> None:
    """Add queries times keys and scores times values: half of them where the kernel skips the future."""
    length = settings.seq_len // settings.documents
    kind = attention_of(settings, index)
    if kind == "scores" or shape.softcapped:
        rows, batch = settings.seq_len, settings.micro_batch_size * shape.heads
        size, head = 4 if _in_math(shape, settings) else settings.compute_bytes, shape.head_dim
        for _ in range(2 if backward else 1):
            stretch.matrices[rows, rows, head, size] += batch
            stretch.matrices[rows, head, rows, size] += batch
        return
    if kind == "efficient" and index < settings.masked_layers:
        length, skipped = settings.seq_len, 1.0  # a mask is read, nothing is skipped
    else:
        skipped = 0.5
    flops = 4.0 * settings.tokens * length * shape.query_size * skipped * (2.5 if backward else 1.0)
    stretch.attention[length, backward, settings.compute_bytes] += flops  # type: ignore[assignment]


def attention_of(settings: StepSettings, index: int) -> Attention:
    """Return the kernel of a layer."""
    return settings.masked_attention if index < settings.masked_layers else settings.attention


def _in_math(shape: ModelShape, settings: StepSettings) -> bool:
    """Whether scores come from torch's math form: where no kernel takes the layer, and it is not eager's own."""
    return settings.masked_attention != "scores" and not shape.softcapped


def _layer_moved(shape: ModelShape, settings: StepSettings, *, index: int, backward: bool) -> float:
    b, rules, side = settings.compute_bytes, shape.rules, int(backward)
    wide, narrow = NORM_MOVES[rules.norm][side]
    norm = wide + narrow * b
    widths = rules.norms * shape.hidden
    if rules.qk_norm != "none":
        widths += shape.query_size + shape.kv_size
    a_token = norm * widths + RESIDUAL_MOVES[side] * b * shape.hidden
    if rules.learned_positions is None:
        moves = ROTARY_IN_FP32.get(shape.family, ROTARY_MOVES)
        a_token += moves[side] * b * (shape.query_size + shape.kv_size)
    experts = shape.experts if index >= shape.dense_layers else None
    width = shape.ffn if experts is None else experts.per_token * experts.ffn + experts.shared_ffn
    moves = MLP_MOVES[rules.gated] if rules.gated else ACTIVATION_MOVES.get(shape.activation, MLP_MOVES[False])
    a_token += moves[side] * b * width
    if experts is not None:  # each token is copied to its experts, and their outputs are weighed and added
        a_token += (6 + 6 * backward) * b * experts.per_token * shape.hidden
    if attention_of(settings, index) == "scores" or shape.softcapped:
        in_math = _in_math(shape, settings)
        score = MATH_SCORES[side] if in_math else EAGER_SCORES[side] + 2 * b + SOFTCAP[side] * shape.softcapped
        a_token += shape.heads * settings.seq_len * score
    return a_token * settings.tokens


def loss_forward(shape: ModelShape, settings: StepSettings) -> Stretch:
    """Return the last norm, the head and the loss; a chunked loss makes all its gradients here (loss.py)."""
    stretch, b, tokens = Stretch(), settings.compute_bytes, settings.tokens
    h, vocab = shape.hidden, shape.vocab
    wide, narrow = NORM_MOVES[shape.rules.norm][0]
    stretch.moved = tokens * h * (wide + narrow * b)
    if settings.loss == "plain":
        stretch.matrices[tokens, vocab, h, b] += 1
        stretch.moved += tokens * vocab * (b + 4 + 8)
        stretch.operations = 12
        return stretch
    chunk = min(tokens, settings.chunk_tokens or max(256, 2**26 // vocab))
    chunks = tokens / chunk
    for key in ((chunk, vocab, h, b), (chunk, h, vocab, b), (vocab, h, chunk, b)):
        stretch.matrices[key] += chunks  # type: ignore[assignment]
    stretch.moved += tokens * vocab * (b + 40 + b) + 4 * b * tokens * h
    stretch.operations = 8 + 18 * chunks
    if chunks > 1:  # the head's gradient is summed in fp32
        stretch.moved += chunks * vocab * h * (b + 8)
        stretch.operations += chunks * (vocab // HEAD_ROWS) * 2
    return stretch


def loss_backward(shape: ModelShape, settings: StepSettings) -> Stretch:
    """Return the backward of the same."""
    stretch, b, tokens = Stretch(), settings.compute_bytes, settings.tokens
    h, vocab = shape.hidden, shape.vocab
    wide, narrow = NORM_MOVES[shape.rules.norm][1]
    stretch.moved = tokens * h * (wide + narrow * b)
    stretch.operations = 30
    if settings.loss == "plain":
        stretch.matrices[tokens, h, vocab, b] += 1
        stretch.matrices[vocab, h, tokens, b] += 1
        stretch.moved += tokens * vocab * (4 + 12 + 4 + b)
        return stretch
    # Both gradients are multiplied by the loss's own, and the head's cast.
    several = tokens > (settings.chunk_tokens or max(256, 2**26 // vocab))
    stretch.moved += 4 * b * tokens * h + vocab * h * ((8 + 4 + b) if several else 2 * b)
    return stretch


def embedding_forward(shape: ModelShape, settings: StepSettings) -> Stretch:
    """Return the look-up of a micro-batch's tokens, and the tables of rotary positions."""
    return Stretch(moved=2.0 * settings.compute_bytes * settings.tokens * shape.hidden, operations=12)


def embedding_backward(shape: ModelShape, settings: StepSettings) -> Stretch:
    """Return the scattering of gradients into a table that is zeroed first."""
    b = settings.compute_bytes
    moved = b * shape.vocab * shape.hidden + 3.0 * b * settings.tokens * shape.hidden
    if shape.tied:  # added to the head's
        moved += 3 * b * shape.vocab * shape.hidden
    return Stretch(moved=moved, operations=4)


def gather_copies(parameters: float, settings: StepSettings, *, shards: int) -> Stretch:
    """Return the cast of a unit's shard and, gathered, its copy to where the model computes with it."""
    rest, b = settings.recipe.weights, settings.compute_bytes
    cast = (rest + b) / shards if rest != b or shards > 1 else 0
    return Stretch(moved=parameters * (cast + 2 * b), operations=6)


def reduce_copies(parameters: float, settings: StepSettings, *, accumulates: bool) -> Stretch:
    """Return the copy of a unit's gradients into the reduction's buffer, and what becomes of the reduced shard."""
    b, wide, shards = settings.compute_bytes, settings.reduce_bytes, settings.shards
    moved = parameters * (b + wide) + parameters / shards * wide * (2 + 3 * accumulates)
    return Stretch(moved=moved, operations=8)


# Bytes an element that an update reads and writes: torch's fused kernel on fp32, its foreach kernels, and bitsandbytes'
# with the copies that let a step be skipped. Where bf16 is kept: widened, and rounded stochastically.
FUSED, FOREACH, IN_8BIT = 28.0, 76.0, 50.0
WIDENING, ROUNDING = 6.0, 68.0


def update_stretch(shape: ModelShape, settings: StepSettings) -> Stretch:
    """Return an optimizer's step over a rank's shards, wherever it runs; clipping is not in it."""
    recipe = settings.whole_recipe
    matrices = count_matrices(shape) / settings.shards
    rest = count_parameters(shape) / settings.shards - matrices
    of_rest = recipe.optimizer_state if recipe.vector_state is None else recipe.vector_state
    moved = matrices * _update_bytes(recipe, recipe.optimizer_state) + rest * _update_bytes(recipe, of_rest)
    in_8bit, narrow = recipe.optimizer_state == ADAMW_8BIT_STATE, _kept_in_bf16(recipe, of_rest)
    # Of each piece and each tensor, for whatever does not go to torch's kernel as it is.
    pieces = (matrices + rest) / STEP_PIECE + 9 * shape.layers
    return Stretch(moved=moved, operations=10 + 8 * pieces * (in_8bit + narrow))


def _update_bytes(recipe: Recipe, state: float) -> float:
    in_8bit, narrow = state == ADAMW_8BIT_STATE, _kept_in_bf16(recipe, state)
    moved = IN_8BIT if in_8bit else FOREACH if recipe.step else FUSED
    moved += narrow * (WIDENING + ROUNDING)
    return moved + (WIDENING if recipe.gradients < 4 and (narrow or in_8bit) else 0.0)


def _kept_in_bf16(recipe: Recipe, state: float) -> int:
    """How many of weight and two averages are rounded stochastically when they are written."""
    return (recipe.weights < 4) + 2 * (state == 4.0)


def count_units(shape: ModelShape) -> tuple[int, list[int], int]:
    """Return the parameters of the embedding's unit (0 where tied), of each layer's, and of the head's."""
    table = shape.vocab * shape.hidden
    layers = [count_layer_parameters(shape, dense=index < shape.dense_layers) for index in range(shape.layers)]
    return 0 if shape.tied else table, layers, table
