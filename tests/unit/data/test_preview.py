"""`fsdp-trainer data`: the counts a person and a program get, the picture, the rows, and the cache it may leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_trainer import cli
from fsdp_trainer.config import Config
from fsdp_trainer.data.describe import format_sample
from fsdp_trainer.data.report import DataReport
from fsdp_trainer.training_data import load_training_data
from tests import models
from tests.unit.data.toy_tokenizer import CHATML, build_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config and a tokenizer are all that is looked at: no weights."""
    folder = tmp_path_factory.mktemp("model")
    models.model_config("llama").save_pretrained(folder)
    models.build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def settings(model: str, tmp_path: Path) -> Path:
    records, _ = models.make_records(40, seed=0)
    records += [records[0], {"prompt": "w1", "completion": ""}]
    records.append({"prompt": "w1 " * 30, "completion": " w2 w3" * 20})
    file = models.write_jsonl(records, tmp_path / "train.jsonl")
    config = Config.from_dict(
        {
            "model": {"path": model},
            "data": {
                "train": file,
                "eval": 0.2,
                "seq_len": 48,
                "on_too_long": "split",
                "workers": 0,
                "cache_dir": str(tmp_path / "cache"),
            },
            "batch": {"global_batch_size": 4},
            "train": {"epochs": 3},
            "output_dir": str(tmp_path / "run"),
        }
    )
    config.save(tmp_path / "run.yaml")
    return tmp_path / "run.yaml"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", *words])
    assert not ended.value.code
    return capsys.readouterr().out


def test_json_holds_the_counts_of_the_run_itself(settings: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = json.loads(run(capsys, "--config", str(settings), "--json"))
    assert found["cache"] is None
    assert not (tmp_path / "cache").exists()
    config = Config.load(settings)
    data = load_training_data(config, is_writer=True, show=False)
    reports = dict(data.reports)
    for name, counts in found["data_sets"].items():
        bars = tuple((start, count) for start, count in counts["length_bars"])
        texts = {key: tuple(counts[key]) for key in ("warnings", "skipped_examples", "unread")}
        assert DataReport(**(counts | texts | {"length_bars": bars})) == reports[name]
    train = found["data_sets"]["train"]
    assert found["steps_per_epoch"] == -(-train["rows"] // 4) == data.steps_per_epoch
    assert found["steps"] == 3 * found["steps_per_epoch"]
    both = list(found["data_sets"].values())
    assert sum(counts["records"] for counts in both) == 43
    assert sum(counts["split"] for counts in both) == 1
    assert sum(counts["duplicates"] for counts in both) == 1
    assert sum(counts["dropped"].get("empty completion", 0) for counts in both) == 1
    for counts in both:
        in_bars = sum(count for _, count in counts["length_bars"])
        assert in_bars == counts["records"] - sum(counts["dropped"].values())
        assert counts["packing_efficiency"] == counts["tokens"] / (48 * counts["rows"])


def test_a_person_sees_counts_lengths_rows_and_warnings(settings: Path, capsys: pytest.CaptureFixture[str]):
    text = run(capsys, "--config", str(settings), "--rows=3", "--data.eval=null")
    assert "train: 43 records gave" in text
    assert "train: record lengths in tokens:" in text
    assert "█" in text
    assert "steps an epoch, of 4 rows each" in text
    assert "warning: 1 of 43 records stand in the data more than once" in text
    assert text.count("(what is trained on is marked):") == 3
    assert "<eos>⟧" in text
    assert "\x1b[" not in text  # no colours into a pipe


def test_write_leaves_the_rows_that_the_run_reads(
    settings: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = json.loads(run(capsys, "--config", str(settings), "--json", "--write"))["cache"]
    assert Path(folder).parent == tmp_path / "cache"
    monkeypatch.setattr("fsdp_trainer.data.prepare.build_rows", lambda *args, **kwargs: pytest.fail("built again"))
    data = load_training_data(Config.load(settings), is_writer=True, show=False)
    assert Path(data.train.tokens.filename).parent == Path(folder)  # type: ignore[attr-defined]
    assert folder in run(capsys, "--config", str(settings), "--write")


def test_the_lengths_are_drawn(settings: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "lengths.png"
    run(capsys, "--config", str(settings), "--json", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "--config", str(settings), "--json", "--plot", str(tmp_path / "missing" / "x.png")])
    assert ended.value.code == 7
    assert "--plot" in capsys.readouterr().err


def test_bad_data_and_misspelt_settings_are_named(settings: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "--config", str(settings), "--data.seqlen=3"])
    assert ended.value.code == 2
    assert "seq_len" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text("broken", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "--config", str(settings), "--data.eval=null"])
    assert ended.value.code == 3
    assert "train.jsonl:1" in capsys.readouterr().err


def test_few_targets_are_warned_about(settings: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    models.write_jsonl([{"prompt": "w1 " * 40, "completion": " w2"}] * 3, tmp_path / "train.jsonl")
    text = run(capsys, "--config", str(settings), "--data.eval=null")
    assert "of the tokens are trained on" in text


CONTROLS = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F)))
CONTROLS += "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


