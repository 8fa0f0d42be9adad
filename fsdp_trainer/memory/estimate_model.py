"""The shape of a causal LM from its config.json alone: how many parameters where, and what a layer saves for backward.

Counts are exact for the families below and checked against Transformers' own models. What a layer saves follows
Transformers' modeling files (5.17 to 5.24) run eagerly under bf16 with torch's attention kernels. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.run_folder import parse_json

# Bytes saved per element by each kind of norm, besides its output: what autograd keeps in the modeling files.
# rms: the fp32 copy and the normalised copy in compute dtype. gemma, olmo2: both in fp32. layer: torch's own kernel
# keeps its input. cohere: centred, normalised and scaled in fp32.
NORM_SAVES = {"rms": (4, 1), "gemma": (8, 0), "olmo": (8, 0), "layer": (0, 1), "cohere": (12, 0)}  # (fp32, compute)
# Tensors of the MLP's width that an activation function keeps, its input included.
ACTIVATION_SAVES = {"relu": 1, "gelu_new": 4}


@dataclass(frozen=True)
class Family:
    """What Transformers' modeling file of one model type does; `tied`, `head_dim` stand where config.json is silent."""

    norm: Literal["rms", "gemma", "olmo", "layer", "cohere"] = "rms"
    norms: int = 2  # a layer
    normed_inputs: int = 2  # of them feed a linear, which keeps the output
    norm_bias: bool = False
    qkv_bias: bool | str = "attention_bias"  # True, False, or the key that says so
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    gated: bool = True
    qk_norm: Literal["none", "head", "all"] = "none"
    learned_positions: int | None = None  # extra rows of the table; None: no table
    tied: bool = False
    head_dim: int | None = None
    ffn: str = "intermediate_size"  # the key of the MLP's width; absent: four times the hidden size
    expert_ffn: str = "moe_intermediate_size"
    grouped: bool = True  # fewer key than query heads can be asked for
    activation: str = "silu"
    # Rotary positions are joined from parts (torch.cat), which moves heads to the front: the output is copied back.
    copies_output: bool = False
    fused_qkv: bool = False  # the values are a view of one projection, which keeps all of it beside the rotated copies
    shared_input: bool = False  # both norms have the same input, kept once
    # Which layers look no further back than `sliding_window` where config.json has no layer_types: all, those from
    # max_window_layers on where use_sliding_window says so, or all but every sliding_window_pattern-th.
    windows: Literal["none", "all", "asked", "pattern"] = "none"


_PLAIN = Family(qkv_bias=False, out_bias=False, mlp_bias=False)
_GPT = Family(norm="layer", norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True, gated=False, grouped=False)
_GEMMA = Family(norm="gemma", mlp_bias=False, tied=True, head_dim=256, activation="gelu_pytorch_tanh")
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": replace(_PLAIN, windows="all"),
    "mixtral": replace(_PLAIN, expert_ffn="intermediate_size", windows="all"),
    "qwen2": replace(_PLAIN, qkv_bias=True, windows="asked"),
    "qwen2_moe": replace(_PLAIN, qkv_bias="qkv_bias", windows="asked"),
    "qwen3": Family(mlp_bias=False, qk_norm="head", head_dim=128, windows="asked"),
    "qwen3_moe": Family(mlp_bias=False, qk_norm="head", windows="asked"),
    "phi3": replace(_PLAIN, copies_output=True, fused_qkv=True, windows="all"),
    "olmo2": Family(norm="olmo", normed_inputs=0, mlp_bias=False, qk_norm="all"),
    "smollm3": Family(tied=True),
    "granite": Family(),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, windows="pattern"),
    "gemma3_text": replace(_GEMMA, norms=4, qk_norm="head", windows="pattern"),
    "cohere": Family(norm="cohere", norms=1, normed_inputs=1, mlp_bias=False, tied=True),
    "starcoder2": replace(
        _GPT,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        tied=True,
        grouped=True,
        activation="gelu_pytorch_tanh",
        windows="all",
    ),
    "stablelm": replace(_PLAIN, norm="layer", norm_bias=True, qkv_bias="use_qkv_bias", copies_output=True),
    "gpt_neox": replace(
        _GPT,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        activation="gelu",
        copies_output=True,
        fused_qkv=True,
        shared_input=True,
    ),
    "gpt2": replace(_GPT, learned_positions=0, tied=True, ffn="n_inner", activation="gelu_new"),
    "opt": replace(_GPT, learned_positions=2, tied=True, ffn="ffn_dim", activation="relu"),
}
# Keys whose default is not False where config.json is silent.
_TRUE_BY_DEFAULT = {("gpt_neox", "attention_bias"), ("starcoder2", "use_bias"), ("qwen2_moe", "qkv_bias")}


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts part of a layer; `shared_ffn` is 0 without a shared expert."""

    count: int
    per_token: int
    ffn: int
    shared_ffn: int
    shared_gate: bool


@dataclass(frozen=True)
class ModelShape:
    """The numbers of one architecture that memory depends on. `dense_layers` of `layers` have no experts.

    `windowed_layers` of them look no further back than `window` tokens.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    activation: str
    position_rows: int
    softcapped: bool
    experts: Experts | None = None
    dense_layers: int = 0
    window: int | None = None
    windowed_layers: int = 0

    @property
    def rules(self) -> Family:
        """What the family's modeling file does."""
        return FAMILIES[self.family]

    @property
    def query_size(self) -> int:
        """Elements of one token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys (or values)."""
        return self.kv_heads * self.head_dim


