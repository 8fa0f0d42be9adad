"""Reports of section P, labels: what is trained on is never empty, never everything unasked, and never guessed."""

from __future__ import annotations

import numpy as np
import pytest

from fsdp_trainer.errors import DataError

BY_PREFIX, BY_MARKERS, WITH_BOS = (
    "t01_chatml_no_generation_markers.jinja",
    "t02_chatml_with_generation_markers.jinja",
    "t04_emits_bos.jinja",
)


def targets_of(shown_rows: list[str]) -> list[list[str]]:
    """The texts between ⟦ and ⟧ of each row."""
    return [[part.split("⟧")[0] for part in row.split("⟦")[1:]] for row in shown_rows]


@pytest.mark.parametrize("on_too_long", ["truncate", "split"])
@pytest.mark.parametrize("seq_len", [24, 64, 128])
def test_121_no_row_is_without_a_target(prepared, on_too_long: str, seq_len: int):
    rows, report = prepared("d08_over_long", seq_len=seq_len, on_too_long=on_too_long, packing=on_too_long == "split")
    assert (rows.row_supervised() > 0).all()
    assert report.records == 3
    lost = sum(report.dropped.values())
    assert report.truncated + report.split + lost >= 1  # what was cut or left out is counted
    if seq_len == 64 and on_too_long == "truncate":
        assert report.dropped == {"nothing to train on after truncation": 1}
        assert [warning for warning in report.warnings if "not trained on" in warning]


def test_121_no_target_in_all_the_data_stops(prepared):
    with pytest.raises(DataError, match="no record is left to train on"):
        prepared("d08_over_long", seq_len=8)


@pytest.mark.parametrize("template", [BY_PREFIX, BY_MARKERS, WITH_BOS])
def test_122_a_mask_is_never_all_or_nothing(prepared, template: str):
    rows, _ = prepared("d10_multi_turn_chat", chat_template=template)
    counts = rows.row_supervised()
    assert (counts > 0).all()
    assert (counts < rows.row_tokens() - 1).all()


def test_122_templates_with_and_without_markers_train_on_the_same_answers(prepared, shown):
    found = [shown(prepared("d10_multi_turn_chat", chat_template=template)[0]) for template in (BY_PREFIX, BY_MARKERS)]
    by_prefix, by_markers = map(targets_of, found)
    assert by_prefix == [[text.rstrip("\n") for text in row] for row in by_markers]


def test_123_the_targets_are_the_answers_word_for_word(prepared, shown, jsonl):
    answers = ["<think>\nwhy\n</think>\n\nso", "  blanks  ", "two\n\n\nlines", "ünï 中"]
    messages = [
        {"role": role, "content": text}
        for number, answer in enumerate(answers)
        for role, text in (("user", f"question {number}"), ("assistant", answer))
    ]
    rows, _ = prepared(jsonl({"messages": messages}), seq_len=512)
    assert targets_of(shown(rows)) == [[answer + "<|im_end|>" for answer in answers]]


@pytest.mark.parametrize(("name", "prompt"), [("d12_alpaca", "assistant\n"), ("d13_prompt_completion", "1+1=")])
def test_126_the_prompt_is_no_target_unless_asked(prepared, shown, name: str, prompt: str):
    rows, _ = prepared(name, on_bad_record="skip")
    for text, targets in zip(shown(rows)[:2], targets_of(shown(rows))[:2], strict=True):
        assert len(targets) == 1
        assert text.endswith(("⟧", "⟧\n"))  # all before the one target is the prompt
    assert prompt in shown(rows)[0].split("⟦")[0]
    everything, _ = prepared(name, on_bad_record="skip", train_on="all")
    assert np.array_equal(np.flatnonzero(~everything.supervised), everything.document_starts[:-1])


def test_128_what_is_cut_is_counted_and_lengths_are_shown(prepared):
    _, whole = prepared("d08_over_long", seq_len=2048)
    _, cut = prepared("d08_over_long", seq_len=64)
    assert whole.length_percentiles == cut.length_percentiles  # of the records, not of what is left of them
    assert whole.longest_tokens > 64
    assert cut.longest_tokens == 64
    text = "\n".join(cut.format_lines())
    assert "1 record cut at data.seq_len" in text
    assert "record lengths in tokens:" in text
    assert "(99 %)" in text
    assert sum(count for _, count in cut.length_bars) == 3


@pytest.mark.parametrize(
    ("count", "expected"),
    [(4, {"5": 1, "25": 1, "50": 2, "75": 3, "95": 4, "99": 4}), (100, {str(p): p for p in (5, 25, 50, 75, 95, 99)})],
)
def test_128_a_percentile_is_the_nearest_rank(prepared, tokenizer, jsonl, count: int, expected: dict[str, int]):
    """Of a few records the longest must be seen: 99 % of four are all four."""
    texts = [{"text": "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * number} for number in range(1, count + 1)]
    one, two = (len(tokenizer(record["text"])["input_ids"]) for record in texts[:2])
    _, report = prepared(jsonl(*texts), seq_len=2048)
    found = {share: (length - 1) // (two - one) for share, length in report.length_percentiles.items()}  # without eos
    assert found == expected
