"""A stream: every world size sees the same rows in the same steps, and a resume anywhere gives the rest exactly."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_trainer.config import DataConfig, SourceConfig
from fsdp_trainer.data import streaming
from fsdp_trainer.data.loader import Window
from fsdp_trainer.data.streaming import RowStream, build_stream, first_rows, stream_digest, stream_windows
from fsdp_trainer.errors import CheckpointError, DataError
from tests.unit.data.files import write_any, write_jsonl
from tests.unit.data.toy_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def records(count: int, *, first: int = 0) -> list[dict]:
    return [
        {"prompt": f"q{index}", "completion": f" a{index}" + "x" * (index % 7)} for index in range(first, first + count)
    ]


def make_stream(*paths: Path | SourceConfig, seed: int = 0, **given) -> RowStream:
    train = [path if isinstance(path, SourceConfig) else str(path) for path in paths]
    values = {"seq_len": 32, "workers": 0, "shuffle_buffer": 8, "streaming": True} | given
    return build_stream(DataConfig(train=train, **values), tokenizer=TOKENIZER, seed=seed)


def windows(
    stream: RowStream,
    *,
    start: int = 0,
    count: int,
    resume_at=None,
    batch: int = 4,
    micro: int = 1,
    rank: int = 0,
    world: int = 1,
) -> list[Window]:
    if resume_at is not None:
        resume_at = json.loads(json.dumps(resume_at))  # as a checkpoint keeps it
    made = stream_windows(
        stream,
        start=start,
        stop=start + count,
        resume_at=resume_at,
        global_batch_size=batch,
        micro_batch_size=micro,
        rank=rank,
        world_size=world,
    )
    with closing(made):
        return list(made)


def tokens_of(window: Window) -> list[tuple[int, ...]]:
    """The rows of a window that one rank was dealt, as tokens."""
    found = []
    for batch in window.micro_batches:
        lengths = batch.lengths.tolist() if batch.lengths is not None else [batch.input_ids.shape[1]]
        found += [tuple(row[:length]) for row, length in zip(batch.input_ids.tolist(), lengths, strict=False) if length]
    return found


def names(found: Sequence[Window]) -> list[list[str]]:
    """The questions met in each window, sorted."""
    texts = [str(TOKENIZER.decode([token for row in tokens_of(window) for token in row])) for window in found]
    return [sorted(part.split(" ")[0] for part in text.split("<|im_end|>") if part) for text in texts]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
    packing=st.booleans(),
    buffer=st.integers(1, 40),
    at=st.integers(1, 11),
    files=st.sampled_from([("a.jsonl",), ("a.parquet", "a.csv"), ("a.jsonl.gz", "a.arrow", "a.json")]),
)
def test_a_resume_at_any_step_gives_the_rest_exactly(tmp_path, seed, shuffle, packing, buffer, at, files):
    paths = [tmp_path / name for name in files]
    for index, path in enumerate(paths):
        if not path.exists():
            write_any(records(13, first=100 * index), tmp_path, path.name)
    stream = make_stream(*paths, seed=seed, shuffle=shuffle, packing=packing, shuffle_buffer=buffer)
    whole = windows(stream, count=12)
    rest = windows(stream, start=at, count=12 - at, resume_at=whole[at - 1].resume_at)
    for one, other in zip(whole[at:], rest, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert (one.row_indices, one.tokens, one.supervised_tokens, one.epoch, one.resume_at) == (
            other.row_indices,
            other.tokens,
            other.supervised_tokens,
            other.epoch,
            other.resume_at,
        )


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), buffer=st.integers(1, 40), packing=st.booleans(), mixed=st.booleans())
def test_a_step_sees_the_same_rows_on_any_number_of_ranks(tmp_path, seed, buffer, packing, mixed):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for index, path in enumerate(paths):
        write_jsonl(records(11, first=100 * index), path)
    named = [SourceConfig(path=str(path), weight=weight) for path, weight in zip(paths, (1.0, 2.5), strict=True)]
    stream = make_stream(*(named if mixed else paths), seed=seed, packing=packing, shuffle_buffer=buffer)
    seen = []
    for world in (1, 2, 4):
        for micro in (1, 2):
            ranks = [windows(stream, count=5, batch=8, micro=micro, rank=rank, world=world) for rank in range(world)]
            steps = []
            for of_ranks in zip(*ranks, strict=True):
                assert len({(w.tokens, w.supervised_tokens, w.row_indices, w.epoch, w.notes) for w in of_ranks}) == 1
                assert len({json.dumps(w.resume_at, sort_keys=True) for w in of_ranks}) == 1
                assert len({len(w.micro_batches) for w in of_ranks}) == 1
                steps.append(sorted(row for window in of_ranks for row in tokens_of(window)))
            seen.append(steps)
    assert all(steps == seen[0] for steps in seen)
    assert all(len(step) == 8 for step in seen[0])


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_each_record_once_and_epochs_differ(tmp_path, shuffle):
    paths = [write_any(records(10), tmp_path, "a.jsonl"), write_any(records(6, first=100), tmp_path, "a.csv")]
    found = names(windows(make_stream(*paths, packing=False, shuffle=shuffle, shuffle_buffer=5), count=12))
    expected = sorted(f"q{index}" for index in (*range(10), *range(100, 106)))
    epochs = [found[at : at + 4] for at in (0, 4, 8)]
    assert all(sorted(chain(*epoch)) == expected for epoch in epochs)
    assert (epochs[0] != epochs[1]) == shuffle
    assert (epochs[1] != epochs[2]) == shuffle
    in_order = [["q0", "q1", "q2", "q3"], ["q4", "q5", "q6", "q7"]]
    assert (found[:2] == in_order) != shuffle


def test_the_order_of_a_stream_is_fixed_for_ever(tmp_path):
    """A resume may come with another version of this package: the order must not move."""
    path = write_any(records(9), tmp_path, "a.jsonl")
    assert names(windows(make_stream(path, packing=False, shuffle_buffer=6), count=5, batch=2)) == [
        ["q3", "q5"],
        ["q0", "q4"],
        ["q1", "q2"],
        ["q7", "q8"],  # of three, the last of the epoch: q6 comes with the next one's first
        ["q5", "q6"],
    ]


def test_a_window_may_lie_in_two_buffers_and_two_epochs(tmp_path):
    path = write_any(records(5), tmp_path, "a.jsonl")
    found = windows(make_stream(path, packing=False, shuffle_buffer=3), count=4, batch=4)
    assert [len(window.row_indices) for window in found] == [4] * 4
    assert sorted(Counter(chain(*names(found))).values()) == [3, 3, 3, 3, 4]
    assert [window.epoch for window in found] == [0, 1, 2, 3]


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10)), batch=st.integers(1, 9))
def test_a_mix_of_streams_keeps_to_its_weights(tmp_path, weights, batch):
    named = []
    for index, weight in enumerate(weights):
        path = tmp_path / f"{index}.jsonl"
        write_jsonl(records(4 + index, first=100 * index), path)
        named.append(SourceConfig(path=str(path), weight=weight))
    found = windows(make_stream(*named, packing=False), count=8, batch=batch)
    for steps in range(1, 9):
        met = Counter(int(name[1:]) // 100 for name in chain(*names(found[:steps])))
        for index, weight in enumerate(weights):
            assert abs(met[index] - steps * batch * weight / sum(weights)) <= len(weights) - 1


def test_a_resume_reads_one_buffer_again_and_nothing_before_it(tmp_path):
    path = write_any(records(64), tmp_path, "a.jsonl")
    stream = make_stream(path, packing=False, shuffle_buffer=8)
    whole = windows(stream, count=15)
    position = whole[9].resume_at
    assert position is not None
    place = position["sources"][0]["place"]
    assert (place["buffer"], place["line"]) == (4, 32)  # the 40th record is the last of the fifth buffer
    text = path.read_bytes()
    first_line = text.index(b"\n") + 1
    # After the first line, which says the format, nothing before the buffer can be read any more.
    path.write_bytes(text[:first_line] + b"\xff" * (place["offset"] - first_line) + text[place["offset"] :])
    rest = windows(stream, start=10, count=5, resume_at=position)
    assert names(rest) == names(whole[10:])
    with pytest.raises(DataError, match="not UTF-8"):
        windows(stream, count=1)


def test_reading_ahead_is_bounded(tmp_path):
    path = write_any(records(100), tmp_path, "a.jsonl")
    with path.open("ab") as file:
        file.write(b"\xff\n" * 100)
    stream = make_stream(path, packing=False, shuffle_buffer=8)
    assert (
        len(windows(stream, count=10)) == 10
    )  # 40 records used; more than a few buffers ahead lies what cannot be read


def test_bad_records_are_counted_through_a_resume(tmp_path):
    path = write_any([*records(10), {"prompt": "p", "completion": ""}], tmp_path, "a.jsonl")
    with path.open("a") as file:
        file.write('{"prompt": "broken\n{"prompt": 7, "completion": "x"}\n')
    stream = make_stream(path, packing=False, shuffle_buffer=4, on_bad_record="skip")
    whole = windows(stream, count=12, batch=2)
    notes = [note for window in whole for note in window.notes]
    # Four buffers an epoch, of which the last holds one record that cannot be used; then one of the third epoch.
    assert len(notes) == 9
    assert notes[0] == "data stream: 4 records of a.jsonl read, epoch 0"
    assert notes[2].startswith("data stream: 12 records of a.jsonl read, epoch 0; ")
    assert "1 bad and skipped: broken JSON" in notes[2]
    assert "1 dropped: empty completion" in notes[2]
    assert "1 bad and skipped: wrong type" in notes[3]
    assert notes[4].startswith("data stream: 17 records of a.jsonl read, epoch 1; 1 bad")
    rest = windows(stream, start=7, count=5, batch=2, resume_at=whole[6].resume_at)
    assert [window.notes for window in rest] == [window.notes for window in whole[7:]]


def test_a_bad_record_stops_a_strict_stream_where_it_is_met(tmp_path):
    path = write_any(records(1200), tmp_path, "a.jsonl")
    with path.open("a") as file:
        file.write("broken\n")
    stream = make_stream(path, packing=False, shuffle_buffer=100)
    first_rows(stream)
    made = stream_windows(
        stream,
        start=0,
        stop=1000,
        resume_at=None,
        global_batch_size=100,
        micro_batch_size=1,
        rank=0,
        world_size=1,
    )
    with closing(made):
        assert len(list(islice(made, 12))) == 12
        with pytest.raises(DataError, match=r"a\.jsonl:1201: not valid JSON"):
            next(made)


def test_a_stream_without_anything_to_train_on_ends_in_an_error(tmp_path):
    path = write_any([{"prompt": "p", "completion": ""}] * 9, tmp_path, "a.jsonl")
    stream = make_stream(path, shuffle_buffer=2)
    with pytest.raises(DataError, match="no record is left to train on"):
        first_rows(stream)
    with pytest.raises(DataError, match="no record is left to train on"):
        windows(stream, count=1)


def test_the_first_rows_stand_for_the_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_SHOWN_RECORDS", 7)
    path = write_any(records(20), tmp_path, "a.jsonl")
    rows, report = first_rows(make_stream(path, packing=False))
    assert (rows.n_rows, report.records, report.documents) == (7, 7, 7)


def test_the_digest_tells_streams_apart(tmp_path):
    path = write_any(records(20), tmp_path, "a.jsonl")
    digest = stream_digest(make_stream(path), first="x")
    assert digest == stream_digest(make_stream(path), first="x")
    assert digest != stream_digest(make_stream(path), first="y")
    path.write_bytes(path.read_bytes()[:-3] + b'?"}')
    assert digest != stream_digest(make_stream(path), first="x")


@pytest.mark.parametrize("whole", [True, False])
def test_the_digest_sees_a_change_of_equal_size(tmp_path, monkeypatch, whole: bool):
    """Anywhere in files that are read whole; where they are sampled, in the samples alone."""
    monkeypatch.setattr(streaming, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(streaming, "_SAMPLED_BYTES", 512)
    if not whole:
        monkeypatch.setattr(streaming, "_WHOLE_BYTES", 100)
    path = write_any(records(200), tmp_path, "a.jsonl")
    stream, content = make_stream(path), path.read_bytes()
    digest = stream_digest(stream, first="x")
    noticed = []
    for at in (0, len(content) // 2 - 1, *range(1000, 1000 + 7 * 211, 211), len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        noticed.append(digest != stream_digest(stream, first="x"))
    assert noticed[0]
    assert noticed[-1]
    assert all(noticed) == whole
    path.write_bytes(content)
    assert digest == stream_digest(stream, first="x")


def test_a_position_that_does_not_fit_is_refused(tmp_path):
    path = write_any(records(20), tmp_path, "a.jsonl")
    stream = make_stream(path, packing=False)
    (window,) = windows(stream, count=1, batch=7)
    with pytest.raises(CheckpointError, match="does not say where"):
        windows(stream, start=1, count=1)
    mixed = make_stream(*(SourceConfig(path=str(path), weight=1.0) for _ in range(2)))
    with pytest.raises(CheckpointError, match="places of 1 sources for the 2"):
        windows(mixed, start=1, count=1, resume_at=window.resume_at)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    with pytest.raises(CheckpointError, match="not the one"):
        windows(stream, start=1, count=1, resume_at=window.resume_at)


def test_worker_processes_give_the_same_stream(tmp_path):
    path = write_any(records(40), tmp_path, "a.jsonl")
    here, there = make_stream(path), make_stream(path, workers=1)
    assert [tokens_of(w) for w in windows(here, count=6)] == [tokens_of(w) for w in windows(there, count=6)]