# --- reading ---------------------------------------------------------------------------------------------------------

MOST_LAYERS = 10_000


def read_model_shape(source: str | Path | Mapping[str, Any], *, revision: str | None = None) -> ModelShape:
    """Read a config.json: a folder with one, the file itself, a hub id whose config is in the local cache, or a dict.

    `revision` is a hub id's branch, tag or commit, None for its main branch.
    Raises ConfigError for what cannot be read and for families whose parameters are not known here.
    """
    config = dict(source) if isinstance(source, Mapping) else _read_json(str(source), revision=revision)
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise ConfigError(
            "The closed form does not know this architecture.",
            values=f"model_type: {family}; known: {', '.join(sorted(FAMILIES))}",
            fix="ask `fsdp-trainer simulate` without --quick, which runs the model itself",
        )
    try:
        return _shape(config, family)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            "The model's config.json lacks what its memory depends on.",
            values=f"model_type: {family}; {type(error).__name__}: {error}",
            fix="give the config.json that belongs to the weights, or leave out --quick",
        ) from error


def _read_json(path: str, *, revision: str | None) -> dict[str, Any]:
    file = Path(path)
    if file.suffix == ".gguf" or (any(file.glob("*.gguf")) and not (file / "config.json").exists()):
        raise ConfigError(
            "The closed form reads a config.json, and a GGUF file has none.",
            values=f"model.path: {path}",
            fix="leave out --quick: the full simulator unpacks the file",
        )
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        file = _cached(path, revision=revision) or file
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "The model's config.json cannot be read.",
            values=f"model.path: {path} ({error})",
            fix="set model.path to a folder with a config.json, or to a hub id whose config is in the local cache",
        ) from error
    if not isinstance(config, dict):
        raise ConfigError("The model's config.json is no mapping.", values=str(file), fix="give the model's own file")
    return config


