"""One optimizer step, layer by layer, in closed form: what is alive when, by phase and category.

[Note: order of a step] What FSDP2 gathers, keeps and reduces follows torch 2.11 to 2.15 (_fsdp_param_group.py,
_fsdp_collectives.py): in the forward a unit's gather buffer lives until the next unit is gathered; in the backward the
next unit is gathered ahead, and a reduction's input lives until the next reduction. One unit per decoder layer, one
for the embedding and one for norm and head, or one for all three where they are tied, as sharding.py makes them.
Peaks inside a layer are taken at three points of its backward. Bytes are per rank.

[Note: masks] attention.py makes a boolean table at the first layer that needs it, of comparisons that are tables
themselves, and keeps it to the end of the forward, or of the backward where a layer is recomputed. Without a kernel of
its own for documents or windows each layer's attention then turns it into numbers of the compute dtype (torch,
sdp_utils: convert_boolean_attn_mask), by way of its inverse, and saves those; eager attention saves none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_trainer.memory.estimate import STEP_PIECE, LossMemory, Recipe, estimate_loss
from fsdp_trainer.memory.estimate_model import (
    Attention,
    ModelShape,
    count_final_norm,
    count_layer_parameters,
    count_matrices,
    count_parameters,
    count_positions,
    layer_activation_bytes,
)
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.recording import CATEGORIES

Timeline = list[tuple[int, str, dict[str, int]]]


@dataclass
class _Ledger:
    """Adds up changes and notes what is alive after each."""

    alive: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    moments: Timeline = field(default_factory=list)

    def change(self, phase: str, **deltas: float) -> None:
        for category, delta in deltas.items():
            self.alive[category] += delta
        shown = {category: round(value) for category, value in self.alive.items()}
        assert min(shown.values()) >= -1, (phase, shown)
        self.moments.append((len(self.moments), phase, shown))

    def spike(self, phase: str, **deltas: float) -> None:
        """A change that is gone at once."""
        self.change(phase, **deltas)
        self.change(phase, **{category: -delta for category, delta in deltas.items()})


@dataclass
class _Peaks:
    """Adds up changes and notes only the most that is alive in each phase, several times as fast."""

    alive: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    peaks: dict[str, float] = field(default_factory=dict)
    total: float = 0.0

    def change(self, phase: str, **deltas: float) -> None:
        for category, delta in deltas.items():
            self.alive[category] += delta
            self.total += delta
        self.peaks[phase] = max(self.total, self.peaks.get(phase, 0.0))

    def spike(self, phase: str, **deltas: float) -> None:
        self.peaks[phase] = max(self.total + sum(deltas.values()), self.peaks.get(phase, 0.0))


@dataclass(frozen=True)
class _Unit:
    """One FSDP unit: its parameters, and whether its weights stay gathered from forward to backward."""

    parameters: int
    stays: bool


class _Step:
    """One step as a sequence of changes; see [Note: order of a step]."""

    def __init__(self, shape: ModelShape, settings: StepSettings, ledger: "_Ledger | _Peaks") -> None:
        self.shape, self.settings, self.ledger = shape, settings, ledger
        self._saved: dict[tuple[bool, bool], float] = {}
        self.gather_buffer = self.reduce_buffer = 0.0
        self.resident = 0.0 if settings.offload_params else 1.0
        self.state = state_bytes(shape, settings.recipe) / settings.shards * self.resident
        table, tied = shape.vocab * shape.hidden, shape.tied
        self.dense_first = shape.dense_layers
        self.layers = [
            _Unit(count_layer_parameters(shape, dense=index < shape.dense_layers), settings.keeps_gathered)
            for index in range(shape.layers)
        ]
        # The unit with the head is where forward ends and backward begins: never freed between.
        self.head = _Unit(table + count_final_norm(shape), True)
        self.embedding = None if tied else _Unit(table, settings.keeps_gathered)
        self.root = _Unit(count_positions(shape), True)
        self.hands_over_sum = settings.is_alone and not tied and settings.compute_bytes < settings.reduce_bytes
        # Alone, a layer's gradients leave one by one: two at most, of the largest kind.
        self.largest_matrices = 2 * shape.hidden * max(shape.ffn, shape.query_size)

    # Collectives

    def gather(self, phase: str, unit: _Unit, *, ahead: bool = False) -> None:
        """All-gather a unit: a buffer of its size, then the copy the model computes with.

        In the forward the buffer lives on until the next unit has been copied out; in the backward it is freed at once.
        `ahead`: the buffer was filled before.
        """
        if self.settings.is_alone:
            return
        size = unit.parameters * self.settings.compute_bytes
        before = self.gather_buffer
        if not ahead:
            self.gather_start(phase, unit)
        self.ledger.change(phase, unsharded_parameters=size)
        self.free_gather_buffer(phase, size if phase == "backward" else before)

    def gather_start(self, phase: str, unit: _Unit) -> None:
        settings = self.settings
        size = unit.parameters * settings.compute_bytes if settings.shards > 1 else 0.0
        self.ledger.change(phase, communication_buffers=size)
        self.gather_buffer += size

    def free_gather_buffer(self, phase: str, size: float) -> None:
        size = min(size, self.gather_buffer)
        self.ledger.change(phase, communication_buffers=-size)
        self.gather_buffer -= size

    def free(self, phase: str, unit: _Unit) -> None:
        if self.settings.is_alone:
            return
        self.ledger.change(phase, unsharded_parameters=-unit.parameters * self.settings.compute_bytes)

    def keep_part(self, phase: str, unit: _Unit, *, keep: bool = True) -> None:
        """Hold (or drop) the part of a unit that stays on this rank between forward and backward, in compute dtype."""
        group = self.settings.reshard_after_forward
        if group:
            part = unit.parameters * self.settings.compute_bytes / group
            self.ledger.change(phase, unsharded_parameters=part if keep else -part)

    def reduce(self, unit: _Unit, *, is_last: bool, accumulates: bool) -> None:
        """Reduce a unit's gradient, or keep it whole in the reduction's dtype between micro-batches."""
        settings, ledger = self.settings, self.ledger
        whole = unit.parameters * settings.compute_bytes
        if settings.is_alone:  # one tensor at a time, each gone when the next one comes
            ledger.change("backward", unsharded_gradients=-ledger.alive["unsharded_gradients"])
            return
        wide = unit.parameters * settings.reduce_bytes
        if not settings.reduces_every_micro_batch and not is_last:
            ledger.change("backward", unsharded_gradients=0.0 if accumulates else wide)
            ledger.change("backward", unsharded_gradients=-whole)
            return
        ledger.change("backward", communication_buffers=-self.reduce_buffer)
        kept_whole = wide if not settings.reduces_every_micro_batch and accumulates else 0.0
        self.reduce_buffer = wide
        ledger.change("backward", communication_buffers=wide)
        ledger.change("backward", unsharded_gradients=-whole - kept_whole)
        shard = unit.parameters * settings.recipe.gradients / settings.shards
        if settings.offload_optimizer:  # gone when the next unit's come
            ledger.change("backward", gradients=shard)
            ledger.change("backward", gradients=shard - ledger.alive["gradients"])
        elif (accumulates and settings.reduces_every_micro_batch) or settings.offload_params:
            ledger.spike("backward", temporaries=shard)
        else:
            ledger.change("backward", gradients=shard)

    # Phases

    def load(self) -> None:
        parameters = count_parameters(self.shape) / self.settings.shards * self.resident
        self.ledger.change("load", parameters=parameters * self.settings.recipe.weights)
        # A step like any but the first: the optimizer's state is there.
        self.ledger.change("load", optimizer_state=0.0)

    def micro_batch(self, *, index: int, is_last: bool) -> None:
        kept = self.forward(gathered=self.settings.keeps_gathered and index > 0)
        self.backward(kept, is_last=is_last, accumulates=index > 0)

    def forward(self, *, gathered: bool, outer_there: bool = False, phase: str = "forward") -> list[float]:
        """Run the forward and return what each layer keeps for the backward.

        `gathered`: every unit is whole from before; `outer_there`: those are that stay so in any stage (the head's).
        """
        settings, hidden = self.settings, self.settings.tokens * self.shape.hidden * self.settings.compute_bytes
        trains = phase == "forward"
        kept: list[float] = []
        if not gathered and not outer_there:
            self.gather(phase, self.root)
        if not gathered and (self.embedding is not None or not outer_there):
            self.gather(phase, self.embedding or self.head)
        self.ledger.change(phase, activations=hidden)
        if self.embedding is not None and not self.embedding.stays:
            self.free(phase, self.embedding)
            self.keep_part(phase, self.embedding)
        for number, unit in enumerate(self.layers):
            if not gathered:
                self.gather(phase, unit)
            if number == 0:
                self.make_masks(phase)
            saved = self.layer_bytes(number)
            keeps = trains and not settings.is_checkpointed(number)
            spike = max(self.forward_spike(saved, keeps=keeps), self.mask_spike(number))
            self.ledger.spike(phase, temporaries=spike)
            # A checkpointed layer keeps its input, which is there already; its output is the next one's.
            kept.append(saved if keeps else hidden if trains else 0.0)
            self.ledger.change(phase, activations=kept[-1])
            if not unit.stays:
                self.free(phase, unit)
                self.keep_part(phase, unit)
        if not (trains and self.keeps_masks):
            self.ledger.change(phase, temporaries=-settings.masks * settings.mask_bytes)
        if self.embedding is not None and not gathered and not outer_there:
            self.gather(phase, self.head)
        return kept

    # Masks, see [Note: masks]

    @property
    def keeps_masks(self) -> bool:
        """Whether a recomputed layer needs them in the backward."""
        return any(self.settings.is_checkpointed(number) for number in range(len(self.layers)))

    def make_masks(self, phase: str) -> None:
        settings = self.settings
        kept = "activations" if phase == "forward" and self.keeps_masks else "temporaries"
        for _ in range(settings.masks):
            self.ledger.spike(phase, temporaries=settings.seq_len**2 + 2 * settings.mask_bytes)
            self.ledger.change(phase, **{kept: settings.mask_bytes})

    def mask_numbers(self, index: int) -> float:
        """Bytes of a layer's mask as numbers."""
        settings = self.settings
        return settings.mask_bytes * settings.compute_bytes if index < settings.masked_layers else 0.0

    def mask_spike(self, index: int) -> float:
        """The mask as numbers, its inverse, and what attention reads, at the moment of a layer's attention."""
        settings, shape = self.settings, self.shape
        if index >= settings.masked_layers:
            return 0.0
        read = settings.tokens * settings.compute_bytes * (shape.hidden + 3 * shape.query_size)
        return self.mask_numbers(index) + settings.mask_bytes + read

    def loss_memory(self) -> LossMemory:
        settings, shape = self.settings, self.shape
        return estimate_loss(
            tokens=settings.tokens,
            vocab=shape.vocab,
            hidden=shape.hidden,
            kind=settings.loss,
            chunk_tokens=settings.chunk_tokens,
            compute_bytes=settings.compute_bytes,
            bytes_per_logit=settings.bytes_per_logit,
            hands_over_sum=self.hands_over_sum,
        )

    def layer_bytes(self, index: int) -> float:
        kind = index < self.dense_first, index < self.settings.masked_layers
        if kind not in self._saved:
            self._saved[kind] = self._layer_bytes(index)
        return self._saved[kind]

    def _layer_bytes(self, index: int) -> float:
        settings = self.settings
        per_token = layer_activation_bytes(
            self.shape,
            seq_len=settings.seq_len,
            compute_bytes=settings.compute_bytes,
            dense=index < self.dense_first,
            attention=self.attention(index),
        )
        return per_token * settings.tokens + (self.mask_numbers(index) if self.attention(index) == "efficient" else 0)

    def attention(self, index: int) -> Attention:
        """The kernel of a layer."""
        settings = self.settings
        return settings.masked_attention if index < settings.masked_layers else settings.attention

    def forward_spike(self, saved: float, *, keeps: bool) -> float:
        """What is alive in a layer for a moment: of the MLP where nothing is kept, else one fp32 norm."""
        shape, tokens = self.shape, self.settings.tokens
        norm = 12.0 * tokens * shape.hidden
        if keeps:
            return norm - 4.0 * tokens * shape.hidden
        width = shape.ffn if shape.experts is None else shape.experts.per_token * shape.experts.ffn
        mlp = tokens * self.settings.compute_bytes * (3 * width + 2 * shape.hidden)
        return min(saved, max(norm, mlp))

    def backward(self, kept: list[float], *, is_last: bool, accumulates: bool) -> None:
        settings, ledger = self.settings, self.ledger
        hidden = settings.tokens * self.shape.hidden * settings.compute_bytes
        loss, norm = self.loss_memory(), settings.tokens * self.shape.hidden * (4 + settings.compute_bytes)
        if settings.offload_optimizer:  # the last of the micro-batch before leave at the head
            ledger.change("forward", gradients=-ledger.alive["gradients"])
        ledger.change("forward", activations=norm + loss.kept)
        ledger.spike("forward", temporaries=loss.forward - loss.kept)
        self.free_gather_buffer("forward", self.gather_buffer)
        if not settings.keeps_gathered:  # the backward begins in the head's unit, which gathers the last layer ahead
            self.gather_start("backward", self.layers[-1])
        ledger.spike("backward", temporaries=loss.backward - loss.kept)
        ledger.change("backward", activations=-loss.kept)
        frees = is_last or not settings.keeps_gathered
        ledger.change("backward", temporaries=hidden, unsharded_gradients=self.head.parameters * settings.compute_bytes)
        if self.hands_over_sum:  # which is in fp32
            ledger.spike("backward", unsharded_gradients=self.head.parameters * settings.compute_bytes)
        ledger.spike("backward", temporaries=2 * norm)
        ledger.change("backward", activations=-norm)
        if self.embedding is not None:
            if frees:
                self.free("backward", self.head)
            self.reduce(self.head, is_last=is_last, accumulates=accumulates)
        gathered = settings.keeps_gathered
        for number in reversed(range(len(self.layers))):
            self.layer_backward(number, kept[number], gathered=gathered, frees=frees)
            self.reduce(self.layers[number], is_last=is_last, accumulates=accumulates)
        self.last_unit(gathered=gathered, frees=frees, is_last=is_last, accumulates=accumulates)
        masks = settings.masks * settings.mask_bytes if self.keeps_masks else 0
        ledger.change("backward", temporaries=-hidden, activations=-hidden - masks)

    def layer_backward(self, number: int, kept: float, *, gathered: bool, frees: bool) -> None:
        settings, ledger, unit = self.settings, self.ledger, self.layers[number]
        if not gathered:
            self.gather("backward", unit, ahead=True)
            ahead = self.layers[number - 1] if number else self.embedding
            if ahead is not None:
                self.gather_start("backward", ahead)
        saved = self.layer_bytes(number)
        if settings.is_checkpointed(number):
            if (spike := self.mask_spike(number)) > saved:
                ledger.spike("backward", activations=spike)
            ledger.change("backward", activations=saved)
        gradients = unit.parameters * settings.compute_bytes
        if settings.is_alone:
            gradients = min(gradients, self.largest_matrices * settings.compute_bytes)
        for share_left, share_done, temporaries in self.points(number, saved):
            ledger.spike(
                "backward",
                temporaries=temporaries,
                activations=-(1 - share_left) * saved,
                unsharded_gradients=share_done * gradients,
            )
        freed = saved + (kept if settings.is_checkpointed(number) else 0.0)
        ledger.change("backward", activations=-freed, unsharded_gradients=gradients)
        if frees:
            self.free("backward", unit)
            self.keep_part("backward", unit, keep=False)

    def points(self, number: int, saved: float) -> Iterator[tuple[float, float, float]]:
        """(share of activations left, share of gradients made, temporaries) at three points of a layer's backward.

        At the product of gate and up: the MLP's last gradient made, three of its widths alive. At the attention
        kernel: the MLP done; an fp32 sum for the queries' gradient beside the four gradients. At the end of the MLP's
        first norm: fp32 copies.
        """
        shape, tokens, b = self.shape, self.settings.tokens, self.settings.compute_bytes
        width = shape.ffn if shape.experts is None else shape.experts.per_token * shape.experts.ffn
        matrices = 3 if shape.rules.gated else 2
        mlp_share = _mlp_share(shape)
        after_mlp = 1 - min(1.0, b * tokens * 4 * width / saved)
        yield 1 - min(1.0, b * tokens * width / saved), mlp_share / matrices, b * tokens * 3 * width
        yield after_mlp, mlp_share, 12.0 * tokens * shape.hidden
        flash = tokens * (shape.query_size * (4 + 2 * b) + 2 * b * shape.query_size)
        if self.attention(number) == "scores" or shape.softcapped:  # the scores' gradient before and after the softmax
            flash += 8.0 * tokens * shape.heads * self.settings.seq_len
        before_norm = after_mlp - min(after_mlp, tokens * shape.hidden * (4 + 2 * b) / saved)
        yield before_norm, mlp_share, flash

    def last_unit(self, *, gathered: bool, frees: bool, is_last: bool, accumulates: bool) -> None:
        """The embedding's gradient is a whole table; tied, it is added to the head's, which waited for it."""
        compute = self.settings.compute_bytes
        unit = self.embedding or self.head
        if self.embedding is not None and not gathered:
            self.gather("backward", unit, ahead=True)
        table = self.shape.vocab * self.shape.hidden * compute
        if self.embedding is None:  # the embedding's gradient and the sum, which is not in place
            self.ledger.spike("backward", temporaries=2 * table)
        else:
            self.ledger.change("backward", unsharded_gradients=unit.parameters * compute)
        if frees:
            self.free("backward", unit)
        if frees and self.embedding is not None:
            self.keep_part("backward", unit, keep=False)
        self.reduce(unit, is_last=is_last, accumulates=accumulates)
        if self.root.parameters:
            self.ledger.change("backward", unsharded_gradients=self.root.parameters * compute)
        if frees:
            self.free("backward", self.root)
        if self.root.parameters:
            self.reduce(self.root, is_last=is_last, accumulates=accumulates)
        self.ledger.change("backward", communication_buffers=-self.reduce_buffer)
        self.reduce_buffer = 0.0

    def finish(self) -> None:
        settings, ledger = self.settings, self.ledger
        local = count_parameters(self.shape) / settings.shards * self.resident
        if settings.is_alone:  # the embedding's, the last to come
            last = self.shape.vocab * self.shape.hidden * settings.compute_bytes
            ledger.change("clip", gradients=last)
        ledger.change("clip")
        if settings.offload_optimizer:
            ledger.change("clip", gradients=-ledger.alive["gradients"])
        if not ledger.alive["optimizer_state"]:
            ledger.change("step", optimizer_state=self.state)
        # foreach goes through one parameter group at a time: what decays, and the rest, nearly all of it the embedding.
        table = self.shape.vocab * self.shape.hidden / settings.shards * self.resident
        ledger.spike("step", temporaries=max(table, local - table) * settings.recipe.step)
        piece = min(STEP_PIECE, self.shape.vocab * self.shape.hidden / settings.shards)
        ledger.spike("step", temporaries=piece * settings.piece_bytes)
        ledger.change("step", gradients=-ledger.alive["gradients"])

    def evaluate(self) -> None:
        """Two forwards that keep nothing, the loss without gradients; the second begins with what the first leaves."""
        shape, settings = self.shape, self.settings
        chunk = settings.tokens
        if settings.loss == "chunked":
            chunk = min(chunk, settings.chunk_tokens or max(256, 2**26 // shape.vocab))
        logits = chunk * shape.vocab * (4 + (settings.compute_bytes if settings.loss == "chunked" else 4))
        hidden = settings.tokens * shape.hidden * settings.compute_bytes
        for number in range(2):
            self.forward(gathered=settings.keeps_gathered and number > 0, outer_there=number > 0, phase="evaluate")
            self.ledger.spike("evaluate", temporaries=logits + hidden)
            self.ledger.change("evaluate", activations=-hidden)
            self.free_gather_buffer("evaluate", self.gather_buffer)  # the root's forward ends
        gathered = self.ledger.alive["unsharded_parameters"]
        self.ledger.change("evaluate", unsharded_parameters=-gathered)

    def save(self) -> None:
        """Checkpoints copy shards to the host; the export gathers one tensor at a time, the largest a table."""
        shape, settings = self.shape, self.settings
        largest = max(shape.vocab * shape.hidden, _expert_tensors(shape)) if settings.exports else 0
        size = largest * settings.export_bytes
        moves = settings.offload_optimizer or settings.export_bytes != settings.recipe.weights
        cast = size / settings.shards if moves and not settings.is_alone else 0  # its masters are written from the host
        self.ledger.spike("save", temporaries=cast + (size if settings.shards > 1 else 0))


def _mlp_share(shape: ModelShape) -> float:
    layer = count_layer_parameters(shape)
    attention = 2 * shape.hidden * (shape.query_size + shape.kv_size)
    return max(0.0, 1 - attention / layer)


def _expert_tensors(shape: ModelShape) -> int:
    """Both stacked matrices of a layer's experts: while the second is gathered the first is still there."""
    return 0 if shape.experts is None else shape.experts.count * 3 * shape.hidden * shape.experts.ffn


def estimate_step(shape: ModelShape, settings: StepSettings) -> Timeline:
    """Return (index, phase, bytes by category) over loading, the second of two steps, evaluation and saving.

    Of many micro-batches the first and the last are run: those between are like the last or smaller.
    """
    ledger = _Ledger()
    _run(_Step(shape, settings, ledger))
    return ledger.moments


def estimate_peaks(shape: ModelShape, settings: StepSettings) -> dict[str, int]:
    """Return `phase_peaks` of the same timeline, to the byte or two, where nothing else of it is wanted."""
    ledger = _Peaks()
    _run(_Step(shape, settings, ledger))
    return {phase: round(size) for phase, size in ledger.peaks.items()}


def _run(step: _Step) -> None:
    settings = step.settings
    step.load()
    made = "load" if settings.state_when_built else "forward"
    step.ledger.change(made, optimizer_state=step.state)
    count = min(settings.micro_batches, 2)
    for index in range(count):
        step.micro_batch(index=index, is_last=index == count - 1)
    step.finish()
    if settings.evaluates:
        step.evaluate()
    step.save()


def state_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Return the whole optimizer's state; embeddings, norms and biases may have another one than matrices."""
    matrices = count_matrices(shape)
    of_vectors = recipe.optimizer_state if recipe.vector_state is None else recipe.vector_state
    return matrices * recipe.optimizer_state + (count_parameters(shape) - matrices) * of_vectors


def phase_peaks(timeline: Timeline) -> dict[str, int]:
    """Return the most bytes alive in each phase of a timeline, in order."""
    peaks: dict[str, int] = {}
    for _, phase, alive in timeline:
        peaks[phase] = max(peaks.get(phase, 0), sum(alive.values()))
    return peaks


def find_peak(timeline: Timeline) -> tuple[int, str, dict[str, int]]:
    """Return the moment with the most bytes alive."""
    return max(timeline, key=lambda moment: sum(moment[2].values()))
