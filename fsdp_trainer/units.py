"""Numbers as a person reads them: bytes, counts and durations.

Only text comes out of here; arithmetic stays in plain bytes, tokens and seconds.
"""

import re

# What a terminal obeys: control characters but for line ends and tabs, and marks that turn the direction of writing.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return text of a file as a terminal may have it: what it would obey is written out, as in \\x1b[2J."""
    return _OBEYED.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def format_bytes(size: float) -> str:
    """Format bytes in binary units, as memory is sold: 1.5 GiB is 1.5 * 2**30 bytes.

    Everything that a person reads as a size of memory or of files goes through here; JSON has GiB under `_gib`.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < (1024 if unit == "B" else 1023.95):  # which would be written 1024.0
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_count(number: float) -> str:
    """Format a count: exact with separators below a million, then three digits with M, B or T."""
    if abs(number) < 1_000_000:
        return f"{number:,.0f}"
    for unit in ("M", "B"):
        number /= 1000 if unit == "B" else 1_000_000
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
    return f"{number / 1000:.3g}T"


def format_duration(seconds: float) -> str:
    """Format seconds: 0.42 s, 12.3 s, 4 min 05 s, 2 h 07 min."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def format_age(seconds: float) -> str:
    """Format how long ago something was: now, 42 s ago, 4 min 05 s ago, 2 h 07 min ago, 3 days ago."""
    if seconds < 1.5:
        return "now"
    if seconds < 59.5:
        return f"{seconds:.0f} s ago"
    return f"{format_duration(round(seconds))} ago" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days ago"


def format_number(number: int, noun: str) -> str:
    """Format a count with its noun: 1 rank, 2 ranks, 1,000 ranks."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
