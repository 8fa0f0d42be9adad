"""Log lines and progress where nothing can be drawn."""

import io

import pytest

from fsdp_trainer.progress import log_error, log_line, show_progress


def test_lines_come_out_whole_and_unread(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]not markup[/bold] :smile: " + "x" * 300
    log_line(text)
    log_line("another rank", is_main=False)
    log_error("wrong")
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert captured.err == "wrong\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_letter_that_the_stream_lacks_is_written_out(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LC_ALL=C or PYTHONIOENCODING=latin-1: a line about the data would have ended the run."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr("sys.stdout", stream)
    log_line("row 0: \u27e6\u7b54\u27e7\x1b[2J")
    stream.flush()
    written = stream.buffer.getvalue()  # type: ignore[attr-defined]
    assert written == b"row 0: \\u27e6\\u7b54\\u27e7\\x1b[2J\n"


def test_progress_into_a_pipe_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("tokenizing", total=1000) as advance:
        for _ in range(100):
            advance(10)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0] == "tokenizing: 1,000 ..."
    assert lines[1].startswith("tokenizing: 1,000 in ")


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("tokenizing", total=None, is_main=False) as advance:
        advance(1)
    assert capsys.readouterr().out == ""


def test_the_error_of_the_work_goes_up(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with show_progress("reading", total=None):
            raise ValueError("bad record")

    with pytest.raises(ValueError, match="bad record"):
        work()
    assert capsys.readouterr().out == "reading ...\n"
