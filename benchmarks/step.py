"""Our optimizer step beside a plain Accelerate/FSDP2 loop on the same model, data and ranks.

    .venv/bin/python -m benchmarks.step [--rounds 8] [--precision bf16] [--write]

Both jobs live at once, each on two gloo ranks, and take turns step by step, so that whatever else the machine does
falls on both. Medians are compared; memory is the peak of live tensor bytes on rank 0 over one more, traced step.
"""

import argparse
import datetime
import gc
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN = 512
RESULTS = Path(__file__).with_name("RESULTS.md")


def make_documents(case: str, *, rows: int, seed: int) -> list[tuple[list[int], list[bool]]]:
    """Make token lists with supervision marks.

    packed: documents of 24 to 160 tokens, all supervised, that fill rows. chat: one conversation a row, 64 to 512
    tokens, the first half (the prompt) unsupervised.
    """
    rng = np.random.default_rng(seed)
    documents = []
    if case == "packed":
        for _ in range(rows):
            left = SEQ_LEN
            while left:
                length = min(left, int(rng.integers(24, 160)))
                length = left if left - length < 24 else length
                left -= length
                documents.append((rng.integers(0, 49152, length).tolist(), [False] + [True] * (length - 1)))
        return documents
    for _ in range(rows):
        length = int(rng.integers(64, SEQ_LEN + 1))
        prompt = length // 2
        documents.append((rng.integers(0, 49152, length).tolist(), [False] * prompt + [True] * (length - prompt)))
    return documents


CASES = {
    # name: rows a step over both ranks, micro-batch a rank
    "packed": {"global_batch_size": 2, "micro_batch_size": 1},
    "chat": {"global_batch_size": 8, "micro_batch_size": 2},
    "chat, stage 2": {"global_batch_size": 8, "micro_batch_size": 2},
}
# The plain loop accumulates without reducing, which holds whole gradients: more than our stage 2, which holds whole
# bf16 weights instead. So ours is shown at the default stage and at the fastest one that takes no more memory.
STAGES = {"packed": 3, "chat": 3, "chat, stage 2": 2}


def our_job(folder: str, case: str, precision: str, steps: int) -> Iterator[Any]:
    """Build our run, then take one step each time it is resumed; yields (seconds, loss)."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.data.loader import build_window
    from fsdp_trainer.data.packing import pack_documents
    from fsdp_trainer.data.rows import Rows
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime
    from fsdp_trainer.step import train_step

    sizes = CASES[case]
    config = Config.from_dict(
        {
            "model": {"path": folder},
            "data": {"train": "unused.jsonl", "seq_len": SEQ_LEN, "packing": case == "packed"},
            "precision": precision,
            "sharding": {"zero_stage": STAGES[case]},
            "activation_checkpointing": {"mode": "none"},
            "batch": sizes,
        }
    )
    runtime = build_runtime()
    documents = make_documents(case, rows=steps * sizes["global_batch_size"], seed=0)
    lengths = np.array([len(tokens) for tokens, _ in documents])
    row_of = pack_documents(lengths, seq_len=SEQ_LEN) if case == "packed" else np.arange(len(documents))
    order = np.argsort(row_of, kind="stable")
    rows = Rows(
        tokens=np.concatenate([np.array(documents[i][0], dtype=np.int32) for i in order]),
        supervised=np.concatenate([np.array(documents[i][1]) for i in order]),
        document_starts=np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64),
        row_documents=np.concatenate([[0], np.cumsum(np.bincount(row_of))]).astype(np.int64),
    )
    run = build_run(config, runtime)
    yield [*run.model.parameters(), *run.model.buffers()]
    for step in range(steps):
        started = time.perf_counter()
        window = build_window(
            rows,
            step=step,
            **sizes,
            rank=runtime.rank,
            world_size=runtime.world_size,
            seed=0,
            shuffle=True,
            seq_len=SEQ_LEN,
            packing=case == "packed",
        )
        loss = train_step(run, window, learning_rate=1e-5, optimizer_step=step).loss.item()
        yield time.perf_counter() - started, loss


def plain_job(folder: str, case: str, precision: str, steps: int) -> Iterator[Any]:
    """The loop of Accelerate's own guide: FSDP2 plugin, prepare, accumulate, backward, clip, step."""
    import torch
    from accelerate import Accelerator, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    from fsdp_trainer.patches import promote_cpu_ranks_to_fsdp

    sizes = CASES[case]
    PartialState(cpu=True)
    promote_cpu_ranks_to_fsdp()
    micro, world = sizes["micro_batch_size"], int(os.environ["WORLD_SIZE"])
    accumulation = sizes["global_batch_size"] // (micro * world)
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=accumulation,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_offload=False,
            state_dict_type="SHARDED_STATE_DICT",
            activation_checkpointing=False,
            cpu_ram_efficient_loading=False,
        ),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = _plain_batches(case, steps=steps, micro=micro, rank=accelerator.process_index, world=world)
    yield [*model.parameters(), *model.buffers()]
    for _ in range(steps):
        started = time.perf_counter()
        total = 0.0
        for _ in range(accumulation):
            batch = next(batches)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / accumulation
        yield time.perf_counter() - started, total


