"""The memory picture: the peak is in it whatever the width, kinds stack to the total, and the file is a real image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import ConfigError, OutputError
from fsdp_trainer.memory.recording import CATEGORIES
from fsdp_trainer.report.memory_picture import (
    LETTERS,
    SCALE,
    STACK,
    check_picture,
    draw_memory,
    find_peak,
    format_memory,
)

GIB = 2**30


def make_timeline(length: int = 1000, *, peak_at: int = 617) -> list[Any]:
    timeline = []
    for index in range(length):
        phase = "load" if index == 0 else "forward" if index < length // 2 else "backward"
        alive = {"parameters": 2 * GIB, "activations": index * GIB // length}
        if index == peak_at:
            alive["temporaries"] = 3 * GIB
        timeline.append((index, phase, alive))
    return [*timeline, (length, "save", {"parameters": 2 * GIB})]


def test_every_kind_has_its_place_and_letter() -> None:
    assert sorted(STACK) == sorted(CATEGORIES) == sorted(LETTERS)
    assert len(set(LETTERS.values())) == len(CATEGORIES)


@pytest.mark.parametrize("width", [20, 72, 5000])
def test_peak_is_marked_above_its_column(width: int) -> None:
    """One allocation among a thousand, gone at once: it must be seen, and nothing stands higher."""
    lines = format_memory(make_timeline(), width=width, height=10).plain.splitlines()
    column = lines[0].index(" v") + 1
    assert "peak 5.62 GiB in backward" in lines[0]
    assert lines[1][column] == LETTERS["temporaries"]
    assert set(lines[1][9:]) <= {" ", LETTERS["temporaries"]}
    cells = [line[column] for line in lines[1:11]]
    # 3 GiB of 5.62 are temporaries, the topmost; 2 are parameters, the lowest
    assert "".join(cells) in ("TTTTTAAPPP", "TTTTTAPPPP")
    assert cells[-1] == LETTERS["parameters"]


def test_short_phases_have_room_for_their_names() -> None:
    text = format_memory(make_timeline(), width=40).plain
    for phase in ("load", "forward", "backward", "save"):
        assert f"{phase} " in text or f"{phase}\n" in text


def test_one_moment_is_a_picture() -> None:
    assert "peak 1.00 GiB in load" in format_memory([(0, "load", {"parameters": GIB})]).plain


def test_first_of_equal_peaks() -> None:
    assert find_peak([(0, "load", {"parameters": 1}), (1, "step", {"parameters": 1})])[0] == 0


@pytest.mark.parametrize("limit", [6 * GIB, 80 * GIB, None])
def test_image_is_written(tmp_path: Path, limit: int | None) -> None:
    path = draw_memory(make_timeline(), tmp_path / "new" / "memory.png", title="a run", limit_bytes=limit)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_svg_names_peak_phases_and_kinds(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = draw_memory(make_timeline(), tmp_path / "m.svg", limit_bytes=6 * GIB).read_text(encoding="utf-8")
    for word in ("peak 5.62 GiB in backward", "forward", "temporaries", "6.0 GiB can be allocated"):
        assert word in text


def test_unknown_format_is_refused_before_drawing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png"):
        draw_memory(make_timeline(), tmp_path / "memory.txt")
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="picture cannot be written"):
        draw_memory(make_timeline(), tmp_path / "file" / "memory.png")


@pytest.mark.parametrize("width", [40, 50, 71, 111])
def test_many_phases_stay_within_the_width(width: int) -> None:
    """A step of four micro-batches has more names than 80 columns have room for: they are cut, not the picture."""
    phases = ["load", *["forward", "backward"] * 4, "clip", "step", "evaluate", "save"]
    timeline = [
        (100 * place + index, phase, {"parameters": GIB + index})
        for place, phase in enumerate(phases)
        for index in range(100)
    ]
    lines = format_memory(timeline, width=width).plain.splitlines()
    assert max(map(len, lines)) <= max(width + SCALE, 60)  # the list below the picture has its own width
    assert max(len(line) for line in lines[1:16]) <= width + SCALE
    for phase in phases:
        assert phase[:1] in lines[16]


@pytest.mark.parametrize("name", ["memory", "memory.xyz", "memory.docx"])
def test_a_name_that_says_no_format_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"end its name in \.png"):
        check_picture(name)
