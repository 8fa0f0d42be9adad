"""Trains with the real DeepSpeed, run as a script by tests/distributed/test_deepspeed_parity.py: one process a rank.

    RANK=0 WORLD_SIZE=2 ... python deepspeed_peer.py JOB.json

It knows nothing of fsdp_trainer: DeepSpeed's engine, Transformers' model and the loss that this gives for `labels`.
DeepSpeed is found only here, in a folder that `./launch.sh test` makes (see PACKAGES): Transformers and Accelerate act
otherwise wherever it can be imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PACKAGES = Path(sys.prefix) / "deepspeed"


def train(model_path: str, steps: list[list[Any]], config: dict[str, Any]) -> dict[str, list[float]]:
    """Return the loss of each optimizer step, over both ranks and all micro-batches, and its learning rate."""
    import deepspeed  # type: ignore[import-not-found]  # in a folder of its own
    import torch
    from transformers import AutoModelForCausalLM

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    losses, rates = [], []
    for documents in steps:
        mine = documents[rank::world]
        assert len(mine) == micro * accumulation
        rates.append(engine.optimizer.param_groups[0]["lr"])
        total = torch.zeros(())
        for first in range(0, len(mine), micro):
            rows = mine[first : first + micro]
            tokens = torch.tensor([row["tokens"] for row in rows])
            labels = torch.where(torch.tensor([row["supervised"] for row in rows]), tokens, -100)
            loss = engine(input_ids=tokens, labels=labels).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / accumulation
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    engine.destroy()
    return {"losses": losses, "rates": rates}


def schedule(kind: str, params: dict[str, Any], *, lr: float, steps: int) -> list[float]:
    """Return the rates of optimizer steps 0 to steps - 1 that DeepSpeed's own schedule gives."""
    import torch
    from deepspeed.runtime import lr_schedules  # type: ignore[import-not-found]

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    own = getattr(lr_schedules, kind)(optimizer, **params)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        own.step()
    return rates


def main() -> None:
    """Do a job and write what came of it beside it, as result.json."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text(encoding="utf-8"))
    import deepspeed  # type: ignore[import-not-found]
    import torch

    torch.set_num_threads(1)
    # Without its own all-reduce over shared memory it uses gloo, and need not compile for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    trained = {name: train(job["model"], job["steps"], config) for name, config in job["configs"].items()}
    rates = [schedule(kind, params, lr=job["lr"], steps=job["rates"]) for kind, params in job["schedules"]]
    if os.environ["RANK"] == "0":
        result = {"version": deepspeed.__version__, "trained": trained, "rates": rates}
        path.with_name("result.json").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # its engines' threads end a leaving process with an abort


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGES))
    main()
