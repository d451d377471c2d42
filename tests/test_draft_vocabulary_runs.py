"""A draft vocabulary in runs: counted once or given in a file, carried, never exchanged."""

import json

import numpy as np
import pytest
import torch
from tiny_cache import tiny_cache, tiny_config

from shared.errors import ConfigError, MismatchError
from shared.record import read_record
from shared.store import Store
from stage2_train import checkpoint, draft_vocabulary, export
from stage2_train.build import train_run
from stage2_train.config import DrafterConfig, EvalConfig, ExportConfig
from stage2_train.draft_vocabulary import of_run, read_ids
from stage2_train.evaluate import load_run, measure
from stage2_train.exported_model import DrafttapeModel


@pytest.mark.parametrize("text", ["[5, 0,\n 2]", "5\n0\n2\n"])
def test_ids_from_a_file(tmp_path, text):
    path = tmp_path / "ids"
    path.write_text(text)
    assert read_ids(path, 6).tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 6]", "6 is no id of a vocabulary of 6"),
        ("[1, -1]", "-1 is no id"),
        ("[1, true]", "True is no id"),
        ("[1, [2]]", "is no id"),
        ("3\n1\n3\n", "3 is there twice"),
        ("", "it has 0 of 6 ids"),
        ("0 1 2 3 4 5", "it has 6 of 6 ids"),
        ("one", "can't be read"),
        ("[1, 2", "can't be read"),
        ('{"ids": [1]}', "can't be read"),
        (None, "can't be read"),
    ],
)
def test_a_file_that_is_no_list_of_ids_is_refused(tmp_path, text, says):
    path = tmp_path / "ids"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_ids(path, 6)
    assert str(path) in str(caught.value)


class Labels:
    """A snapshot and its reader in one; counts the samples that are read."""

    def __init__(self, *texts):
        self.ids, self.texts, self.num_read = list(map(str, range(len(texts)))), texts, 0

    def indices(self, split):
        return range(1, len(self.texts)) if split == "train" else [0]

    def mask(self, index):
        return np.ones(len(self.texts[index]), dtype=bool)

    def read_tokens(self, name):
        self.num_read += 1
        return np.array(self.texts[int(name)])


class Alone:
    """The ranks of one process; `rank` pretends to be another one."""

    def __init__(self, rank=0, first=None):
        self.is_main, self.first = rank == 0, first

    def gather(self, value):
        return [value if self.is_main else self.first, value]


INFO = {"vocab_size": 9, "eos_token_ids": [8]}


def test_labels_are_counted_once_a_run(tmp_path):
    cfg, data = DrafterConfig(draft_vocabulary=3), Labels([1, 5], [5, 5, 2], [2, 7])

    def ids(known, ranks=None):
        return of_run(tmp_path, cfg, known, data, data, INFO, ranks or Alone())

    ids_S, facts = ids(None)
    assert ids_S.tolist() == [2, 5, 8]
    assert (facts["size"], facts["train_coverage"], facts["heldout_coverage"]) == (3, 4 / 5, 1 / 2)
    assert data.num_read == 3
    again_S, same = ids(facts)
    assert torch.equal(again_S, ids_S)
    assert same == facts
    assert data.num_read == 3, "a later start reads the ids, not the labels"
    other_S, _ = ids(facts, Alone(rank=1, first=(ids_S.numpy(), facts)))
    assert torch.equal(other_S, ids_S)
    assert data.num_read == 3, "another rank is told"
    (tmp_path / draft_vocabulary.FILE).write_text("{}")
    assert torch.equal(ids(facts)[0], ids_S), "a damaged file is made again"
    cfg.draft_vocabulary = 1
    for ranks in (Alone(), Alone(rank=1, first=ConfigError("no room", where="draft_vocabulary"))):
        with pytest.raises(ConfigError, match="draft_vocabulary"):
            ids(None, ranks)


def test_given_ids_are_taken_and_not_exchanged(tmp_path):
    file, data = tmp_path / "ids", Labels([1, 5], [5, 5, 2], [2, 7])
    file.write_text("7 1")
    cfg = DrafterConfig(draft_vocabulary=2, draft_vocabulary_ids=str(file))
    ids_S, facts = of_run(tmp_path, cfg, None, data, data, INFO, Alone())
    assert ids_S.tolist() == [1, 7]
    assert facts["train_coverage"] == 1 / 5
    file.write_text("[1, 6]")
    with pytest.raises(MismatchError, match="another draft vocabulary"):
        of_run(tmp_path, cfg, facts, data, data, INFO, Alone())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder, the cache's store) with a finished run of four updates in `run`."""
    root = tmp_path_factory.mktemp("vocabulary")
    tiny_cache(root / "cache")
    train_run(_config(root, "run"))
    return root, Store.open(str(root / "cache"))


def _config(root, name, **keys):
    keys = {"drafter__draft_vocabulary": 12} | keys
    return tiny_config(root / "cache", root / name, steps=4, **keys)


