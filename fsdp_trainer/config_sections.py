"""The sections of the settings file, one frozen pydantic model each, with every default and what it costs.

The names and defaults are the public contract; rules that look at more than one field stand in config_checks.py.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from fsdp_trainer.config_reading import NEEDS_REPLICAS
from fsdp_trainer.config_sources import HELD_OUT, RENAMED, SOURCES, SomeSources, SourceConfig, check_sources
from fsdp_trainer.config_types import (
    Betas,
    Section,
    Stage,
    Steps,
    Text,
    Texts,
    Tracker,
    tuple_from_list,
    zero_is_off,
)


class ModelConfig(Section):
    """Which model is trained and how it is made."""

    path: Text = Field(
        default="Qwen/Qwen2.5-7B",
        description="A Hugging Face causal LM: a local folder, a hub id, or a .gguf file, which is unpacked once into "
        "$FSDP_TRAINER_CACHE (default ~/.cache/fsdp_trainer). A folder that was exported here (it has checksums.json) "
        "is verified first, which reads the weights once more, shared by the ranks of a machine. The default is a "
        "common size for one to eight 80 GB GPUs.",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of the hub repository; null takes its main branch. Pin a commit where a run "
        "must be repeatable: a branch can move between two starts.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Folder or hub id of another tokenizer; null takes the one beside the model, which fits it.",
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="pretrained loads the weights; random keeps the architecture and draws new weights, for tests and "
        "for training from scratch.",
    )
    freeze: Texts = Field(
        default=(),
        description="Parameters that do not train: shell patterns (* ? [...]) for whole parameter names, or for "
        "modules and so for all in them, such as model.embed_tokens or model.layers.[0-3]. A frozen parameter saves "
        "its gradient and its optimizer state (12 of 16 bytes with AdamW in bf16). A head tied to a frozen embedding "
        "is frozen with it. A pattern that matches nothing is an error.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model repository. Off by default because that code can do "
        "anything your user can. From the hub it is run only at a model.revision that is a commit; its digest is "
        "kept in the checkpoints and compared on resuming, and the exported folder has a copy of it.",
    )
    attention: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="Attention kernel. auto takes the fastest one here that keeps packed documents apart; eager is the "
        "slow plain form, for comparing numbers: it holds seq_len x seq_len scores per head.",
    )


class DataConfig(Section):
    """What is trained on, and how records become rows of tokens."""

    train: Annotated[Text | SourceConfig | SomeSources, BeforeValidator(check_sources), SOURCES] = Field(
        default="data/train.jsonl",
        description="Training data: a file (JSONL, a JSON array, Parquet, CSV, TSV, Arrow, or plain text, which is one "
        "record a file; each also as .gz or .zst), a folder of them (of one split), a folder that datasets saved, a "
        "hub id ({path, subset, split} where it has several), or a list of these. A list of {path, weight} mixes its "
        "sources by rows: an epoch has as many rows as all sources together, of which each source gives its weight's "
        "share, from its own shuffled rows in turn (some twice where it is short, some only in a later epoch where it "
        "is long).",
    )
    eval: Annotated[
        Text | SourceConfig | SomeSources | Annotated[float, Field(gt=0, lt=1)] | None,
        BeforeValidator(check_sources),
        HELD_OUT,
    ] = Field(
        default=None,
        description="Held-out data in the same forms (without weights: each row counts once), or a share between 0 and "
        "1 of the training data (such as 0.02), which then does not train. A share is taken by record, from the "
        "content and train.seed alone, so that packing does not change it and equal records fall on one side. null: no "
        "evaluation.",
    )
    format: Literal["auto", "messages", "prompt_completion", "text", "alpaca", "sharegpt"] = Field(
        default="auto",
        description="Shape of a record. auto decides by the keys of a file's first good record; name it where a record "
        "fits two shapes, which is refused otherwise. messages also takes content parts of text, tool calls and "
        "reasoning, or all of it as JSON text, as in a CSV file; alpaca becomes a question and an answer of a chat. "
        "docs/data.md lists every key.",
    )
    columns: Annotated[dict[str, Text], RENAMED] = Field(
        default={},
        description="Renames what the files call differently: expected name to the files' name, such as "
        "{prompt: question, completion: answer}.",
    )
    chat_template: str | None = Field(
        default=None,
        description="A Jinja chat template's file, which has 10 s and 1 GiB a conversation; null: the tokenizer's own.",
    )
    train_on: Literal["assistant", "last_assistant", "all"] = Field(
        default="assistant",
        description="Which tokens are targets: every assistant turn (or completion), the last one, or all that the "
        "template writes. assistant is the default because a model that trains on questions also learns to ask them.",
    )
    seq_len: Annotated[int, Field(ge=2)] = Field(
        default=4096,
        description="Tokens in a row. Activation memory grows with seq_len x micro_batch_size; attention time with the "
        "square of a document's length. At least 2: a row needs a token and the one to predict.",
    )
    packing: bool = Field(
        default=True,
        description="Put several records in one row of seq_len, with attention kept inside each record. Saves the time "
        "that padding would cost; a step then holds more records than rows.",
    )
    on_too_long: Literal["truncate", "split", "drop", "error"] = Field(
        default="truncate",
        description="A record longer than seq_len: truncate its end, split it into several documents, drop it, or "
        "stop. Counted in the log. truncate keeps every record but can cut an answer short. split keeps every token: "
        "each piece starts as a document of its own (with the tokenizer's start token, where it has one), sees nothing "
        "of the others, and its first token is no target; a piece without any target is left out. Good for long texts; "
        "of a conversation the later pieces lose the question.",
    )
    sanitize_control_tokens: bool = Field(
        default=True,
        description="Encode the text of special tokens (<|im_end|> and the like) as plain text where a message other "
        "than the assistant's holds it, so that nobody ends a turn by typing its marker; such records are counted. "
        "Answers, and data without a chat template, keep them as tokens. false makes tokens of them everywhere, as "
        "servers do that do not guard against it.",
    )
    on_bad_record: Literal["error", "skip"] = Field(
        default="error",
        description="A record that cannot be read: stop and name its line, or skip and count it. error is the default "
        "because a silently thinner data set is found late.",
    )
    max_record_mib: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=64,
        description="MiB of one line of JSON or one cell of CSV, unpacked; a longer one, as of a small .gz that holds "
        "gigabytes, stops the run before it is held in memory. 64 MiB are about 16 million tokens.",
    )
    shuffle: bool = Field(
        default=True,
        description="Draw a new order of rows each epoch, from train.seed and the epoch alone, so that it does not "
        "depend on the number of GPUs. false keeps the file's order. Streaming shuffles within shuffle_buffer, and the "
        "files among each other.",
    )
    streaming: bool = Field(
        default=False,
        description="Read and tokenise the training data while training instead of before it, for data larger than "
        "disk or memory: nothing is cached. Needs train.max_steps. Every process reads the whole stream and takes its "
        "rows of each step, so a step sees the same rows on any number of GPUs, and a resume goes on at the next row. "
        "A start and a resume tokenise one buffer before the first step. A resume knows the files by their bytes: up "
        "to 8 GiB are read whole for that, of more than that 1 GiB spread over them, so that a change of equal size in "
        "the rest is not noticed. A bad record stops the run when it is met: on_bad_record: skip suits a long stream.",
    )
    shuffle_buffer: Annotated[int, Field(ge=1)] = Field(
        default=10_000,
        description="Records that streaming shuffles and packs together; costs about 5 bytes of host memory a token in "
        "each process, three times over. Larger shuffles better and makes a resume read more again.",
    )
    workers: Annotated[int, Field(ge=0)] = Field(
        default=2,
        description="Processes that tokenise the data before training, used from 5000 records on; each costs host "
        "memory and a CPU core. Threads of the training process do the work of up to 2 as fast, where the tokenizer is "
        "one of the usual (Rust) ones. 0 never starts any. With streaming each rank has so many of its own.",
    )
    cache_dir: Text | None = Field(
        default=None,
        description="Folder for the prepared rows, reused when data, tokenizer and settings are the same, built anew "
        "when a byte is damaged; null puts it under the user's cache folder. Costs about 5 bytes of disk a token.",
    )


class ShardingConfig(Section):
    """How weights, gradients and optimizer state are spread over the ranks."""

    zero_stage: Stage = Field(
        default=3,
        description="What is sharded while a step runs: 0 nothing (NO_SHARD), 1 optimizer state (SHARD_OPT), 2 also "
        "gradients (SHARD_GRAD_OP), 3 also weights (FULL_SHARD; HYBRID_SHARD with replicate). Each stage saves memory "
        "and costs communication: stage 3 gathers the weights twice a micro-batch. 3 is the default because it fits "
        "the largest model.",
    )
    replicate: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="Number of copies the ranks hold between them (HYBRID_SHARD): weights are sharded over "
        "world / replicate ranks. Keeps all-gathers inside a node; costs replicate times the memory of 1. Needs "
        "stage 3.",
    )
    reshard_after_forward: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Keep weights after the forward pass in groups of this many ranks, so that the backward pass "
        "gathers within the group (ZeRO++ hpZ). Costs one bf16 copy of the weights per group. Needs stage 3 and must "
        "divide the number of ranks. null: as the stage says.",
    )
    offload: Literal["none", "optimizer", "params"] = Field(
        default="none",
        description="What lives in host memory. optimizer: gradients, which leave as they are reduced, optimizer state "
        "and masters; the GPU keeps the weights it computes in (2 bytes a parameter, fp32: 4), the host takes 16 bytes "
        "a parameter over all ranks and 12 more with checkpoint.async_save. params: the weights too (FSDP2's CPU "
        "offload); needs least on the GPU and moves every weight over PCIe for every pass.",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="Number format in which gradients are summed over ranks. null is fp32, which is exact to rounding; "
        "bf16 halves the traffic and loses about two digits of the gradient. With precision: bf16_pure gradients are "
        "also summed over micro-batches and kept in it: 2 bytes a parameter less.",
    )

    @model_validator(mode="before")
    @classmethod
    def _hybrid_needs_replicas(cls, data: Any) -> Any:
        """HYBRID_SHARD names a shape that needs a second number; after this the name is only "stage 3"."""
        if not isinstance(data, dict):
            return data
        name = data.get("zero_stage")
        if isinstance(name, str) and name.strip().upper() == "HYBRID_SHARD" and data.get("replicate", 1) == 1:
            raise PydanticCustomError(NEEDS_REPLICAS, "HYBRID_SHARD needs to know the number of copies")
        return data


class ActivationCheckpointingConfig(Section):
    """Which activations are computed again in the backward pass instead of kept."""

    mode: Literal["none", "full", "every_n_layers", "selective"] = Field(
        default="full",
        description="full keeps one tensor a decoder layer and runs its forward again in the backward pass: about 30 % "
        "more compute for most of the activation memory. every_n_layers does so for one layer in every_n; none keeps "
        "everything and is fastest where it fits. selective comes later.",
    )
    every_n: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="With every_n_layers: checkpoint layers 0, n, 2n, ... A larger n is faster and holds more.",
    )
    offload: bool = Field(
        default=False,
        description="Keep what checkpointing still saves (one tensor a layer) in pinned host memory. Comes later; only "
        "false is accepted now.",
    )


class LossConfig(Section):
    """How the loss is computed from the last hidden states."""

    kind: Literal["chunked", "plain"] = Field(
        default="chunked",
        description="chunked makes logits for a few supervised rows at a time and never holds tokens x vocabulary "
        "numbers; plain makes them all, to compare with other tools (12 bytes a logit at the peak: a 150k vocabulary "
        "costs 7 GiB at 4096 tokens).",
    )
    chunk_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Supervised tokens in a chunk; null picks a size. Larger is not faster beyond a few hundred, and "
        "costs chunk_tokens x vocabulary x 6 bytes in half precision.",
    )


class OptimConfig(Section):
    """The optimizer and its numbers."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = Field(
        default="adamw",
        description="adamw keeps 8 bytes of state a parameter in fp32. adamw_8bit (bitsandbytes) keeps 2.03 of every "
        "matrix of 4096 elements and more, in blocks of 256 of each rank's own shard, and 8 of embeddings, norms and "
        "biases; over other ranks it resumes with moments quantised anew. Its step is slow on CPU. paged_adamw_8bit "
        "is the same to the bit, and to a checkpoint, with codes in CUDA managed memory, which the driver moves to the "
        "host where the GPU runs full: on one GPU, or with whole copies at stage 0.",
    )
    lr: Annotated[float, Field(gt=0)] = Field(
        default=1e-5,
        description="Highest learning rate, reached after warm-up. 1e-5 is a careful value for full fine-tuning of a "
        "7B model; small models take 5e-5 and more.",
    )
    betas: Betas = Field(
        default=(0.9, 0.95),
        description="Decay rates of AdamW's two averages. 0.95 instead of 0.999 is what most LLM training uses: it "
        "follows a changing gradient scale and lowers the risk of loss spikes.",
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-8, description="Added to AdamW's denominator. Larger damps the steps of rarely updated weights."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Decoupled weight decay. 0 because a short fine-tuning should stay near the starting weights.",
    )
    no_decay: Texts = Field(
        default=("norm", "bias", "embedding"),
        description="Parameters that weight decay leaves alone: the kinds norm, bias and embedding. Only has an effect "
        "with weight_decay above 0.",
    )
    max_grad_norm: Annotated[Annotated[float, Field(ge=0)] | None, BeforeValidator(zero_is_off)] = Field(
        default=1.0,
        description="Scale gradients down so that their global norm over all ranks is at most this; null or 0 is off. "
        "1.0 keeps one odd batch from undoing many steps.",
    )
    implementation: Literal["fused", "foreach"] = Field(
        default="fused",
        description="torch's AdamW kernels. fused was 4.5 times faster than foreach on CPU and needs no temporaries; "
        "foreach is there to compare with. fp16 and on_nonfinite: skip need fused. Where weights or averages are not "
        "fp32 the step is this program's own.",
    )
    state_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Number format of AdamW's averages, whatever the precision. bf16 is 4 bytes a parameter less; its "
        "averages are rounded stochastically, as an average rounded to nearest stops following.",
    )
    offload_step: Literal["host", "device"] = Field(
        default="host",
        description="With sharding.offload: optimizer, where its step runs: on the host, or on the device, which host "
        "memory then streams through in pieces (two of 2**22 elements at a time, 0.1 GiB on the GPU). Take device "
        "where the host has few cores.",
    )