def _cached(repository: str, *, revision: str | None) -> Path | None:
    """Return the config.json of a hub repository at `revision` where the local cache has it; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache  # here: only for a hub id
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first name that is there and not null."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise KeyError(names[0])
    return default


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The size of the first name that is there and not null; ConfigError for what is no whole number above 0."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = _first(config, *names, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _impossible(f"{name}: {value!r}", "it is no whole number above 0")
    return value


def _impossible(values: str, why: str) -> ConfigError:
    return ConfigError(
        "The model's config.json describes no model.",
        values=f"{values}; {why}",
        fix="give the config.json that belongs to the weights",
    )


def _shape(config: Mapping[str, Any], family: str) -> ModelShape:
    rules = FAMILIES[family]

    def says(rule: bool | str) -> bool:
        return rule if isinstance(rule, bool) else bool(config.get(rule, (family, rule) in _TRUE_BY_DEFAULT))

    hidden = _size(config, "hidden_size", "n_embd")
    heads = _size(config, "num_attention_heads", "n_head")
    layers = _size(config, "num_hidden_layers", "n_layer")
    if layers > MOST_LAYERS:  # each is worked out on its own
        raise _impossible(f"num_hidden_layers: {layers:,}", f"no model has more than {MOST_LAYERS:,}")
    if _first(config, "head_dim", default=rules.head_dim or 0) == 0 and hidden % heads:
        raise _impossible(f"hidden_size: {hidden}, num_attention_heads: {heads}", "the heads do not divide the size")
    kv_heads = _size(config, "num_key_value_heads", default=heads) if rules.grouped else heads
    if heads % kv_heads:
        both = f"num_attention_heads: {heads}, num_key_value_heads: {kv_heads}"
        raise _impossible(both, "query heads share key heads evenly")
    position_rows = 0
    if rules.learned_positions is not None:
        position_rows = _size(config, "n_positions", "max_position_embeddings") + rules.learned_positions
    only_known = {"word_embed_proj_dim": hidden, "use_qk_norm": False, "qk_layernorm": False}
    only_known["use_parallel_residual"] = rules.shared_input
    for key, only in only_known.items():
        if config.get(key, only) != only:
            raise ValueError(f"{key}: {config[key]} is not known here")
    experts = _experts(config, rules)
    window = _window(config, rules)
    return ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", default=rules.head_dim or hidden // heads),
        ffn=_size(config, rules.ffn, default=4 * hidden),
        vocab=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", rules.tied)),
        qkv_bias=says(rules.qkv_bias),
        out_bias=says(rules.out_bias),
        mlp_bias=says(rules.mlp_bias),
        activation=str(
            _first(config, "hidden_activation", "hidden_act", "activation_function", default=rules.activation)
        ),
        position_rows=position_rows,
        softcapped=config.get("attn_logit_softcapping", 50.0 if family == "gemma2" else None) is not None,
        experts=experts,
        dense_layers=_dense_layers(config, layers) if experts else layers,
        window=window,
        windowed_layers=_windowed_layers(config, rules, layers) if window else 0,
    )


# Where config.json says nothing of the window (Transformers' configuration files); elsewhere silence means none.
_WINDOWS = {"qwen2": 4096, "qwen2_moe": 4096, "qwen3": 4096, "qwen3_moe": 4096, "gemma2": 4096, "gemma3_text": 4096}
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}


def _window(config: Mapping[str, Any], rules: Family) -> int | None:
    if rules.windows == "asked" and not config.get("use_sliding_window"):
        return None
    default = _WINDOWS.get(str(config.get("model_type"))) if rules.windows != "none" else None
    found = config.get("sliding_window", default)  # null means none
    return int(found) if found and rules.windows != "none" else None


def _windowed_layers(config: Mapping[str, Any], rules: Family, layers: int) -> int:
    if types := config.get("layer_types"):
        return sum(kind == "sliding_attention" for kind in types)
    if rules.windows == "asked":
        return max(0, layers - int(config.get("max_window_layers", 28)))
    if rules.windows == "pattern":
        pattern = int(config.get("sliding_window_pattern") or _PATTERNS[str(config["model_type"])])
        return layers - layers // pattern
    return layers


def _experts(config: Mapping[str, Any], rules: Family) -> Experts | None:
    count = next((name for name in ("num_local_experts", "num_experts") if config.get(name)), None)
    if count is None:
        return None
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    return Experts(
        count=_size(config, count),
        per_token=_size(config, "num_experts_per_tok"),
        ffn=_size(config, rules.expert_ffn),
        shared_ffn=shared,
        shared_gate=shared > 0,
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers without experts (Qwen): listed by name, or all but every n-th."""
    dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step", 1))
    return sum(1 for index in range(layers) if index in dense or (index + 1) % step)


# --- parameters ------------------------------------------------------------------------------------------------------


def count_layer_parameters(shape: ModelShape, *, dense: bool = False) -> int:
    """Return the parameters of one decoder layer; `dense` chooses the layer without experts where a model has both."""
    return _layer_matrices(shape, dense=dense) + _layer_vectors(shape, dense=dense)


def _layer_matrices(shape: ModelShape, *, dense: bool) -> int:
    h, experts, per_ffn = shape.hidden, shape.experts, (3 if shape.rules.gated else 2) * shape.hidden
    attention = h * (shape.query_size + 2 * shape.kv_size) + shape.query_size * h
    if experts is None or dense:
        return attention + per_ffn * shape.ffn
    routed = experts.count * 3 * h * experts.ffn + experts.count * h
    return attention + routed + 3 * h * experts.shared_ffn + h * experts.shared_gate


def _layer_vectors(shape: ModelShape, *, dense: bool) -> int:
    """Norms and biases."""
    h, rules = shape.hidden, shape.rules
    vectors = rules.norms * h * (1 + rules.norm_bias)
    vectors += (shape.query_size + 2 * shape.kv_size) * shape.qkv_bias + h * shape.out_bias
    if rules.qk_norm == "head":
        vectors += 2 * shape.head_dim
    elif rules.qk_norm == "all":
        vectors += shape.query_size + shape.kv_size
    if shape.experts is None or dense:
        vectors += ((1 if rules.gated else 0) * shape.ffn + shape.ffn + h) * shape.mlp_bias
    return vectors


def count_layers(shape: ModelShape) -> list[int]:
    """Return the parameters of every decoder layer, dense ones first (their order does not change a sum)."""
    sparse = shape.layers - shape.dense_layers
    dense = count_layer_parameters(shape, dense=True)
    return [dense] * shape.dense_layers + [count_layer_parameters(shape) for _ in range(sparse)]


def count_parameters(shape: ModelShape) -> int:
    """Return all parameters, a tied table once."""
    table = shape.vocab * shape.hidden
    return (
        sum(count_layers(shape)) + table * (1 if shape.tied else 2) + count_final_norm(shape) + count_positions(shape)
    )


def matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """Return (rows, columns) of every parameter that is a matrix or more; stacked experts count as rows of theirs."""
    h, rules = shape.hidden, shape.rules
    q, kv = shape.query_size, shape.kv_size
    attention = [(q + 2 * kv, h)] if rules.fused_qkv else [(q, h), (kv, h), (kv, h)]

    def mlp(ffn: int) -> list[tuple[int, int]]:
        inward = [(2 * ffn, h)] if shape.family == "phi3" else [(ffn, h)] * (2 if rules.gated else 1)
        return [*inward, (h, ffn)]

    found = [(shape.vocab, h)] * (1 if shape.tied else 2) + [(shape.position_rows, h)] * (shape.position_rows > 0)
    dense = [*attention, (h, q), *mlp(shape.ffn)]
    found += dense * (shape.layers if shape.experts is None else shape.dense_layers)
    if (experts := shape.experts) is not None:
        routed = [(experts.count, 2 * experts.ffn * h), (experts.count, h * experts.ffn), (experts.count, h)]
        shared = mlp(experts.shared_ffn) if experts.shared_ffn else []
        found += [*attention, (h, q), *routed, *shared] * (shape.layers - shape.dense_layers)
    return found


def count_matrices(shape: ModelShape) -> int:
    """Return the parameters in matrices: all but embeddings (a tied head is one), norms and biases."""
    sparse, head = shape.layers - shape.dense_layers, 0 if shape.tied else shape.vocab * shape.hidden
    layers = _layer_matrices(shape, dense=True) * shape.dense_layers + _layer_matrices(shape, dense=False) * sparse
    return layers + head


def count_final_norm(shape: ModelShape) -> int:
    """Return the parameters of the norm before the head."""
    return shape.hidden * (1 + shape.rules.norm_bias)


def count_positions(shape: ModelShape) -> int:
    """Return the parameters of a table of learned positions, 0 without one."""
    return shape.position_rows * shape.hidden


# --- activations -----------------------------------------------------------------------------------------------------


Attention = Literal["flash", "efficient", "scores"]


def layer_activation_bytes(
    shape: ModelShape, *, seq_len: int, compute_bytes: int = 2, dense: bool = False, attention: Attention = "flash"
) -> int:
    """Return the bytes one decoder layer saves per token for its backward, nothing recomputed."""
    b, rules = compute_bytes, shape.rules
    norms = rules.norms * _norm_bytes(shape, shape.hidden, b)
    # A linear keeps its input: a norm's output, or the residual stream where norms stand after the blocks.
    inputs = b * shape.hidden * (rules.normed_inputs or 2)
    norms -= b * shape.hidden * rules.shared_input
    kept = norms + inputs + _attention_bytes(shape, seq_len=seq_len, compute_bytes=b, attention=attention)
    if rules.qk_norm != "none":
        kept += _norm_bytes(shape, shape.query_size + shape.kv_size, b)
    if shape.experts is None or dense:
        return kept + _mlp_bytes(shape, shape.ffn, b)
    experts = shape.experts
    # The token's copy for each of its experts, their MLPs, and their outputs, which the router's weights multiply.
    routed = experts.per_token * (2 * b * shape.hidden + _mlp_bytes(shape, experts.ffn, b))
    return kept + routed + 4 * experts.count + 4 * b * experts.shared_ffn


def _attention_bytes(shape: ModelShape, *, seq_len: int, compute_bytes: int, attention: Attention) -> int:
    """Return what attention keeps per token.

    flash: queries, keys, values, output, one fp32 number a head. efficient: the same with keys and values repeated for
    every query head. scores (eager attention, torch's math form): the fp32 softmax of every score, its cast, and what a
    soft-cap keeps. Masks are counted in estimate_step.py.
    """
    b, queries = compute_bytes, shape.query_size
    extra = b * ((queries + shape.kv_size) * shape.rules.fused_qkv + queries * shape.rules.copies_output)
    if attention == "flash" and not shape.softcapped:
        return extra + 2 * b * (queries + shape.kv_size) + 4 * shape.heads
    if attention == "efficient" and not shape.softcapped:
        return extra + 4 * b * queries + 4 * shape.heads
    capped, cast = (b if shape.softcapped else 0), (b if b < 4 else 0)
    return extra + 4 * b * queries + shape.heads * seq_len * (4 + cast + capped)


def _norm_bytes(shape: ModelShape, width: int, compute_bytes: int) -> int:
    in_fp32, in_compute = NORM_SAVES[shape.rules.norm]
    return width * (in_fp32 + in_compute * compute_bytes)


def _mlp_bytes(shape: ModelShape, ffn: int, compute_bytes: int) -> int:
    kept = ACTIVATION_SAVES.get(shape.activation, 1)
    if shape.rules.gated:  # gate, what the activation keeps besides, activated gate, up, product
        return compute_bytes * ffn * (kept + 3)
    return compute_bytes * ffn * (kept + (0 if shape.activation == "relu" else 1))
