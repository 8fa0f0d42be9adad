"""Numbers over steps made small enough to draw: thinned without losing a spike, smoothed without running behind."""

import numpy as np

from fsdp_trainer.report.run_record import Curve

COLUMNS = 400  # of a chart: more points than two of each are not seen


def thin(curve: Curve, *, columns: int = COLUMNS) -> Curve:
    """Keep the lowest and the highest value of each of `columns` stretches of steps; a short curve is kept whole.

    A stretch without any number keeps one gap. Steps must rise.
    """
    steps, values = curve.steps, curve.values
    if len(steps) <= 4 * columns:
        return curve
    borders = np.linspace(steps[0], steps[-1], columns + 1)[1:-1]
    kept: list[int] = []
    for part in np.split(np.arange(len(steps)), np.searchsorted(steps, borders, side="right")):
        known = part[~np.isnan(values[part])]
        if len(known):
            kept += sorted({int(known[np.argmin(values[known])]), int(known[np.argmax(values[known])])})
        elif len(part):
            kept.append(int(part[0]))
    return Curve(steps[kept], values[kept])


def smooth(curve: Curve, *, rows: float) -> Curve:
    """Return the exponential moving mean over about `rows` values, right from the first one on; gaps stay gaps.

    The mean starts empty and is divided by the weight it has seen, as Adam's moments are (Kingma and Ba, 2015).
    """
    keep = 1.0 - 1.0 / max(rows, 1.0)
    total = weight = 0.0
    found = np.empty_like(curve.values)
    for place, value in enumerate(curve.values.tolist()):
        if value == value:
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            found[place] = total / weight
        else:
            found[place] = np.nan
    return Curve(curve.steps, found)


def smoothing_rows(count: int) -> int:
    """Return over how many logged steps a curve of `count` is smoothed: a thirtieth, but so few that it stays near."""
    return min(max(5, round(count / 30)), 500)


def needs_log(values: np.ndarray) -> bool:
    """Return whether a few values are so far above the rest that a linear axis would press these flat."""
    return bool(len(values)) and bool(values.min() > 0) and bool(values.max() > 20 * np.median(values))
