"""The trainer on one CUDA device: the same numbers as the plain loop on CPU, and memory and speed that are measured.

These run in the test process itself, one rank over NCCL, without the forkserver (a forked process has no CUDA).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.memory.ledger import Ledger
from tests import checkpoint_runs, models, reference, step_runs, training_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

STEPS = 10
RECIPE = reference.Recipe(warmup_steps=3, total_steps=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that gives the folder of a tiny model of a kind."""
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            made[kind] = models.save_model(kind, str(tmp_path_factory.mktemp(kind)))
        return made[kind]

    return get


def run_on_gpu(model: str, output: Path, **sections: Any) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """Train on the GPU; return the metrics, the weights and the documents of each step."""
    output.mkdir(exist_ok=True)
    records, _ = models.make_records(60, seed=3)
    file = models.write_jsonl(records, output / "train.jsonl")
    run = training_runs.settings(model, file, output, train={"max_steps": STEPS, "seed": 7}, **sections)
    got = training_runs.train(run)
    return got["metrics"], got["weights"], training_runs.documents_by_step(run, STEPS)


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied", "gemma2", "gpt2"])
@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"packing": True}},
        {"activation_checkpointing": {"mode": "full"}, "batch": {"global_batch_size": 16, "micro_batch_size": 2}},
        {"sharding": {"zero_stage": 3, "offload": "params"}},
        {"sharding": {"zero_stage": 0}, "loss": {"kind": "plain"}},
        {"sharding": {"offload": "optimizer"}, "batch": {"global_batch_size": 16, "micro_batch_size": 2}},
        {"sharding": {"offload": "optimizer"}, "optim": {"lr": 1e-3, "weight_decay": 0.1, "offload_step": "device"}},
    ],
    ids=[
        *("packed", "checkpointing-accumulation", "params-offload", "stage0-plain"),
        *("optimizer-offload", "optimizer-offload-device"),
    ],
)
def test_fp32_parity_on_gpu(kind: str, sections: dict[str, Any], folder: Callable[[str], str], tmp_path: Path) -> None:
    metrics, weights, plan = run_on_gpu(folder(kind), tmp_path, **sections)
    expected = reference.train(folder(kind), plan, RECIPE)
    assert [row["loss"] for row in metrics] == pytest.approx(expected.losses, rel=1e-5)
    errors = reference.movement_errors(weights, expected)
    assert max(errors.values()) < 1e-3, sorted(errors.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_gpu_stays_close(precision: str, folder: Callable[[str], str], tmp_path: Path) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    metrics, _, plan = run_on_gpu(folder("llama"), tmp_path, precision=precision)
    expected = reference.train(folder("llama"), plan, RECIPE)
    assert [row["loss"] for row in metrics] == pytest.approx(expected.losses, rel=1e-2)


@pytest.mark.parametrize("where", ["host", "device"])
def test_an_offloaded_optimizer_trains_as_one_on_the_gpu(
    where: str, folder: Callable[[str], str], tmp_path: Path
) -> None:
    """bf16 with masters, over two micro-batches; gradients are pinned, and leave less on the GPU."""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    batch = {"global_batch_size": 16, "micro_batch_size": 2}
    here, _, _ = run_on_gpu(folder("llama"), tmp_path / "here", precision="bf16", batch=batch)
    offload: dict[str, Any] = {"sharding": {"offload": "optimizer"}, "optim": {"offload_step": where}}
    away, _, _ = run_on_gpu(folder("llama"), tmp_path / "away", precision="bf16", batch=batch, **offload)
    assert [row["loss"] for row in away] == pytest.approx([row["loss"] for row in here], rel=1e-3)
    assert [row["grad_norm"] for row in away] == pytest.approx([row["grad_norm"] for row in here], rel=1e-2)


def paged_pair(name: str, model: str, folder: Path) -> tuple[Any, list[list[float]]]:
    """Take five steps with 8-bit moments, plain or paged; return the run and losses and norms."""
    from fsdp_trainer.step import train_step

    sections: dict[str, Any] = {"batch": {"global_batch_size": 8, "micro_batch_size": 4}}
    settings = training_runs.settings(model, "unused.jsonl", folder, optim={"name": name}, **sections)
    run = checkpoint_runs.build(settings)
    rows, found = checkpoint_runs.documents(), []
    for step in range(5):
        window = step_runs.window_of(run, rows[step:] + rows[:step])
        output = train_step(run, window, learning_rate=1e-3, optimizer_step=step)
        found.append([output.loss.item(), output.grad_norm.item()])
    return run, found


def test_paged_moments_are_the_same_to_the_bit(folder: Callable[[str], str], tmp_path: Path) -> None:
    """Losses, weights, codes and scales of five steps; a checkpoint of either is one of the other.

    Never run yet on a GPU: bitsandbytes' managed memory under tensors of torch's own is what it is to show.
    """
    from fsdp_trainer.checkpoint_folder import checkpoint_path

    paged, seen = paged_pair("paged_adamw_8bit", folder("llama"), tmp_path / "paged")
    plain, expected = paged_pair("adamw_8bit", folder("llama"), tmp_path / "plain")
    assert seen == expected
    wanted = checkpoint_runs.local_digests(plain)
    assert checkpoint_runs.differing(checkpoint_runs.local_digests(paged), wanted) == []
    assert any("managed memory" in fact for fact in paged.facts)
    checkpoint_runs.save(paged, 5).wait()
    fresh = checkpoint_runs.build(plain.config.to_dict() | {"output_dir": str(tmp_path / "fresh")})
    checkpoint_runs.load(fresh, checkpoint_path(tmp_path / "paged", 5))
    assert checkpoint_runs.differing(checkpoint_runs.local_digests(fresh), wanted) == []


def test_paged_codes_are_no_memory_of_the_allocators(folder: Callable[[str], str]) -> None:
    from fsdp_trainer.optim.eight_bit import load_kernels
    from fsdp_trainer.optim.paged import fetch, managed_zeros

    load_kernels()
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_allocated()
    codes = managed_zeros(3 * 2**20, device=device)
    assert codes.is_cuda and torch.cuda.memory_allocated() == before
    codes[1::2] = 200
    fetch([codes])
    assert codes.sum().item() == 200 * codes.numel() // 2


def test_host_memory_is_pinned_in_place() -> None:
    from fsdp_trainer.optim.transfers import can_pin, pin

    memory = torch.ones(3 * 2**20)
    assert can_pin() and pin([memory]) and memory.is_pinned()


def test_memory_is_measured(folder: Callable[[str], str], tmp_path: Path) -> None:
    metrics, _, _ = run_on_gpu(folder("llama"), tmp_path)
    last = metrics[-1]
    assert 0 < last["max_allocated_gib"] <= last["max_reserved_gib"]
    assert last["num_alloc_retries"] == 0
    ledger = Ledger.read(tmp_path)
    assert ledger is not None and ledger.source == "allocator" and ledger.traced_step is not None
    # Reading and setting back the peaks of phases takes nothing from the run's own.
    peak = ledger.peak.measured_gib
    assert peak is not None and peak >= max(row["max_allocated_gib"] for row in metrics if "loss" in row)
    measured = {row.phase: row.measured_gib.max for row in ledger.phases if row.measured_gib is not None}
    assert {"load", "forward", "backward", "clip", "step", "save"} <= set(measured)
    # The allocator counts blocks of 512 bytes, and what kernels take inside themselves: more than this tiny model.
    traced = sum(row.measured_gib.max for row in ledger.categories if row.measured_gib is not None)
    assert 0 < traced <= peak


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_varlen_kernel_attends_inside_documents(window: int | None, groups: int) -> None:
    """Output and gradients against the block mask in fp32, on documents of uneven length."""
    from fsdp_trainer import attention

    lengths = ((5, 1, 200, 50), (256,))
    source = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 4, 256, 64), (2, 4 // groups, 256, 64), (2, 4 // groups, 256, 64)]
    tensors = [torch.randn(shape, generator=source, device="cuda") for shape in shapes]
    weight = torch.randn(2, 256, 4, 64, generator=source, device="cuda")
    ids = torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in lengths], device="cuda")
    module = torch.nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]

    def attend(dtype: torch.dtype, documents: Any) -> list[torch.Tensor]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        assert attention.fits_varlen(inputs[0], inputs[2], documents, {}) == (dtype == torch.bfloat16)
        output, _ = attention.document_sdpa(
            module, *inputs, None, documents=documents, sliding_window=window, scaling=0.125, dropout=0.0
        )
        (output.float() * weight).sum().backward()
        return [output.detach().float(), *(tensor.grad.float() for tensor in inputs)]  # type: ignore[union-attr]

    if not attention._has_varlen() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no variable-length kernel here")
    expected = attend(torch.float32, attention.Documents(ids))
    got = attend(torch.bfloat16, attention.Documents(ids, lengths))
    for one, other in zip(got, expected, strict=True):
        error = torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other)
        assert error < 1e-2  # bf16 keeps 8 bits; a document that sees its neighbour is off by tens of percent