@pytest.mark.slow
def test_a_run_counts_its_labels_and_says_so(world, capsys):
    root, store = world
    record = read_record(root / "run")
    snapshot, reader = store.snapshot("latest"), store.reader()
    labels = {
        split: [
            token
            for index in snapshot.indices(split)
            for token in reader.read_tokens(snapshot.ids[index])[snapshot.mask(index)].tolist()
        ]
        for split in ("train", "heldout")
    }
    tensors = checkpoint.load(checkpoint.find(root / "run", "last"))[0]
    ids = tensors["draft_ids"].tolist()
    assert ids == sorted(ids)
    assert len(ids) == record.draft_vocabulary["size"] == 12
    assert 0 in ids
    rare = max(labels["train"].count(t) for t in range(40) if t not in ids)
    assert all(labels["train"].count(t) >= rare for t in ids if t)
    for split, tokens in labels.items():
        share = sum(token in ids for token in tokens) / len(tokens)
        assert record.draft_vocabulary[f"{split}_coverage"] == pytest.approx(share)
    train_run(_config(root, "again", optimizer__lr=0.5))
    said = "".join(capsys.readouterr())
    assert f"{record.draft_vocabulary['train_coverage']:.2%} of the training labels" in said
    other = read_record(root / "again")
    assert other.draft_vocabulary == record.draft_vocabulary
    assert other.result["digest"] == record.result["digest"]


@pytest.mark.slow
def test_what_comes_after_training_needs_only_the_checkpoint(world):
    root, _ = world
    loaded = load_run(root / "run")
    assert loaded.head_VD.shape == (12, 16)
    assert torch.equal(loaded.head_VD, loaded.embed_VD[loaded.drafter.draft_ids])
    measured = measure(EvalConfig(run_dir=str(root / "run"), decode=False))
    assert measured["heldout_loss"] == read_record(root / "run").result["heldout"]["heldout_loss"]
    assert measured["draft_vocabulary"]["size"] == 12
    out = root / "out"
    assert export.export(ExportConfig(run_dir=str(root / "run"), output=str(out))) == 0
    model = DrafttapeModel.from_pretrained(out, dtype=torch.bfloat16)
    assert torch.equal(model.draft_ids, loaded.drafter.draft_ids)
    from stage2_train.noise_probe import noise_at

    noise_at(root / "run", "last", loaded.config, 2)
    branched = _config(root, "branch", drafter__draft_vocabulary=9, optimizer__lr=0.1)
    branched.branch.run_dir, branched.trainer.steps = str(root / "run"), 5
    train_run(branched)
    assert read_record(root / "branch").draft_vocabulary["size"] == 9


@pytest.mark.slow
def test_a_run_with_given_ids(world, monkeypatch):
    root, _ = world
    file = root / "ids.json"
    file.write_text(json.dumps([0, 3, 4, 9, 38]))
    keys = {"drafter__draft_vocabulary": None, "drafter__draft_vocabulary_ids": str(file)}
    wrong = _config(root, "given", **keys | {"drafter__draft_vocabulary": 4})
    with pytest.raises(ConfigError, match="has 5 ids, 4 are asked for"):
        train_run(wrong)
    assert not (root / "given").exists()
    train_run(_config(root, "given", **keys))
    record = read_record(root / "given")
    assert (record.draft_vocabulary["size"], record.config["drafter"]["draft_vocabulary"]) == (5, 5)
    assert load_run(root / "given").drafter.draft_ids.tolist() == [0, 3, 4, 9, 38]
    out = root / "given-out"
    export.export(ExportConfig(run_dir=str(root / "given"), output=str(out)))
    assert record.draft_vocabulary["digest"] in (out / "README.md").read_text()
    # Another start counts nothing, wherever the file lies now; other ids are refused.
    moved = root / "moved.json"
    file.rename(moved)
    monkeypatch.setattr(draft_vocabulary, "count_labels", None)
    record.result = {}
    record.write(root / "given")
    keys["drafter__draft_vocabulary_ids"] = str(moved)
    train_run(_config(root, "given", **keys))
    record.write(root / "given")
    moved.write_text("0 3 4 9 37")
    with pytest.raises(MismatchError, match="another draft vocabulary"):
        train_run(_config(root, "given", **keys))
    assert load_run(root / "given").drafter.draft_ids.tolist() == [0, 3, 4, 9, 38]


@pytest.mark.slow
def test_resuming_with_others_is_refused(world):
    root, _ = world
    train_run(_config(root, "resumed"))
    record = read_record(root / "resumed")
    record.result = {}
    record.write(root / "resumed")
    with pytest.raises(MismatchError, match=r"drafter\.draft_vocabulary was 12, is 13"):
        train_run(_config(root, "resumed", drafter__draft_vocabulary=13))
    path = checkpoint.find(root / "resumed", "last")
    train_run(_config(root, "resumed"))  # nothing is left to do
    model, states, state = checkpoint.load(path)
    model["draft_ids"][-1] += 1
    checkpoint.save(root / "resumed", 4, model, states, {k: state[k] for k in state if k not in (
        "format", "step", "crc32c")})  # fmt: skip
    record.write(root / "resumed")
    with pytest.raises(MismatchError, match="draft vocabulary"):
        train_run(_config(root, "resumed"))
