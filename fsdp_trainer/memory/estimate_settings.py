"""What one optimizer step depends on besides the model, for the closed forms of memory and time."""

from dataclasses import dataclass

from fsdp_trainer.memory.estimate import RECIPES, Recipe
from fsdp_trainer.memory.estimate_model import Attention


@dataclass(frozen=True)
class StepSettings:
    """What a step's memory and time depend on besides the model; the words are those of the settings file.

    `attention` is the kernel of layers without a mask, `masked_attention` that of the `masked_layers`. Those take one
    of `masks` tables of `mask_rows` x seq_len x seq_len (a row each where documents are packed), see [Note: masks] in
    estimate_step.py.
    """

    ranks: int
    seq_len: int
    micro_batch_size: int = 1
    micro_batches: int = 1
    zero_stage: int = 3
    replicate: int = 1
    reshard_after_forward: int | None = None
    offload_params: bool = False
    offload_optimizer: bool = False  # gradients leave, and weights rest in the compute dtype
    recipe: Recipe = RECIPES["bf16"]
    state_when_built: bool = False  # torch's AdamW makes its state in the first step, ours before
    piece_bytes: int = 0  # an element of the piece that the optimizer widens for a moment
    compute_bytes: int = 2
    reduce_bytes: int = 4
    checkpointing: str = "full"
    every_n: int = 1
    loss: str = "chunked"
    chunk_tokens: int | None = None
    bytes_per_logit: float | None = None
    attention: Attention = "flash"
    masked_attention: Attention = "efficient"
    masked_layers: int = 0
    masks: int = 0
    mask_rows: int = 1
    documents: int = 1  # of a packed row, of equal length
    stepped: Recipe | None = None  # what the optimizer steps, where part of it is on the host
    steps_on_device: bool = True
    evaluates: bool = False
    exports: bool = True
    export_bytes: int = 2

    @property
    def whole_recipe(self) -> Recipe:
        """Bytes a parameter on host and device together."""
        return self.stepped or self.recipe

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.seq_len * self.micro_batch_size

    @property
    def shards(self) -> int:
        """Ranks that one copy of the weights is spread over."""
        return 1 if self.zero_stage == 0 else self.ranks // self.replicate

    @property
    def keeps_gathered(self) -> bool:
        """Whole weights stay from forward to backward."""
        return self.zero_stage < 3

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Gradients are sharded between micro-batches."""
        return self.zero_stage >= 2 or self.offload_params or self.offload_optimizer

    @property
    def is_alone(self) -> bool:
        """No unit gathers or reduces: the only rank, whose weights rest as they compute."""
        return self.offload_optimizer and self.ranks == 1

    @property
    def mask_bytes(self) -> int:
        """Bytes of one table that says who may look where, one a pair."""
        return self.mask_rows * self.seq_len**2

    def is_checkpointed(self, index: int) -> bool:
        """Whether a decoder layer is recomputed in the backward."""
        every_n = {"none": 0, "full": 1, "every_n_layers": self.every_n}[self.checkpointing]
        return every_n > 0 and index % every_n == 0
