"""Vocabulary (reports E): the table, the tokenizer and the end token agree, or the run is refused before weights load.

Entries 34, 35 and 36. Elsewhere: 32 and 33 in test_kind_l_loading.py (a table that is larger than the tokenizer, or
another than the config says; nothing is resized here), each rule of masking by itself in tests/unit/data/test_masks.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fault_runs, models, reference, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks

ModelFolder = Callable[[str], str]


def add_word(model: str, folder: str) -> int:
    """Copy a model and give its tokenizer one word more than the table has rows; return that word's id."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["beyond"])
    tokenizer.save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids("beyond")


def test_34_a_token_outside_the_table_is_named_with_its_record(model_folder: ModelFolder, tmp_path: Path) -> None:
    """On a GPU it would be an assertion of the device in the first step."""
    outside = run_ranks(add_word, 1, model_folder("llama"), str(tmp_path / "model"))[0]
    assert outside >= models.VOCAB_SIZE
    records, _ = models.make_records(16, seed=3)
    records[9] = {**records[9], "completion": records[9]["completion"] + " beyond"}
    data = models.write_jsonl(records, tmp_path / "data.jsonl")
    settings = training_runs.settings(
        str(tmp_path / "model"), data, tmp_path / "run", train={"max_steps": 2}, schedule={"warmup_steps": 1}
    )
    assert 0 not in fault_runs.run(settings, 2)
    message = fault_runs.read_status(tmp_path / "run")["message"]
    for part in (str(outside), str(models.VOCAB_SIZE), "data.jsonl:10"):
        assert part in message, message
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "it was found only in a step"


def pad_with_the_end(model: str, folder: str) -> str:
    """Copy a model and let its tokenizer pad with the end token, as many published ones do."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    config = json.loads((Path(folder) / "config.json").read_text())
    (Path(folder) / "config.json").write_text(json.dumps({**config, "pad_token_id": tokenizer.eos_token_id}))
    return folder


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_35_36_the_end_is_learnt_also_where_it_is_what_pads(
    packing: bool, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Two ranks over rows of unequal length: loss and number of targets are those of the documents, ends included."""
    model = run_ranks(pad_with_the_end, 1, model_folder("llama"), str(tmp_path / "model"))[0]
    records, documents = models.make_records(8, seed=14)
    assert all(document.tokens[-1] == models.EOS and document.supervised[-1] for document in documents)
    settings = training_runs.settings(
        model,
        models.write_jsonl(records, tmp_path / "train.jsonl"),
        tmp_path / "run",
        data={"packing": packing},
        batch={"global_batch_size": 8 if not packing else 4, "micro_batch_size": 2},
        train={"max_steps": 1},
        schedule={"warmup_steps": 1},
    )
    row = run_on_kept_ranks(training_runs.train, 2, settings)[0]["metrics"][0]
    if not packing:
        loss, _ = run_plainly(reference.gradient_snapshot, model, documents)[0]
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert row["supervised_tokens"] == sum(sum(document.supervised) for document in documents)
