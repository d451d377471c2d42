"""Generation: batches equal single answers, chats go turn after turn, a second run goes on."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from shared.config import compose
from shared.errors import ConfigError, DataError, Interrupted
from shared.fs import Lock
from shared.log import read_json_lines
from shared.target import load_target
from stage1_extract import generate as word
from stage1_extract.config import DataConfig, GenerateConfig
from stage1_extract.decoding import greedy, group_prompts
from stage1_extract.generate import generate
from stage1_extract.prompts import prepare


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))


PROMPTS = [
    {"id": "one", "turns": ["first question"]},
    {"id": "two", "turns": ["a", "and then?", "why?"]},
    {"turns": ["a longer question than the others"]},
    {"id": "chat", "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "an answer to be replaced"},
        {"role": "user", "content": "again"},
    ]},
]  # fmt: skip


def config(tmp_path: Path, *overrides: str, family: str = "llama") -> GenerateConfig:
    data = tmp_path / "prompts.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return compose(
        "generate",
        GenerateConfig,
        [
            "target=tiny_qwen3_5",
            f"target.model=random://{family}",
            f"data.paths=[{data}]",
            f"output={tmp_path / 'out.jsonl'}",
            "max_new_tokens=12",
            "batch_size=3",
            *overrides,
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "qwen3_next"])
def test_batched_answers_equal_single_ones_and_a_plain_greedy_loop(family, tmp_path):
    target = load_target(config(tmp_path, family=family).target)
    made = torch.Generator().manual_seed(0)
    sizes = [9, 9, 9] if target.info.has_linear_attention else [3, 9, 14]
    prompts = [torch.randint(0, 250, (n,), generator=made).tolist() for n in sizes]
    batched = greedy(target, prompts, 10)
    for prompt, answer in zip(prompts, batched, strict=True):
        assert greedy(target, [prompt], 10)[0] == answer
        ids = list(prompt)
        for token in answer.ids:
            output = target.model(input_ids=torch.tensor([ids]), use_cache=False)
            assert int(output.logits[0, -1].argmax()) == token
            ids.append(token)


def test_rows_that_end_leave_the_batch(tmp_path, monkeypatch):
    target = load_target(config(tmp_path).target)
    prompts = [[5, 6, 7], [1, 2, 3, 4], [9], [100, 101]]
    free = greedy(target, prompts, 8)
    # Make a token that some rows produce the end token: they stop there, the others go on.
    end = free[0].ids[2]
    monkeypatch.setattr("stage1_extract.decoding.end_token_ids", lambda target: [end])
    sizes = []
    ended = greedy(target, prompts, 8, on_tokens=sizes.append)
    for before, after in zip(free, ended, strict=True):
        cut = before.ids.index(end) if end in before.ids else 8
        assert after.ids == before.ids[:cut]
        assert after.cut == (end not in before.ids)
    assert sizes[0] == 4
    assert sizes[-1] < 4


def test_groups_are_neighbours_in_length_or_of_one_length():
    lengths = [5, 3, 5, 9, 3, 5]
    assert group_prompts(lengths, 2, equal=False) == [[1, 4], [0, 2], [5, 3]]
    assert group_prompts(lengths, 2, equal=True) == [[1, 4], [0, 2], [5], [3]]


@pytest.mark.slow
def test_chats_go_turn_after_turn_and_come_out_in_order(tmp_path, capsys):
    assert generate(config(tmp_path)) == 0
    shown = capsys.readouterr()
    assert "4 chats generated, 0 kept, 0 rejected" in shown.out
    assert "tok/s" in shown.err
    lines = read_json_lines(tmp_path / "out.jsonl")
    assert [line["id"] for line in lines[:2]] == ["one", "two"]
    roles = [[message["role"] for message in line["messages"]] for line in lines]
    pair = ["user", "assistant"]
    assert roles == [pair, pair * 3, pair, ["system", *pair, *pair]]
    assert [m["content"] for m in lines[1]["messages"][::2]] == PROMPTS[1]["turns"]
    # 12 tokens are too few for a random target to end: the cut is told and not learnt from.
    assert all(m["finish_reason"] == "length" for m in lines[0]["messages"][1::2])
    target = load_target(config(tmp_path).target)
    found = prepare(DataConfig(paths=[str(tmp_path / "out.jsonl")]), target.tokenizer)
    assert len(found.samples) == 4
    assert not any(sample.tokens_T[sample.mask_T].tolist().count(258) for sample in found.samples)


def test_the_second_turn_sees_the_first_answer(tmp_path):
    generate(config(tmp_path))
    line = read_json_lines(tmp_path / "out.jsonl")[1]
    target = load_target(config(tmp_path).target)
    prompt = target.tokenizer.apply_chat_template(
        line["messages"][:3], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    (answer,) = greedy(target, [prompt], 12)
    assert (
        target.tokenizer.decode(answer.ids, skip_special_tokens=True)
        == (line["messages"][3]["content"])
    )


@pytest.mark.slow
def test_a_second_run_goes_on_and_loads_no_model_when_all_is_there(tmp_path, monkeypatch):
    generate(config(tmp_path))
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    # As a kill would leave it: the last line cut short.
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[1:3]) + b'{"id": "cut')
    assert generate(config(tmp_path)) == 0
    assert output.read_bytes() == whole
    monkeypatch.setattr(word, "load_target", lambda *a: pytest.fail("the model was loaded"))
    assert generate(config(tmp_path)) == 0
    assert output.read_bytes() == whole


@pytest.mark.slow
def test_a_signal_keeps_finished_chats(tmp_path, monkeypatch):
    calls = []

    def stopping(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return greedy(*args, **kwargs)

    monkeypatch.setattr(word, "greedy", stopping)
    with pytest.raises(Interrupted):
        generate(config(tmp_path))
    kept = len(read_json_lines(tmp_path / "out.jsonl"))
    assert 0 < kept < 4
    monkeypatch.setattr(word, "greedy", greedy)
    assert generate(config(tmp_path)) == 0
    assert len(read_json_lines(tmp_path / "out.jsonl")) == 4


def test_two_runs_do_not_write_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(word, "load_target", lambda *a: pytest.fail("the model was loaded"))
    lock = Lock.take(tmp_path / ".out.jsonl.lock", wait=False)
    with pytest.raises(ConfigError, match="another drafttape generate"):
        generate(config(tmp_path))
    lock.release()
    assert list(tmp_path.glob("out*")) == []


def test_bad_prompts_are_counted_and_foreign_outputs_refused(tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"turns": ["ok"]}\n{"turns": []}\n{"text": "x"}\n')
    assert generate(config(tmp_path)) == 3
    assert "1 chats generated, 0 kept, 2 rejected" in capsys.readouterr().out
    data.write_text('{"turns": []}\n')
    with pytest.raises(DataError, match="no usable prompt"):
        generate(config(tmp_path))
    data.write_text('{"turns": ["ok"]}\n')
    (tmp_path / "out.jsonl").write_text('{"something": "else"}\n')
    with pytest.raises(DataError, match="something else"):
        generate(config(tmp_path))
