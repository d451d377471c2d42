"""What users get wrong: one sentence, and nothing wrong goes on silently.

Each case here once ended in a traceback, in a run that made no sense, or in half a result.
"""

import json
import os
import zlib
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import cli
from shared.errors import ConfigError, CorruptionError, DataError, MismatchError
from shared.log import read_json_lines
from shared.recode import recode
from shared.record import RunRecord
from stage1_extract.generate import _existing
from stage1_extract.rows import Reject, data_files, read_rows
from stage2_train.build import train_run
from stage2_train.compare import analyse, compare
from stage2_train.config import CompareConfig, EvalConfig, SweepConfig
from stage2_train.eval_table import _messages, names_of, read_prompts
from stage2_train.evaluate import measure
from stage2_train.export import reload_difference
from stage2_train.runs import read_run
from stage2_train.sweep import prepare
from stage2_train.sweep_plan import read_plan
from tests.run_tools import learning, write_run
from tests.tiny_cache import tiny_cache, tiny_config

TRAIN = ["train", "run_dir=x", "cache.root=y"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*TRAIN, "trainer.steps=-1"], "trainer.steps=-1 must be at least 1"),
        ([*TRAIN, "trainer.epochs=nan"], "trainer.epochs=nan must be a finite number"),
        ([*TRAIN, "trainer.epochs=inf"], "finite"),
        ([*TRAIN, "trainer.clip_norm=-1"], "trainer.clip_norm=-1.0 must be above 0"),
        ([*TRAIN, "optimizer.lr=nan"], "optimizer.lr"),
        ([*TRAIN, "optimizer.betas=[0.9]"], "must have 2 values"),
        ([*TRAIN, "optimizer.betas=[0.9,1]"], "must be below 1"),
        ([*TRAIN, "loss.gamma=0"], "loss.gamma"),
        ([*TRAIN, "loader.workers=-1"], "loader.workers"),
        ([*TRAIN, "schedule.floor=2"], "must be at most 1"),
        (["train", "cache.root=y", "run_dir="], "needs a value for run_dir"),
        (["train", "run_dir=x", "cache.root=' '"], "needs a value for cache.root"),
        (["extract", "data.paths=[a]", "cache.root=x", "workers=-1"], "workers=-1"),
        (["eval", "x", "max_new_tokens=0"], "max_new_tokens"),
        (["mup", "widths=[64]"], "two different widths"),
        (["mup", "widths=[]"], "two different widths"),
        ([*TRAIN, "init_from="], "needs a value for init_from"),
        (["extract", "data.paths=[a/b]", "cache.root=x"], "hub is data.dataset=a/b"),
        (
            ["extract", "data.paths=[pyproject.toml]", "cache.root=x", "ray_address=auto"],
            "executor=ray",
        ),
        (["extract", "data.dataset=pyproject.toml", "cache.root=x"], "it is a file"),
        (
            [
                "extract",
                "target=tiny_qwen3_5",
                "data.paths=[pyproject.toml]",
                "cache.root=x",
                "target.quantization={quant_method:fp8}",
            ],
            "made in memory",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_before_anything_runs(words, named, capsys):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.err.count("\n") == 1
    assert not Path("x").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["codec-report", "nowhere", "out=FILE"],
        ["compare", "nowhere", "elsewhere", "report=FILE/report.html"],
        ["compare", "nowhere", "elsewhere", "summary=FILE/summary.json"],
        ["mask-audit", "data.paths=[nowhere]", "html=FILE/audit.html"],
        ["mup", "report=FILE/mup.html"],
        ["export", "nowhere", "output=FILE/drafter"],
        ["inspect", "RUN", "report=FILE/page.html"],
    ],
)
def test_an_output_that_cant_be_written_is_said_before_the_work(words, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    run = write_run(tmp_path / "run", loss=learning(3))
    assert cli.main([w.replace("FILE", str(file)).replace("RUN", str(run)) for w in words]) == 2
    assert "a part of the path is a file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_every_line_of_a_prompt_file_is_a_prompt_or_an_error(tmp_path):
    def tokenizer(text):
        return {"input_ids": list(text.encode())}

    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"turns": ["b"]}')  # no newline at the end
    found = read_prompts(str(path), tokenizer, None)
    assert found == [("p:1", [97]), ("p:3", [98])]
    assert read_prompts(str(path), tokenizer, 1) == found[:1]
    for line, says in (("nonsense", "not JSON"), ('{"text": "a"}', "to ask")):
        path.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(DataError, match=rf"p\.jsonl:2.*{says}"):
            read_prompts(str(path), tokenizer, None)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, capsys):
    run_dir = tmp_path / "lr=1e-3"
    run_dir.mkdir()
    assert cli.main(["eval", str(run_dir)]) == 2
    assert "no run is there" in capsys.readouterr().err