class ScheduleConfig(Section):
    """How the learning rate moves, once per optimizer step whatever the number of ranks."""

    name: Literal["constant", "linear", "cosine"] = Field(
        default="cosine",
        description="Shape after warm-up: constant, a straight line, or half a cosine down to min_lr_ratio.",
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.03,
        description="Share of all steps over which the learning rate rises from 0. AdamW's averages start noisy; "
        "a few per cent is enough.",
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="The same as a number of optimizer steps; null goes by warmup_ratio. Set one of the two.",
    )
    warmup_shape: Literal["linear", "log"] = Field(
        default="linear",
        description="Shape of the rise: a straight line, or log, DeepSpeed's default, which is most of the way up "
        "after a few steps. log needs convention: deepspeed.",
    )
    warmup_min_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Share of lr that the rise starts from; only of use with a warm-up."
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1,
        description="Share of lr at the last step of linear and cosine. 0.1 keeps the last steps learning; 0 ends at "
        "rest.",
    )
    total_steps: Steps | None = Field(
        default=None,
        description="Optimizer steps over which the schedule runs, where that is not the whole run: warmup_ratio and "
        "the fall go by it, and after it linear and cosine stay at min_lr_ratio.",
    )
    convention: Literal["native", "transformers", "deepspeed"] = Field(
        default="native",
        description="Which step has which rate. native: no step stands still, and the last one has the lowest rate. "
        "transformers: step 0 of a warm-up has rate 0, and the lowest would be that of the step after the last. "
        "deepspeed: as its WarmupLR, WarmupDecayLR and WarmupCosineLR, one step later, with at least 2 steps of "
        "warm-up. The others are for a run that was begun there; the import commands set them.",
    )


