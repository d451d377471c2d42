"""A Hugging Face dataset as the source of chats: by a hub name, and as saved folders."""

import sys

import pytest

from shared import tiny
from shared.errors import ConfigError, DataError
from stage1_extract.config import DataConfig
from stage1_extract.prompts import prepare
from stage1_extract.rows import Reject, data_sources, read_rows

ROWS = [
    {
        "id": str(i),
        "messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": f"A number, {i}."},
        ],
        "note": None,
    }
    for i in range(6)
]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"drafttape\[hf\]"):
        prepare(DataConfig(dataset="owner/chats"), None)


@pytest.mark.slow
def test_hub_names_and_saved_folders_give_the_same_samples(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "parquet").mkdir()
    made.to_parquet(str(tmp_path / "parquet" / "train-0.parquet"))
    asked = []
    real = datasets.load_dataset

    def load(name, subset, *, split, streaming):
        asked.append((name, subset, split, streaming))
        if name != "owner/chats":
            return real(name, subset, split=split, streaming=streaming)
        if subset == "nothing":
            raise ValueError("BuilderConfig 'nothing' not found.\nAvailable: ['default']")
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(datasets, "load_dataset", load)
    tokenizer = tiny.byte_tokenizer()
    wanted = None
    for cfg in (
        DataConfig(dataset="owner/chats", split="train_sft"),
        DataConfig(dataset="owner/chats", streaming=True),
        DataConfig(dataset=str(tmp_path / "saved")),
        DataConfig(dataset=str(tmp_path / "splits")),
        DataConfig(dataset=str(tmp_path / "parquet")),
        DataConfig(dataset=str(tmp_path / "parquet"), streaming=True),
    ):
        found = prepare(cfg, tokenizer)
        ids = [(s.id, s.name, s.source.rpartition(":")[2]) for s in found.samples]
        wanted = wanted or ids
        assert ids == wanted
        assert len(ids) == 6
        assert found.files == [f"hf://{cfg.dataset}"]
    assert asked[:2] == [
        ("owner/chats", None, "train_sft", False),
        ("owner/chats", None, "train", True),
    ]
    part = prepare(DataConfig(dataset=str(tmp_path / "parquet"), split="train[:2]"), tokenizer)
    assert len(part.samples) == 2
    limited = DataConfig(dataset="owner/chats", limit=3, paths=[str(tmp_path / "parquet" / "*")])
    rows = list(read_rows(data_sources(limited), 8, limited))
    assert len(rows) == 8
    assert not any(isinstance(row, Reject) for row in rows)
    assert rows[6].source == "hf://owner/chats:1"
    with pytest.raises(DataError, match=r"'nothing' not found"):
        prepare(DataConfig(dataset="owner/chats", subset="nothing"), tokenizer)
