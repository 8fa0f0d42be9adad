"""Reports of section O that meet the chat template: roles and their order, empty answers."""

from __future__ import annotations

import pytest

from fsdp_trainer.errors import DataError


def test_119_known_role_names_are_mapped_and_others_refused_by_line(prepared, shown):
    with pytest.raises(DataError, match=r"d11_sharegpt_from_value.jsonl:\d+: .*chatbot"):
        prepared("d11_sharegpt_from_value")
    rows, report = prepared("d11_sharegpt_from_value", on_bad_record="skip")
    assert report.skipped["unknown role"] >= 1
    text = "\n".join(shown(rows))
    for ours in ("human", "gpt"):
        assert f"<|im_start|>{ours}" not in text
    assert "<|im_start|>user" in text
    assert "<|im_start|>assistant\n⟦" in text


def test_119_a_template_that_wants_another_order_names_the_line(prepared):
    with pytest.raises(DataError, match=r"d10_multi_turn_chat.jsonl:1: the chat template refuses .*alternate"):
        prepared("d10_multi_turn_chat", chat_template="t05_strict_alternation_no_system.jinja")


def test_120_an_empty_answer_is_dropped_and_counted_and_never_the_word_none(prepared, shown):
    rows, report = prepared("d02_empty_assistant_turns")
    assert sum(report.dropped.values()) == 3
    assert report.records == rows.n_documents + 3
    assert "None" not in "".join(shown(rows))
    assert [warning for warning in report.warnings if "3 of 4 records are not trained on" in warning]
