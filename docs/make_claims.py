"""Writes docs/claims.md: common advice about fitting a full fine-tuning, beside what the closed form computes.

Run `python -m docs.make_claims` after a change to the closed form; a test compares the page with what this writes. The
claims themselves stand in docs/claims.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from docs.claim_cases import MICRO_BATCHES, SEQ_LEN, Claim, points
from docs.claims import find_claims
from fsdp_trainer.memory.quick import ALLOCATOR_MARGIN

PAGE = Path(__file__).with_name("claims.md")
CLOSE = f"{100 * (ALLOCATOR_MARGIN - 1):.0f} %"
INTRODUCTION = (
    "Pages about full fine-tuning on few GPUs repeat the same rules, and a run that was planned by them is often out "
    "of memory. Each rule stands here in our words beside what this trainer's closed form computes ([how it is "
    "made](memory.md)); the verdict follows from those numbers, and where others have published a measurement, it "
    "stands below.",
    "For your own model and cards ask `fsdp-trainer simulate --config run.yaml --gpus 2xRTX4090`: no GPU is needed.",
    "**right**: every case is as claimed. **wrong**: none is. **right only when**: the cases named.",
    "Written by `docs/make_claims.py`; no figure is typed by hand, and none of ours has been measured on a GPU. GB are "
    '1e9 bytes, as in most claims; GiB are 2**30, as torch counts. "7B" without a name is 7e9 parameters. A peak is '
    f"the most bytes alive on one GPU, for rows of {SEQ_LEN} tokens, one row a micro-batch, {MICRO_BATCHES} of them "
    'a step, AdamW with fp32 masters, full activation checkpointing and chunked loss unless said. "x of y GiB": the '
    "peak, and what the card leaves to torch; host memory is a machine's, with the copy that a save in the background "
    f'makes. The allocator needs up to {CLOSE} more than the peak: a case so near the limit is "too close" here, and '
    "only the full `simulate` decides it.",
)
SAYS = {True: "yes", False: "no", None: "too close"}


def format_page(claims: Mapping[str, Sequence[Claim]]) -> str:
    """Format the page: all verdicts in one table, then each claim with its cases."""
    every = [claim for found in claims.values() for claim in found]
    number_of = {id(claim): number for number, claim in enumerate(every, start=1)}
    rows = [
        f"| [{number}](#claim-{number}) | {claim.said} | {_verdict(claim)} |" for number, claim in enumerate(every, 1)
    ]
    parts = ["# Advice about memory, checked", *(_wrap(text) for text in INTRODUCTION)]
    parts.append("\n".join(["| | claim | verdict |", "|--:|---|---|", *rows]))
    for topic, found in claims.items():
        parts.append(f"## {topic}")
        parts += [part for claim in found for part in _format_claim(number_of[id(claim)], claim)]
    return "\n\n".join(parts) + "\n"


def _verdict(claim: Claim) -> str:
    return f"**{claim.verdict}**: {claim.conditions}" if claim.conditions else f"**{claim.verdict}**"


def _format_claim(number: int, claim: Claim) -> list[str]:
    verdict = claim.verdict.capitalize() + (" the cases marked yes" if claim.conditions else "")
    parts = [
        f'<a id="claim-{number}"></a>\n\n### {number}. {claim.said}',
        f"**{verdict}.** A case is as claimed: {claim.rule}.",
        _format_cases(claim),
        _wrap(claim.advice),
    ]
    if claim.measured:
        measured = "\n".join(f"- {_format_point(name)}" for name in claim.measured)
        parts.append(f"Measured by others ([points.csv](../benchmarks/points.csv)):\n\n{measured}")
    return parts


def _format_cases(claim: Claim) -> str:
    """Format a table with a column a model, or with one column where the cases name none."""
    models = list(dict.fromkeys(case.model for case in claim.cases))
    cells = {(case.what, case.model): f"{SAYS[case.holds]}: {case.number}" for case in claim.cases}
    rows = [
        f"| {what} | " + " | ".join(cells.get((what, model), "") for model in models) + " |"
        for what in dict.fromkeys(case.what for case in claim.cases)
    ]
    heads = [model or "as claimed?" for model in models]
    return "\n".join([f"| case | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|", *rows])


def _format_point(name: str) -> str:
    """Format a published row; what it does not state is left out."""
    row = points()[name]
    words = [row["model"].split("/")[-1], f"{row['gpus']} {row['gpu_type']}"]
    words.append(f"rows of {row['seq_len']}" if row["seq_len"].isdigit() else "length of rows not stated")
    words += [row["sharding"], row["precision"], row["optimizer"], f"checkpointing {row['act_ckpt']}"]
    if not row["offload"].startswith("none"):
        words.append(f"offloaded: {row['offload']}")
    kind = row["peak_kind"]
    found = {"fits": "fits", "OOM": "out of memory", "not stated": f"{row['peak_gib']} GiB"}.get(
        kind, f"{row['peak_gib']} GiB {kind}"
    )
    speed = f", {row['tokens_per_s_per_gpu']} tokens/s a GPU" if row["tokens_per_s_per_gpu"] else ""
    return f"{', '.join(words)}: {found}{speed} (`{name}`)"


def _wrap(text: str) -> str:
    return textwrap.fill(text, width=120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write the page beside this script."""
    PAGE.write_text(format_page(find_claims()), encoding="utf-8")


if __name__ == "__main__":
    main()