class BatchConfig(Section):
    """How many rows an optimizer step takes; gradient accumulation follows from these and the number of ranks."""

    global_batch_size: Annotated[int, Field(ge=1)] = Field(
        default=64,
        description="Rows in one optimizer step over all ranks (a row is seq_len packed tokens, or one record without "
        "packing). Must be micro_batch_size x accumulation x ranks, exactly.",
    )
    micro_batch_size: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="Rows one rank takes through the model at once. Activation memory grows with it; 1 fits most and "
        "is fast enough when rows are long.",
    )


class TrainConfig(Section):
    """How long to train and what to do when something goes wrong."""

    max_steps: Steps | None = Field(
        default=None,
        description="Optimizer steps; overrides epochs and repeats the data as needed. null goes by epochs.",
    )
    epochs: Steps = Field(
        default=1, description="Passes over the data. More than three usually memorise a chat data set."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=0, description="Fixes the order of rows, dropout and new weights. The same seed gives the same run."
    )
    on_nonfinite: Literal["error", "skip"] = Field(
        default="error",
        description="A loss or gradient that is NaN or infinite: stop, or skip that step (agreed by all ranks, "
        "counted, at most 3 in a row). error is the default because such a step mostly shows a bad record or high lr.",
    )
    timeout_minutes: Annotated[float, Field(gt=0, le=43_200)] = Field(
        default=30.0,
        description="Minutes after which a rank that shows no sign of life, or a collective that some rank never "
        "joined, ends the run; a lost rank is named. Lower finds a hang sooner; it must be longer than the slowest "
        "step. Saves and loads have limits of their own, by their size and the disk's speed.",
    )


