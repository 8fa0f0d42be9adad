"""Turn a GGUF file into a Hugging Face folder, once, so that it is trained like any other model.

What its tensors are called and how they are laid out says Transformers' own table; they are read, unpacked and written
one at a time, so the host never holds more than one file of the result.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.caches import cache_folder
from fsdp_trainer.errors import CheckpointError, ConfigError
from fsdp_trainer.progress import log_line

SUFFIX = ".gguf"
MAX_FILE_BYTES = 10**9  # of the converted folder: what is held at once, besides one tensor


def local_model(path: str) -> str:
    """Return the folder to read for a `model.path` or `model.tokenizer`: itself, or what its GGUF file was made into.

    A path is a GGUF model when it is a `.gguf` file, or a folder with one of those and no config.json. ConfigError for
    a folder with several; CheckpointError for a file that cannot be converted.
    """
    gguf = _find_gguf(Path(path))
    if gguf is None:
        return path
    import xxhash

    # A file that was replaced is another model, whatever its name.
    stat = gguf.stat()
    key = xxhash.xxh3_64_hexdigest(f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    folder = cache_folder() / f"{gguf.stem}-{key}"
    convert_gguf(gguf, folder)
    return str(folder)


def _find_gguf(path: Path) -> Path | None:
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise ConfigError(
            "The model folder holds several GGUF files.",
            values=f"model.path: {path}: {', '.join(file.name for file in found[:5])}",
            fix="set model.path to one of them (a model in parts cannot be read: join it with llama.cpp's gguf-split)",
        )
    return found[0] if found else None


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` unless that exists; of several processes one does it, the others wait.

    Matrices are stored as the file has them (F32, F16), or in bf16 where it has them quantised.
    """
    if folder.exists():
        return
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if folder.exists():
            return
        log_line(f"converting {gguf.name} to {folder} (once)")
        # Saved under another name and renamed, so that a folder with the right name is always a whole one.
        part = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            from fsdp_trainer.patches import reading_gguf_once

            with reading_gguf_once():
                log_line(f"{gguf.name}: {_convert(gguf, part)}")
            part.rename(folder)
        except ImportError as error:
            raise ConfigError(
                "A GGUF file needs a package that is not installed.", values=str(error), fix="pip install gguf"
            ) from error
        # The readers take the file at its word, and the one of tokenizers raises Exception itself.
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else ""
            raise CheckpointError(
                "The GGUF file cannot be converted.",
                values=f"{gguf}: {type(error).__name__}: {said}",
                fix="use a complete copy of the file, or the model's own folder with safetensors",
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> str:
    """Write config, tokenizer and weights; return a line about them."""
    import torch
    import transformers

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = transformers.AutoConfig.from_pretrained(**place)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    if not tokenizer.eos_token:
        raise ValueError("its tokenizer has no end token")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    kind, dtype = _stored_kind(gguf)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    written = _write_weights(_tensors(gguf, model, config, dtype), folder)
    missing = sorted(name for name, _ in model.named_parameters() if name not in written)
    if missing:
        raise ValueError(f"it lacks {missing[:3]} ({len(missing)} tensors)")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"{kind} unpacked to {str(dtype).removeprefix('torch.')}"


def _stored_kind(gguf: Path) -> tuple[str, Any]:
    """Return the word for most of the file's bytes, such as Q4_1, and the dtype that they are unpacked to."""
    import torch
    from gguf import GGUFReader

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(str(gguf)).tensors:
        if "_exps" in tensor.name:
            raise ValueError("it is a mixture of experts, whose experts are not stored one by one")
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    if not sizes:
        raise ValueError("it holds no tensors")
    kind = max(sizes, key=lambda name: sizes[name])
    return kind, {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)


def _tensors(gguf: Path, model: Any, config: Any, dtype: Any) -> Iterator[tuple[str, Any]]:
    """Yield each tensor by its name in the model, as Transformers' `load_gguf_checkpoint` does with all at once."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import modeling_gguf_pytorch_utils as tables

    architecture = tables.read_field(reader := GGUFReader(str(gguf)), "general.architecture")[0]
    settings = tables.load_gguf_checkpoint(str(gguf))["config"]
    processor = tables.TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)(config=settings)
    names = tables.get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        aside: dict[str, Any] = {"tensors": {}}
        result = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=aside,
        )
        yield from ((name, whole.to(dtype)) for name, whole in aside["tensors"].items())
        if result.name in names:
            yield names[result.name], torch.tensor(result.weights, dtype=dtype)  # a copy: the file is mapped read-only


def _write_weights(tensors: Iterator[tuple[str, Any]], folder: Path) -> set[str]:
    """Write tensors as they come, a file whenever one is full; return their names."""
    import json

    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    held: dict[str, Any] = {}

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        (folder / file).touch()
        mode = (folder / file).stat().st_mode
        save_file(held, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)  # safetensors makes its files private; a shared cache serves other users too
        weight_map.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in tensors:
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > MAX_FILE_BYTES:
            write()
        held[name] = tensor
    write()
    index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")
    return set(weight_map)
