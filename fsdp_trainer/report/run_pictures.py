"""The charts of a run's report as pictures of their own, to be put into a paper or a chat."""

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_trainer.report.charts import save_png
from fsdp_trainer.report.run_charts import build_charts
from fsdp_trainer.report.run_record import read_runs

PICTURES = "pictures"


def write_run_pictures(folders: Sequence[str | Path], out: Path) -> list[Path]:
    """Write one PNG a chart into the folder `out` and return them. ConfigError for no run folder, OutputError."""
    charts = build_charts(read_runs(folders))
    return [
        save_png(chart.figure, out / f"{_file_name(chart.name)}.png", title=chart.title, legend=chart.legend)
        for chart in charts
    ]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)