class EvalConfig(Section):
    """When the held-out data of data.eval is measured."""

    every_steps: Steps | None = Field(
        default=None,
        description="Evaluate every so many optimizer steps; null only at the end. Each one takes a whole pass.",
    )
    at_end: bool = Field(default=True, description="Evaluate after the last step, where data.eval is set.")


class CheckpointConfig(Section):
    """What is saved to resume from."""

    enabled: bool = Field(
        default=True, description="false saves nothing, not even when stopped: to measure with, as `ladder` does."
    )
    every_steps: Steps = Field(
        default=500,
        description="Optimizer steps that a crash costs at most. A checkpoint is begun every so many steps; in the "
        "background, where the one being written does not count yet, every half of them. It is 12 bytes a parameter "
        "with AdamW.",
    )
    keep_latest: Annotated[int, Field(ge=1)] = Field(
        default=2, description="Complete checkpoints kept. Two, so that a damaged newest one does not end the run."
    )
    keep_best: bool = Field(
        default=False,
        description="Save after every evaluation with a loss lower than all before, and keep that checkpoint beside "
        "the latest. Needs data.eval.",
    )
    async_save: bool = Field(
        default=True,
        description="Write in the background: the state is copied to host memory beside the next forward and backward, "
        "and only the optimizer's step waits for that. Costs the copy (12 bytes a parameter over all ranks) in host "
        "memory; false writes before going on.",
    )
    resume: Text = Field(
        default="auto",
        description="auto goes on from the newest complete checkpoint in output_dir, if there is one; never starts "
        "anew; or the path of a checkpoint.",
    )
    resume_anyway: Texts = Field(
        default=(),
        description="Settings that may differ from the checkpoint's although a resume refuses that, such as "
        "[optim.lr]; docs/resuming.md lists them. On the command line also --resume-anyway=NAME,NAME.",
    )


