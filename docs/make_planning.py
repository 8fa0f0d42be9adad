"""Write the example of docs/planning.md: `python docs/make_planning.py`. A test compares it with what comes out."""

import json
import tempfile
from pathlib import Path

from fsdp_trainer.config import Config
from fsdp_trainer.memory.planning import plan, timeline_of
from fsdp_trainer.report.plan_text import format_plan

PAGE = Path(__file__).with_name("planning.md")
BEGIN, END = "<!-- example: made by docs/make_planning.py -->", "<!-- end of the example -->"
GPUS, HOST_RAM, TOP = "2xRTX4090", "128GiB", 3
# https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, what counts here
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
INTRODUCTION = (
    f"Llama-3.1-8B on {GPUS} with {HOST_RAM} of RAM, 64 rows of 4,096 tokens a step, 1,000 steps, by "
    f"`--quick --top {TOP}`, without the picture; predicted, not measured:"
)


def format_page(page: str) -> str:
    """Return the page with its example made anew."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{INTRODUCTION}\n\n```text\n{_example()}\n```\n{END}{after}"


def _example() -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        settings = {
            "model": {"path": folder},
            "data": {"seq_len": 4096},
            "batch": {"global_batch_size": 64},
            "train": {"max_steps": 1000},
        }
        found = plan(Config.from_dict(settings), GPUS, host_ram=HOST_RAM, quick=True)
        text = format_plan(found.to_json(), timeline_of(found), width=80, top=TOP).plain
    lines = [line.rstrip() for line in text.splitlines()]
    begin = lines.index("") + 1  # what was asked, and how long it took
    end = next(number for number, line in enumerate(lines) if line.startswith("torch can have"))
    return "\n".join(lines[begin : end + 1])


if __name__ == "__main__":
    PAGE.write_text(format_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