@pytest.mark.parametrize("colour", [False, True])
def test_control_characters_of_the_data_reach_no_terminal(prepared, tokenizer, jsonl, colour: bool):
    rows, _ = prepared(jsonl({"prompt": f"asked{CONTROLS}", "completion": f"ünï 中\\x1b{CONTROLS}"}), seq_len=1024)
    text = format_sample(rows, 0, tokenizer=tokenizer, colour=colour).plain
    assert not set(text) & set(CONTROLS) - {"\t", "\n"}
    for shown in (r"\x00", r"\x07", r"\r", r"\x1b", r"\x7f", r"\x9b", r"\u061c", r"\u202e", r"\u2069"):
        assert text.count(shown) >= 2
    assert "ünï 中" in text


def test_control_characters_of_a_bad_record_reach_no_terminal(prepared, jsonl):
    bad = {"messages": [{"role": "user", "content": f"q{CONTROLS}"}, {"role": "assistant", "content": "a"}]}
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    template = "{% if messages[0]['content'] != 'q' %}{{ raise_exception(messages[0]['content']) }}{% endif %}" + CHATML
    tokenizer = build_tokenizer(template=template)
    _, report = prepared(jsonl(bad, good), tokenizer=tokenizer, on_bad_record="skip")
    lines = "".join(report.format_lines())
    assert r"q\x00" in lines
    assert not set(lines) & set(CONTROLS) - {"\t", "\n"}


def gpt2_settings(settings: Path, tmp_path: Path) -> list[str]:
    models.model_config("gpt2").save_pretrained(tmp_path / "gpt2")
    models.build_tokenizer().save_pretrained(tmp_path / "gpt2")
    return ["--config", str(settings), f"--model.path={tmp_path / 'gpt2'}", "--data.eval=null"]


def test_rows_longer_than_a_table_of_positions_are_refused_as_in_training(
    settings: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    words = gpt2_settings(settings, tmp_path)
    assert "steps an epoch" in run(capsys, *words, "--data.seq_len=128")
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", *words, "--data.seq_len=129"])
    assert ended.value.code == 2
    assert "data.seq_len: 129, max_position_embeddings 128" in capsys.readouterr().err
    run(capsys, "--config", str(settings), "--data.seq_len=129", "--data.eval=null")  # rotary: by document


def test_a_picture_of_no_kind_is_refused_before_anything_is_read(
    settings: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["data", "--config", str(settings), "--data.train=/nowhere.jsonl", "--plot", str(tmp_path / "lengths")]
        )
    assert ended.value.code == 2
    assert "ends in .png, .svg, .pdf" in capsys.readouterr().err


def test_one_step_is_no_steps(settings: Path, capsys: pytest.CaptureFixture[str]):
    text = run(capsys, "--config", str(settings), "--data.eval=null", "--batch.global_batch_size=100")
    assert "1 step an epoch, of 100 rows each; 3 in the run" in text


def test_ctrl_c_says_that_it_was_heard(
    settings: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fsdp_trainer.preview.load_training_data", interrupt)
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "--config", str(settings)])
    assert ended.value.code == 130
    assert "stopped by Ctrl-C; nothing is left behind" in capsys.readouterr().err
