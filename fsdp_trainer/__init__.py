"""Full-parameter fine-tuning of Hugging Face causal language models on PyTorch FSDP2 through Accelerate.

The public names load on first use, so that importing the package costs nothing and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_trainer.config import Config
    from fsdp_trainer.finetuning import finetune
    from fsdp_trainer.ladder_result import LadderResult
    from fsdp_trainer.ladder_run import ladder
    from fsdp_trainer.memory.ledger import Ledger
    from fsdp_trainer.memory.planning import plan
    from fsdp_trainer.memory.simulation_process import simulate
    from fsdp_trainer.train_result import TrainResult

__version__ = "0.1.0"
__all__ = [
    "Config",
    "LadderResult",
    "Ledger",
    "TrainResult",
    "__version__",
    "finetune",
    "ladder",
    "plan",
    "simulate",
]

_HOMES = {
    "Config": "fsdp_trainer.config",
    "LadderResult": "fsdp_trainer.ladder_result",
    "Ledger": "fsdp_trainer.memory.ledger",
    "TrainResult": "fsdp_trainer.train_result",
    "finetune": "fsdp_trainer.finetuning",
    "ladder": "fsdp_trainer.ladder_run",
    "plan": "fsdp_trainer.memory.planning",
    "simulate": "fsdp_trainer.memory.simulation_process",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