def _plain_batches(case: str, *, steps: int, micro: int, rank: int, world: int) -> Iterator[dict[str, Any]]:
    """Batches as a plain collator makes them: chat padded to the longest of the micro-batch, in the data's order."""
    import torch

    rows_needed = steps * CASES[case]["global_batch_size"]
    documents = make_documents(case, rows=rows_needed, seed=0)
    rows: list[list[tuple[list[int], list[bool]]]] = []
    for document in documents:
        full = not rows or case != "packed" or sum(len(t) for t, _ in rows[-1]) + len(document[0]) > SEQ_LEN
        rows.append([document]) if full else rows[-1].append(document)
    for start in range(rank * micro, rows_needed, micro * world):
        chosen = rows[start : start + micro]
        width = max(sum(len(tokens) for tokens, _ in row) for row in chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
        for index, row in enumerate(chosen):
            at = 0
            for tokens, supervised in row:
                span = slice(at, at + len(tokens))
                ids[index, span] = torch.tensor(tokens)
                labels[index, span] = torch.where(torch.tensor(supervised), torch.tensor(tokens), -100)
                mask[index, span], positions[index, span] = 1, torch.arange(len(tokens))
                at += len(tokens)
        extra = {"position_ids": positions} if case == "packed" else {"attention_mask": mask}
        yield {"input_ids": ids, "labels": labels, **extra}


JOBS = {"ours": our_job, "plain": plain_job}


def _rank(connection: Any, job: str, folder: str, case: str, precision: str, steps: int, rank: int, port: int) -> None:
    """One rank of one job: waits for its turn, takes a step, answers (seconds, loss, CPU seconds, peak live bytes)."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="true",
        ACCELERATE_USE_FSDP="true",
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    from benchmarks.live_bytes import LiveBytes

    torch.set_num_threads(1)
    work = JOBS[job](folder, case, precision, steps)
    tensors = next(work)
    connection.send("ready")
    while (turn := connection.recv()) != "end":
        before = time.process_time()
        if turn == "traced":
            gc.collect()
            live = LiveBytes()
            for tensor in [*tensors, *_optimizer_tensors()]:
                live.count(tensor)
            with live:
                seconds, loss = next(work)
            connection.send((seconds, loss, time.process_time() - before, live.peak))
        else:
            seconds, loss = next(work)
            connection.send((seconds, loss, time.process_time() - before, 0))


def _optimizer_tensors() -> list[Any]:
    """Return the state of every optimizer alive in this process: made before the trace began, and part of the peak."""
    import torch

    optimizers = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    unique = {id(value): value for value in states if isinstance(value, torch.Tensor)}
    return list(unique.values())


def compare(folder: str, case: str, *, precision: str, rounds: int) -> dict[str, dict[str, float]]:
    """Run both jobs in turns and return seconds (median), losses and peak bytes by job."""
    import multiprocessing
    import socket

    context = multiprocessing.get_context("spawn")
    ends: dict[str, list[Any]] = {}
    processes = []
    steps = rounds + 3
    for job in JOBS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ends[job] = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(theirs, job, folder, case, precision, steps, rank, port), daemon=True
            )
            process.start()
            processes.append(process)
            ends[job].append(ours)
        for end in ends[job]:
            end.recv()  # built before the next job starts, so that two loads do not compete

    def take(job: str, turn: str) -> tuple[float, float, float, int]:
        for end in ends[job]:
            end.send(turn)
        answers = [end.recv() for end in ends[job]]
        return max(answer[0] for answer in answers), answers[0][1], sum(answer[2] for answer in answers), answers[0][3]

    seconds: dict[str, list[float]] = {job: [] for job in JOBS}
    processor: dict[str, list[float]] = {job: [] for job in JOBS}
    losses: dict[str, list[float]] = {job: [] for job in JOBS}
    for index in range(rounds + 2):
        for job in JOBS if index % 2 == 0 else reversed(JOBS):
            taken, loss, busy, _ = take(job, "step")
            if index >= 2:  # optimizer state is made in the first step
                seconds[job].append(taken)
                processor[job].append(busy)
                losses[job].append(loss)
    peaks = {job: take(job, "traced")[3] for job in JOBS}
    for job in JOBS:
        for end in ends[job]:
            end.send("end")
    for process in processes:
        process.join(timeout=30)
        process.kill()
    return {
        job: {
            "seconds": statistics.median(seconds[job]),
            "processor": statistics.median(processor[job]),
            "loss": statistics.mean(losses[job]),
            "peak": peaks[job],
        }
        for job in JOBS
    }


def format_table(results: dict[str, dict[str, dict[str, float]]], *, precision: str, rounds: int) -> str:
    """Format the results as a Markdown section, ratios last."""
    import accelerate
    import torch
    import transformers

    lines = [
        f"### {datetime.date.today().isoformat()}, {precision}, {rounds} rounds",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}, "
        f"{os.cpu_count()} cores ({platform.machine()}), 2 gloo ranks, SmolLM2-135M, fp32 masters, rows of at most "
        f"{SEQ_LEN} tokens, no activation checkpointing.",
        "",
        "| case | step, ours | step, plain | speed ratio | CPU seconds ratio | peak live bytes, ours | plain "
        "| memory ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, by_job in results.items():
        ours, plain = by_job["ours"], by_job["plain"]
        speed, cpu = plain["seconds"] / ours["seconds"], plain["processor"] / ours["processor"]
        memory = ours["peak"] / plain["peak"]
        lines.append(
            f"| {case} | {ours['seconds']:.2f} s | {plain['seconds']:.2f} s | **{speed:.2f}x** | {cpu:.2f}x "
            f"| {ours['peak'] / 2**20:.0f} MiB | {plain['peak'] / 2**20:.0f} MiB | **{memory:.2f}x** |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare the cases and print, or append to RESULTS.md, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--write", action="store_true", help="append the table to RESULTS.md")
    options = parser.parse_args()
    from fsdp_trainer.demo import smollm2_folder

    folder = str(smollm2_folder())
    results = {
        case: compare(folder, case, precision=options.precision, rounds=options.rounds)
        for case in options.case or CASES
    }
    table = format_table(results, precision=options.precision, rounds=options.rounds)
    print(table)
    if options.write:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write("\n" + table)


if __name__ == "__main__":
    main()