def test_a_full_disk_outside_the_cache_is_a_sentence_too(monkeypatch, capsys):
    def full(config):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    real, word = cli.load_object, cli.WORDS["status"]
    monkeypatch.setattr(cli, "load_object", lambda path: full if path == "full" else real(path))
    monkeypatch.setitem(cli.WORDS, "status", replace(word, run="full"))
    assert cli.main(["status", "here"]) == 2
    assert "metrics.jsonl: no space is left" in capsys.readouterr().err


BAD_LINES = {
    '{"messages": [{"role": ["user"], "content": "a"}]}': "unknown role",
    '{"messages": [{"role": "user", "content": "a \\ud800"}]}': "surrogate",
    '{"messages": [{"role": "assistant", "content": "a", "reasoning_content": 5}]}': "reasoning",
    '{"messages": [{"role": "assistant", "content": "a", "tool_calls": {"a": 1}}]}': "tool_calls",
    '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]}]}': (
        "tool_calls"
    ),
    '{"input_ids": [99999999999999999999, 1], "loss_mask": [0, 1]}': "31 bits",
    "[" * 200_000: "nested too deeply",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_a_reject_and_the_rest_goes_on(line, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(line + '\n{"text": "fine"}\n')
    first, second = read_rows([str(path)])
    assert isinstance(first, Reject)
    assert BAD_LINES[line] in first.reason
    assert second.text == "fine"


def test_half_a_surrogate_as_bytes_is_a_reject(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a \xed\xa0\x80"}\n')
    (row,) = read_rows([str(path)])
    assert isinstance(row, Reject)


def test_parquets_null_keys_hide_no_values(tmp_path):
    path = tmp_path / "data.jsonl"
    message = {"role": None, "from": "human", "content": None, "value": "Hi"}
    path.write_text(json.dumps({"conversations": [message]}) + "\n")
    (row,) = read_rows([str(path)])
    assert row.messages == [{"role": "user", "content": "Hi"}]


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = bytearray(packed.compress(os.urandom(4000)) + packed.flush())
    data[12] ^= 0xFF  # inside the compressed stream
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"data\.jsonl\.gz"):
        list(read_rows([str(path)]))


def test_an_unknown_home_directory_is_a_missing_file():
    with pytest.raises(DataError, match="no such file"):
        data_files(["~nobody-of-this-name/data.jsonl"])


def test_chats_of_two_targets_do_not_mix_in_one_file(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"key": "k", "target": "one"}\n')
    assert _existing(path, "one") == {"k"}
    with pytest.raises(MismatchError, match=r"chats of one, these would be of two"):
        _existing(path, "two")


@pytest.mark.slow
def test_comparing_unfinished_runs_says_so(tmp_path, capsys):
    paths = [
        write_run(tmp_path / name, loss=learning(40, arm=arm), steps=100, optimizer={"name": name})
        for arm, name in enumerate(("adamw", "muon"))
    ]
    config = CompareConfig(runs=list(map(str, paths)), report=str(tmp_path / "report.html"))
    assert compare(config) == 0
    assert "muon has made 40 of 100 planned updates" in capsys.readouterr().out
    assert "Not finished:" in (tmp_path / "report.html").read_text()
    finished = write_run(tmp_path / "f", loss=learning(40), optimizer={"name": "sgd"})
    assert read_run(finished).unfinished is None


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl", "digests.jsonl"])
@pytest.mark.parametrize("text", ["[1]\n", "{}\n", '{"step": "x"}\n', "nonsense\n", "\x00\n"])
def test_a_damaged_run_is_an_error_that_names_the_file(file, text, tmp_path):
    paths = [
        write_run(tmp_path / name, loss=learning(5), optimizer={"name": name}) for name in "ab"
    ]
    (paths[1] / file).write_text(text)
    if file == "run.json" and text.startswith("{"):
        return
    with pytest.raises((DataError, CorruptionError, MismatchError), match=str(paths[1])):
        analyse(CompareConfig(runs=list(map(str, paths)), report=str(tmp_path / "r.html")))


def test_json_lines_name_the_line_that_is_none(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(CorruptionError, match=r"lines\.jsonl:2"):
        read_json_lines(path)


def test_eval_of_no_run_says_that_none_is_there(tmp_path):
    with pytest.raises(DataError, match="no run is there"):
        measure(EvalConfig(run_dir=str(tmp_path), device="cpu"))


def test_a_run_finds_its_cache_from_any_directory(tmp_path, monkeypatch):
    def record(run_dir, root):
        config = {"run_dir": run_dir, "cache": {"root": root}}
        return RunRecord(config, "s", "d", [], {}, 1, "0")

    run_dir = tmp_path / "build" / "runs" / "a"
    run_dir.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    relative = record("build/runs/a", "build/cache")
    assert relative.cache_root(Path("build/runs/a")) == "build/cache"
    monkeypatch.chdir(tmp_path / "build")
    assert relative.cache_root(Path("runs/a")) == str(tmp_path / "build" / "cache")
    assert relative.cache_root(tmp_path / "build") == "build/cache"
    assert record("build/runs/a", "/x").cache_root(run_dir) == "/x"
    assert record("build/runs/a", "s3://b/x").cache_root(run_dir) == "s3://b/x"
    assert record(str(run_dir), "x").cache_root(run_dir) == "x"


@pytest.mark.parametrize(
    "text",
    [
        "train: {cache.root: x}\ngrid: {optimizer.lr: {log: 5}}",
        "train: {cache.root: x}\ngrid: {optimizer.lr: {log: [1, 2, x]}}",
        "train: {cache.root: x}\nrandom: {trials: many}",
        "train: {cache.root: x}\narms: {muon: 5}",
        b"name: caf\xe9",
    ],
)
def test_a_plan_with_a_wrong_value_is_refused(text, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"plan\.yaml"):
        read_plan(path)


@pytest.mark.parametrize("word", [["extract", "cache.root=c"], ["generate", "output=o.jsonl"]])
def test_an_unknown_device_is_refused_before_anything_is_written(
    word, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}
    Path("data.jsonl").write_text(json.dumps(line) + "\n")
    words = [*word, "target=tiny_qwen3_5", "data.paths=[data.jsonl]", "device=banana"]
    assert cli.main(words) == 2
    assert "'banana' can't be used" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_checkpoints_of_an_unknown_run_are_not_gone_on_from(tmp_path):
    tiny_cache(tmp_path / "cache")
    train_run(tiny_config(tmp_path / "cache", tmp_path / "run", steps=1))
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(MismatchError, match=r"no run\.json"):
        train_run(tiny_config(tmp_path / "cache", tmp_path / "run", steps=2))
    with pytest.raises(DataError, match="no run is there"):
        measure(EvalConfig(run_dir=str(tmp_path / "run"), device="cpu"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*TRAIN, "+optimizer.lrr=1"], "there is no key optimizer.lrr"),
        ([*TRAIN, "experiment=nope"], "experiment/nope"),
        ([*TRAIN, "seed=(1"], "Value '(1' of type 'str' could not be converted to Integer"),
        ([*TRAIN, "seed=1,2"], "Value '1,2' of type 'str' could not be converted to Integer"),
        ([*TRAIN, "drafter.layer_types=[a"], "can't be read; quote"),
        ([*TRAIN, "drafter.layer_types=full_attention"], "it is a list: [a,b]"),
        (["eval", "x", "target.name=y"], "the group is null"),
        (["eval", "x", "target=smollm2"], "no run is there"),
        (["plan", "tokens=1", "data.template={a: 1}", "target.num_taps=99"], "99 taps"),
    ],
)
def test_overrides_say_what_is_wrong_with_them(words, named, capsys):
    assert cli.main(words) == 2
    shown = capsys.readouterr().err
    assert named in shown
    assert shown.count("\n") == 1


def test_a_cache_is_not_recoded_into_itself_or_into_another_loss(tmp_path):
    store = tiny_cache(tmp_path / "cache", count=5, heldout=1)
    for place in ("cache", "cache/", "other/../cache", "cache/inside"):
        with pytest.raises(ConfigError, match="a place of its own"):
            recode(store, "int8", str(tmp_path / place))
    recode(store, "int8", str(tmp_path / "copy"))
    with pytest.raises(MismatchError, match="stored as int8"):
        recode(store, "bits4", str(tmp_path / "copy"))
    assert {store.shard(name).codec for name in store.shard_ids()} == {"lossless"}


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("random: {trials: 0}", "whole number from 1"),
        ("random: {trials: .nan}", "whole number from 1"),
        ("random: {trials: 2.5}", "whole number from 1"),
        ("random: {seed: 1}", "whole number from 1"),
        ("seeds: [-1]", "whole numbers from 0"),
        ("seeds: [true]", "whole numbers from 0"),
        ("grid: {optimizer.lr: {log: [1.0e-3, .inf, 3]}}", "neither a list nor"),
        ("grid: {optimizer.lr: {log: [1.0e-3, 1.0, 2.5]}}", "neither a list nor"),
    ],
)
def test_a_plan_that_means_no_trial_is_refused(lines, named, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("train: {cache.root: x}\n" + lines)
    with pytest.raises(ConfigError, match=named):
        read_plan(path)


def test_an_evaluation_key_of_a_plan_is_checked_before_anything_runs(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("train: {cache.root: x}\neval: {decod: false}\n")
    with pytest.raises(ConfigError, match="decod"):
        prepare(SweepConfig(plan=str(path), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_data_sets_of_one_name_are_both_in_the_table():
    paths = ["a/test.jsonl", "b/test.jsonl", "c.jsonl", "c.jsonl"]
    assert list(names_of(paths).values()) == paths[:3]
    assert list(names_of(paths)) == ["a/test.jsonl", "b/test.jsonl", "c"]


def test_messages_of_another_form_are_no_prompt():
    for messages in (["hi"], [{"role": "user", "content": [{"text": "hi"}]}], [{"role": "user"}]):
        assert _messages({"messages": messages}) == []


def test_an_export_is_read_again_under_a_relative_name(tmp_path, monkeypatch):
    def run(command, **settings):
        assert Path(command[3]) == tmp_path / "made"
        save_file(load_file(command[4]) | {"out": torch.zeros(2)}, command[5])
        return CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stage2_train.export.subprocess.run", run)
    given = torch.zeros(3, 2, 4), torch.zeros(2, 4)
    monkeypatch.setattr("stage2_train.export._inputs", lambda drafter: given)
    monkeypatch.setattr("stage2_train.export._draft", lambda *_: torch.zeros(2))
    monkeypatch.setattr("stage2_train.export._difference", lambda *_: 0.0)
    assert reload_difference(Path("made"), None, "auto") == 0.0
