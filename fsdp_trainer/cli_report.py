"""`fsdp-trainer report`: one page from what runs have left in their folders, and pictures of the same."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_trainer.cli_plan import check_place
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.progress import log_line


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folder; several are laid over one another.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Page to write; default report.html, in the run's folder or, of several, here.", metavar="FILE"
        ),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Write each chart as a PNG too, into pictures/ beside the page.")
    ] = False,
) -> None:
    """Write report.html of a run, or of several side by side: finished, failed or still going."""
    from fsdp_trainer.report.run_html import REPORT, write_run_report  # numpy and, later, matplotlib come with it

    if out is None:
        out = runs[0] / REPORT if len(runs) == 1 else Path(REPORT)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError("A report is an HTML page.", values=f"--out {out}", fix="end its name in .html")
    check_place("--out", out.parent)
    log_line(f"wrote {write_run_report(runs, out)}")
    if pictures:
        from fsdp_trainer.report.run_pictures import PICTURES, write_run_pictures

        written = write_run_pictures(runs, out.parent / PICTURES)
        log_line(f"wrote {out.parent / PICTURES}: {', '.join(path.name for path in written) or 'nothing to draw'}")
