"""Writes docs/resuming.md from the table of resume rules, so that the page cannot say something else.

Run `python docs/make_resuming.py` after a change to a rule; a test compares the page with what this writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fsdp_trainer.resume_rules import CODE, ROWS, RULES, VERSIONS, Rule

PAGE = Path(__file__).with_name("resuming.md")

INTRODUCTION = f"""\
# Going on with a run

Written by `docs/make_resuming.py` from the rules themselves: change them in `fsdp_trainer/resume_rules.py`, not here.

The same command on the same `output_dir` goes on from the newest complete checkpoint: on as many processes as before
bit by bit on CPU, on any other number with the same rows in the same steps and losses equal up to rounding (a model
with dropout draws other masks there). On GPUs the kernels of attention add gradients in an order that changes from run
to run (atomic additions): what is loaded is the same to the bit, and what follows up to rounding.

On a run that has **finished** the same command says `finished already: N steps, FOLDER` within a second and touches
nothing. Settings under "Goes on silently" may differ, but for `checkpoint.resume`. It goes to work where a data file is
newer than the run's end or a file of the exported model is missing: then the last checkpoint is exported again.

A start that is **refused**, or ends in any other way before it began, leaves `status.json` and `report.html` as the run
before left them; only one without memory is noted, where the run has not finished. A stop (Ctrl-C, SIGTERM), also one
while libraries are loaded, ends with exit code 75 and the command that goes on.

What the checkpoint was saved with is compared with the settings of the run that goes on, one by one. `{ROWS}` is the
digest of the prepared training rows (a changed data file changes it, a moved one does not), `{VERSIONS}` the releases
of torch, Transformers and Accelerate, `{CODE}` the digest of the Python code that came with the model, where
`model.trust_remote_code` lets it run.

A refused change is let through by name: `fsdp-trainer train --resume-anyway=optim.lr,data.rows`, or
`checkpoint.resume_anyway: [optim.lr, data.rows]` in the settings file; the log says so. What cannot fit (other
parameters, another optimizer state, a gradient scaler on one side only) is refused by the load all the same.
"""

TITLES = {
    "free": "## Goes on silently",
    "allowed": "## Goes on, with a line in the log that names both values",
    "refused": "## Refused, unless named",
}


def format_page(rules: Mapping[str, Rule]) -> str:
    """Format the whole page from the table."""
    parts = [INTRODUCTION]
    for verdict, title in TITLES.items():
        reasons: dict[str, list[str]] = {}
        for name, rule in rules.items():
            if rule.verdict == verdict:
                reasons.setdefault(rule.reason, []).append(f"`{name}`")
        rows = [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
        parts.append("\n".join([title, "", "| settings | because |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def main() -> None:
    """Write the page beside this script."""
    PAGE.write_text(format_page(RULES), encoding="utf-8")


if __name__ == "__main__":
    main()
