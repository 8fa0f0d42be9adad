"""Train, export and load again on the ranks of a test: what a user does with the folder that is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import checkpoint_runs as runs
from tests.step_runs import parameters

TOKENS = [[7, 9, 11, 13, 40, 41, 42, 5]]


def export(run: Any, folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    from fsdp_trainer.export import export_model

    tokenizer = AutoTokenizer.from_pretrained(run.config.model.path)
    return export_model(folder, model=run.model, hf_config=run.hf_config, tokenizer=tokenizer, **options)


def train_and_export(settings: dict[str, Any], folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train two steps and export; return what was written and the logits of the trained model at the exported dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    run = runs.build(settings)
    runs.take_steps(run, 0, 2)
    exported = export(run, Path(folder), **options)
    weights = parameters(run)
    reference = AutoModelForCausalLM.from_pretrained(run.config.model.path, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Parameters alone: a rotary table cast along would be another model, and nobody loads it so.
            parameter.data = weights[name].to(exported.dtype)
        logits = reference(torch.tensor(TOKENS)).logits
    return {"files": exported.files, "dtype": exported.dtype, "logits": logits, "bytes": exported.total_bytes}


def load_plainly(folder: str, again: str) -> dict[str, Any]:
    """Load the folder as anybody would, and let Transformers save it once more to `again`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    with torch.no_grad():
        logits = model.eval()(torch.tensor(TOKENS)).logits
    model.save_pretrained(again)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "info": {key: list(value) for key, value in info.items() if value},
        "logits": logits,
        "dtype": model.dtype,
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "chat_template": tokenizer.chat_template,
        "ids": tokenizer("w1 w2")["input_ids"],
    }
