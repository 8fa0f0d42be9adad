"""What `doctor` found, as a person reads it: one line a fact, and below what is broken how to mend it."""

from collections.abc import Mapping, Sequence

_MARKS = {"good": "ok  ", "note": "note", "broken": "FAIL"}


def format_findings(findings: Sequence[Mapping[str, str]]) -> str:
    """Return the lines; `findings` have the keys of `doctor --json`."""
    width = max((len(finding["name"]) for finding in findings), default=0)
    lines = []
    for finding in findings:
        text = "; ".join(part for part in (finding["found"], finding["means"]) if part)
        lines.append(f"{_MARKS[finding['level']]}  {finding['name']:<{width}}  {text}")
        if finding["fix"]:
            lines.append(f"{'':<{width + 8}}to fix: {finding['fix']}")
    broken = sum(finding["level"] == "broken" for finding in findings)
    lines.append(f"{broken} of {len(findings)} would break a run" if broken else "nothing here would break a run")
    return "\n".join(lines)
