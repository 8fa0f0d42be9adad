"""From handed files, mixes and folders to rows: what trains, what is held out, and what is said about the rest."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fsdp_trainer.config import DataConfig, SourceConfig
from fsdp_trainer.data.cache import cache_path
from fsdp_trainer.data.order import rows_of_epoch
from fsdp_trainer.data.prepare import prepare_rows
from fsdp_trainer.errors import DataError
from fsdp_trainer.training_data import identify_rows
from tests.unit.data.files import write_any

TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_d01_strict_names_the_line_and_skip_counts(prepared):
    with pytest.raises(DataError, match=r"d01_broken_lines.jsonl:2: not valid JSON.*\n.*on_bad_record: skip"):
        prepared("d01_broken_lines")
    rows, report = prepared("d01_broken_lines", on_bad_record="skip")
    assert (rows.n_documents, report.skipped) == (2, {"broken JSON": 3})
    assert [example.split(": ")[0].rsplit(":", 1)[1] for example in report.skipped_examples] == ["2", "4", "5"]


def test_d04_both_rows_without_byte_order_mark_or_carriage_return(prepared, shown):
    rows, _ = prepared("d04_bom_crlf")
    assert len(shown(rows)) == 2
    assert not any("\r" in text or "\ufeff" in text for text in shown(rows))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("d05_not_utf8_latin1", "byte 46"),
        ("d16_empty", "holds no records"),
        ("d19_wrong_types", "no record is left to train on\n.*6 records.*wrong type"),
    ],
)
def test_what_skipping_does_not_save(prepared, name, says):
    with pytest.raises(DataError, match=says):
        prepared(name, on_bad_record="skip")


@pytest.mark.parametrize(
    ("name", "line"), [("d15_mixed_schemas", 2), ("d19_wrong_types", 1), ("d11_sharegpt_from_value", 5)]
)
def test_the_first_bad_record_is_named_by_line(prepared, name, line):
    with pytest.raises(DataError, match=rf"{name}\.jsonl:{line}: "):
        prepared(name)


def test_d11_answers_are_targets_and_the_rest_is_not(prepared, shown):
    rows, report = prepared("d11_sharegpt_from_value", on_bad_record="skip")
    assert report.skipped == {"unknown role": 1}
    texts = shown(rows)
    assert "user\nhi<|im_end|>" in texts[0]
    assert "assistant\n⟦hello<|im_end|>⟧" in texts[0]
    assert texts[2].count("⟦") == 2
    assert 'assistant\n⟦{"name": "f"}<|im_end|>⟧' in texts[3]
    assert "tool\n1<|im_end|>" in texts[3]


def test_d12_instruction_and_input_are_masked(prepared, shown):
    with pytest.raises(DataError, match=r"d12_alpaca.jsonl:4: .*'output'"):
        prepared("d12_alpaca")
    rows, _ = prepared("d12_alpaca", on_bad_record="skip")
    assert "user\nAdd\n\n1 and 2<|im_end|>\n<|im_start|>assistant\n⟦3<|im_end|>⟧" in shown(rows)[0]
    assert rows.n_documents == 3


def test_d17_the_array_trains(prepared):
    assert prepared("d17_json_array_named_jsonl")[0].n_documents == 2


def test_tools_and_calls_are_written_or_the_record_is_refused(prepared, shown, jsonl, tmp_path: Path):
    call = {"type": "function", "function": {"name": "look_up", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "a"},
    ]
    path = jsonl({"messages": messages, "tools": [{"name": "look_up"}]})
    with pytest.raises(DataError, match="does not write the tool 'look_up'"):
        prepared(path)
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS)
    (text,) = shown(prepared(path, chat_template=str(template))[0])
    assert text.startswith('[{"name": "look_up"}]')
    assert '⟦{"type": "function", "function": {"name": "look_up", "arguments": {"x": 1}}}<|im_end|>⟧' in text
    assert "tool\n1<|im_end|>" in text


def test_columns_are_renamed_in_every_file(prepared, shown, tmp_path: Path):
    records = [{"q": "question", "a": " answer"}]
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        write_any(records, tmp_path, name)
    rows, _ = prepared(tmp_path, columns={"prompt": "q", "completion": "a"}, cache_dir=str(tmp_path / ".cache"))
    assert shown(rows) == ["question⟦ answer<|im_end|>⟧"] * 3


# Mixing


def pairs(name: str, count: int) -> list[dict]:
    return [{"prompt": f"{name}{index}", "completion": " a"} for index in range(count)]


def mixed(tmp_path: Path, tokenizer, *, weights=(3.0, 1.0), split="train", **given):
    train = []
    for name, count, weight in zip("ab", (6, 10), weights, strict=True):
        path = write_any(pairs(name, count), tmp_path, "a.jsonl").rename(tmp_path / f"{name}.data.jsonl")
        train.append(SourceConfig(path=str(path), weight=weight))
    values = {"train": train, "cache_dir": str(tmp_path / "cache"), "seq_len": 64, "packing": False, "workers": 0}
    data = DataConfig(**(values | given))
    rows, report = prepare_rows(data.train, data=data, tokenizer=tokenizer, seed=0, split=split)
    return data, rows, report


def test_rows_of_a_mix_follow_the_weights(tmp_path, tokenizer, shown):
    _, rows, report = mixed(tmp_path, tokenizer)
    assert report.documents == rows.n_rows == 16
    texts = shown(rows)
    for epoch in range(3):
        order = rows_of_epoch(rows, seed=0, epoch=epoch, shuffle=True)
        assert Counter(texts[row][0] for row in order) == {"a": 12, "b": 4}


def test_packed_rows_of_a_mix_hold_one_source_each(tmp_path, tokenizer, shown):
    _, rows, _ = mixed(tmp_path, tokenizer, packing=True, seq_len=16)
    texts = shown(rows)
    assert all(len(set(re.findall(r"([ab])\d", text))) == 1 for text in texts)
    assert max(len(re.findall(r"[ab]\d", text)) for text in texts) > 1
    assert rows.source_rows is not None
    assert np.diff(rows.source_rows).sum() == rows.n_rows


def test_another_weight_needs_no_new_rows(tmp_path, tokenizer):
    data, rows, _ = mixed(tmp_path, tokenizer)
    other, again, _ = mixed(tmp_path, tokenizer, weights=(1.0, 1.0))
    assert cache_path(data.train, data=data, tokenizer=tokenizer, seed=0) == cache_path(
        other.train, data=other, tokenizer=tokenizer, seed=0
    )
    assert np.array_equal(rows.tokens, again.tokens)
    assert again.weights == (1.0, 1.0)
    assert identify_rows(rows) != identify_rows(again)  # but a resume with another weight meets other rows


def test_without_weights_the_same_files_are_packed_together(tmp_path, tokenizer):
    data, rows, _ = mixed(tmp_path, tokenizer, packing=True, seq_len=16)
    files = tuple(entry.path for entry in data.train if isinstance(entry, SourceConfig))
    together, _ = prepare_rows(files, data=data, tokenizer=tokenizer, seed=0)
    assert together.weights is None
    assert together.n_documents == rows.n_documents
    assert together.n_rows <= rows.n_rows


def test_a_weight_that_gives_no_row_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match="too little weight"):
        mixed(tmp_path, tokenizer, weights=(1000.0, 0.1))


def test_a_mixed_source_without_anything_to_train_on_is_named(tmp_path, tokenizer):
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"prompt": "p", "completion": ""}))
    full = write_any(pairs("a", 3), tmp_path, "a.jsonl")
    train = [SourceConfig(path=str(path), weight=1.0) for path in (full, empty)]
    data = DataConfig(train=train, cache_dir=str(tmp_path / "cache"), seq_len=64, workers=0)
    with pytest.raises(DataError, match=r"no record is left to train on\n.*empty\.jsonl: 1 empty completion"):
        prepare_rows(data.train, data=data, tokenizer=tokenizer, seed=0)


# Held out


def test_a_share_of_a_mix_is_held_out_before_it_is_packed_or_mixed(tmp_path, tokenizer, shown):
    _, whole, _ = mixed(tmp_path, tokenizer)
    _, train, _ = mixed(tmp_path, tokenizer, eval=0.25)
    _, held_out, _ = mixed(tmp_path, tokenizer, eval=0.25, split="eval")
    assert held_out.n_rows == 4
    assert held_out.weights is None  # evaluation meets every row once
    assert sorted(shown(train) + shown(held_out)) == sorted(shown(whole))
    _, packed, _ = mixed(tmp_path, tokenizer, eval=0.25, split="eval", packing=True)
    assert sorted("".join(shown(packed)).split("⟧")) == sorted("".join(shown(held_out)).split("⟧"))


def test_what_is_held_out_does_not_depend_on_the_kind_or_place_of_the_file(prepared, shown, tmp_path):
    records = pairs("a", 30)
    one = write_any(records, tmp_path, "a.jsonl")
    other = write_any(records[::-1], tmp_path, "a.parquet.zst")
    texts = [shown(prepared(path, eval=0.2, split="eval")[0]) for path in (one, other)]
    assert sorted(texts[0]) == sorted(texts[1])
    assert len(texts[0]) == 6


def test_records_of_the_evaluation_file_that_train_too_are_counted(prepared, jsonl):
    train = jsonl(*pairs("a", 9), "broken")
    held_out = jsonl(
        *pairs("b", 3), json.dumps(pairs("a", 2)[1], indent=None, separators=(",", " : ")), name="eval.jsonl"
    )
    settings = {"eval": str(held_out), "train": str(train), "on_bad_record": "skip"}
    _, report = prepared(held_out, split="eval", **settings)
    assert any("1 record of data.train also stands in data.eval" in warning for warning in report.warnings)
    train.write_text(json.dumps(pairs("c", 1)[0]))
    _, report = prepared(held_out, split="eval", **settings)
    assert not report.warnings