class ExportConfig(Section):
    """The Hugging Face folder that a run leaves behind."""

    at_end: bool = Field(default=True, description="Write output_dir/model after the last step.")
    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        default="bf16",
        description="Number format of the exported weights. bf16 halves the size and rounds: small updates of a short "
        "run can be lost; fp32 keeps all of them.",
    )


class LogConfig(Section):
    """What is written and shown while training."""

    every_steps: Steps = Field(default=1, description="Optimizer steps between log lines and rows of metrics.jsonl.")
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(),
        description="Accelerate trackers to write to as well, such as [tensorboard], the one that is tested.",
    )
    samples: Annotated[int, Field(ge=0)] = Field(
        default=2,
        description="First rows shown decoded, with what is trained on marked. The cheapest way to find a wrong mask.",
    )
    trace_step: bool = Field(
        default=True, description="Trace step 2 of a process, which takes longer: memory.json then has kinds of memory."
    )
    report: bool = Field(default=True, description="Write report.html into the run folder at the end of a run.")


class CompileConfig(Section):
    """torch.compile of the decoder layers."""

    enabled: bool = Field(default=False, description="Compile the decoder layers; later: only false is accepted now.")


class ProfileConfig(Section):
    """A torch profiler trace of a few steps."""

    start: Steps | None = Field(
        default=None,
        description="First step to trace, from 1; null traces none. Each rank leaves a trace and rank 0 a summary in "
        "profile/ of the run folder. Traced steps are slower; what they compute is the same.",
    )
    steps: Steps = Field(default=3, description="Steps to trace from start.")
