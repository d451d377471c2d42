"""Chats to samples: every row format, exact masks in every kind of template, rejects by reason."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from shared import tiny
from shared.errors import DataError
from shared.sample import sample_id
from stage1_extract.config import DataConfig, Thinking, TrainOn
from stage1_extract.masking import ChatTemplate
from stage1_extract.prompts import prepare, span_mask, split_of
from stage1_extract.rows import BadRow, Reject, normalize, read_rows

# Qwen3's own logic: think parts are shown after the last user turn only, and an empty one is put in
# where the last answer has none.
QWEN3 = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set think = '' -%}{%- set content = m.content -%}
{%- if m.reasoning_content is string -%}{%- set think = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set think = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last -%}
{{- '<|im_start|>assistant\\n<think>\\n' + think.strip('\\n') + '\\n</think>\\n\\n' }}
{{- content.lstrip('\\n') -}}
{%- else -%}{{- '<|im_start|>assistant\\n' + content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '"}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }} <|im_end|>"
    "{% else %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
GENERATION = tiny.TEMPLATE.replace(
    "{{ message['content'] }}<|im_end|>\n",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n",
)
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\ngreet\n</think>\n\nHello!"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "<think>\nhm, assistant\n4?\n</think>\n\nYes: 4"},
]


def tokenizer(template: str = tiny.TEMPLATE):
    made = tiny.byte_tokenizer()
    made.chat_template = template
    return made


def write(path: Path, rows: list) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def masked(template: str, messages: list, **data) -> list[str]:
    """What each span's tokens decode to."""
    made = tokenizer(template)
    rendered = ChatTemplate(made).render(messages, **data)
    coded = made.backend_tokenizer.encode(rendered.text, add_special_tokens=False)
    texts = []
    for span in rendered.spans:
        mask = span_mask(coded.offsets, [span])
        texts.append(made.decode(np.asarray(coded.ids)[mask]))
    return texts


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (tiny.TEMPLATE, [m["content"] + "<|im_end|>" for m in CHAT[1::2]]),
        (GENERATION, [m["content"] + "<|im_end|>" for m in CHAT[1::2]]),
        (LLAMA2, [m["content"] + " <|im_end|>" for m in CHAT[1::2]]),
        (BARE, [m["content"] for m in CHAT[1::2]]),
        (
            QWEN3,
            [
                "Hello!<|im_end|>",
                "4<|im_end|>",
                "<think>\nhm, assistant\n4?\n</think>\n\nYes: 4<|im_end|>",
            ],
        ),
    ],
    ids=["chatml", "generation-block", "llama2", "bare", "thinking"],
)
def test_trap_10_the_mask_is_the_assistants_text_and_end_token(template, wanted):
    assert masked(template, CHAT) == wanted


def test_trap_10_a_samples_own_mask_is_that_text(tmp_path):
    paths = write(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    (sample,) = prepare(DataConfig(paths=paths), tokenizer()).samples
    wanted = "".join(message["content"] + "<|im_end|>" for message in CHAT[1::2])
    assert tokenizer().decode(sample.tokens_T[sample.mask_T]) == wanted


def test_trap_10_an_empty_think_part_of_the_template_is_not_the_assistants():
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert masked(QWEN3, chat) == ["Hello<|im_end|>"]


def test_trap_10_reasoning_content_and_tool_calls_are_the_assistants():
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4", "reasoning_content": "it says 4"},
    ]
    assert masked(QWEN3, chat) == [
        '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "add"}\n</tool_call><|im_end|>',
        "<think>\nit says 4\n</think>\n\n4<|im_end|>",
    ]


def test_thinking_can_be_masked_and_only_the_last_turn_supervised():
    assert masked(QWEN3, CHAT, mask_thinking=True)[-1] == "Yes: 4<|im_end|>"
    assert masked(QWEN3, CHAT, last_only=True) == masked(QWEN3, CHAT)[-1:]


def test_text_that_looks_like_the_template_does_not_confuse_it():
    chat = [
        {"role": "user", "content": "say <|im_start|>assistant\nno<|im_end|>\n"},
        {"role": "assistant", "content": "  no\n"},
        {"role": "user", "content": "  no\n"},
        {"role": "assistant", "content": "no"},
    ]
    assert masked(tiny.TEMPLATE, chat) == ["  no\n<|im_end|>", "no<|im_end|>"]


def test_a_cut_answer_has_no_end_token_to_learn():
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "long", "finish_reason": "length"},
    ]
    assert masked(tiny.TEMPLATE, chat) == ["long"]


def test_a_template_that_rewrites_answers_is_refused():
    template = tiny.TEMPLATE.replace("message['content'] }}", "message['content'] | upper }}")
    with pytest.raises(BadRow, match="rewrites"):
        ChatTemplate(tokenizer(template)).render(CHAT)


def test_every_format_gives_the_same_sample(tmp_path):
    pair = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}
    text = tokenizer().apply_chat_template(list(pair), tokenize=False)
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    rows = [
        {"messages": list(pair)},
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]},
        {"messages": [pair[0], {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]},
        {"prompt": "a b", "completion": "c"},
        {"prompt": "a b", "response": "c"},
        {"instruction": "a b", "input": "", "output": "c"},
        {"text": text},
        {"input_ids": ids, "loss_mask": [0] * (len(ids) - 3) + [1, 1, 0]},
    ]
    for number, row in enumerate(rows):
        found = prepare(DataConfig(paths=write(tmp_path / f"{number}.jsonl", [row])), tokenizer())
        (sample,) = found.samples
        assert sample.id == sample_id(ids), row
        assert tokenizer().decode(sample.tokens_T[sample.mask_T]) == "c<|im_end|>", row
        assert sample.source == f"{tmp_path}/{number}.jsonl:1"


def test_files_may_be_compressed_parquet_arrays_and_globs(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": f"r{i}", "prompt": f"p{i}", "completion": "yes"} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.output_stream(str(tmp_path / "b.jsonl.zst"), compression="zstd") as file:
        file.write(lines)
    (tmp_path / "c.json").write_text(" " + json.dumps(rows, indent=1))
    with pyarrow.output_stream(str(tmp_path / "e.json.zst"), compression="zstd") as file:
        file.write(json.dumps(rows).encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    wanted = None
    for pattern in ("a*", "b*", "c*", "d*", "e*"):
        found = prepare(DataConfig(paths=[f"{tmp_path}/{pattern}"]), tokenizer())
        ids = [(sample.id, sample.name) for sample in found.samples]
        wanted = wanted or ids
        assert ids == wanted
        assert len(ids) == 3
    both = prepare(DataConfig(paths=[f"{tmp_path}/*"]), tokenizer())
    assert (len(both.samples), both.num_duplicates, both.num_rows) == (3, 12, 15)


def test_bad_lines_are_rejected_with_line_and_reason_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "x.jsonl"
    good = {"prompt": "p", "completion": "good"}
    lines = [
        json.dumps(good),
        "{not json",
        "[1]",
        json.dumps({"other": 1}),
        json.dumps({"messages": []}),
        json.dumps({"messages": [{"role": "robot", "content": "x"}]}),
        json.dumps({"messages": [{"role": "user", "content": None}]}),
        json.dumps({"messages": [{"role": "user", "content": "only asked"}]}),
        json.dumps({"turns": ["no answers"]}),
        json.dumps({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}),
        json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}),
        json.dumps({"input_ids": [1, 2, 99999], "loss_mask": [0, 1, 1]}),
        json.dumps({"prompt": "<|mask|>", "completion": "good"}),
        "\xff",
        json.dumps(good),
    ]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    mask_token = tokenizer().convert_tokens_to_ids("<|mask|>")
    found = prepare(DataConfig(paths=[str(path)]), tokenizer(), mask_token, tiny.VOCAB)
    assert [sample.source for sample in found.samples] == [f"{path}:1"]
    assert (found.num_rows, found.num_duplicates, len(found.rejects)) == (15, 1, 13)
    reasons = {r.source.rpartition(":")[2]: r.reason for r in found.rejects}
    for line, part in {
        2: "not JSON",
        3: "not an object",
        4: "no messages",
        5: "empty",
        6: "'robot'",
        7: "no text",
        8: "no assistant turn",
        9: "generate",
        10: "every token is supervised",
        11: "too few supervised",
        12: "not in the vocabulary",
        13: "mask token",
        14: "UTF-8",
    }.items():
        assert part in reasons[str(line)], line


def test_nothing_usable_is_an_error_that_says_why(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{\n")
    with pytest.raises(DataError, match=r"no usable sample in 1 rows.*not JSON"):
        prepare(DataConfig(paths=[str(path)]), tokenizer())
    with pytest.raises(DataError, match="no such file"):
        prepare(DataConfig(paths=[str(tmp_path / "missing")]), tokenizer())
    with pytest.raises(DataError, match=r"data\.paths"):
        prepare(DataConfig(paths=[]), tokenizer())
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"can't be read|not a Parquet"):
        prepare(DataConfig(paths=[str(tmp_path / "bad.parquet")]), tokenizer())


def test_rows_of_tokens_need_no_chat_template(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [], "loss_mask": []}]
    found = prepare(DataConfig(paths=write(tmp_path / "x.jsonl", rows)), tokenizer(""))
    assert len(found.samples) == len(found.rejects) == 1


def test_truncation_cuts_the_mask_with_the_tokens(tmp_path):
    paths = write(tmp_path / "x.jsonl", [{"messages": CHAT[:2]}])
    whole = prepare(DataConfig(paths=paths), tokenizer()).samples[0]
    cut = prepare(DataConfig(paths=paths, max_tokens=30), tokenizer())
    assert cut.num_cut == 1
    np.testing.assert_array_equal(cut.samples[0].tokens_T, whole.tokens_T[:30])
    np.testing.assert_array_equal(cut.samples[0].mask_T, whole.mask_T[:30])
    assert cut.samples[0].id != whole.id


def test_mask_rules_change_masks_and_no_ids(tmp_path):
    paths = write(tmp_path / "x.jsonl", [{"messages": CHAT}])

    def one(**changes):
        return prepare(DataConfig(paths=paths, **changes), tokenizer(QWEN3)).samples[0]

    plain = one()
    for changes in ({"train_on": TrainOn.last}, {"thinking": Thinking.mask}):
        other = one(**changes)
        assert other.id == plain.id
        assert 0 < other.mask_T.sum() < plain.mask_T.sum()
    assert one(thinking=Thinking.drop).id != plain.id


def test_trap_13_an_edited_row_changes_its_own_id_only(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": "yes"} for i in range(5)]
    before = prepare(DataConfig(paths=write(tmp_path / "x.jsonl", rows)), tokenizer())
    rows[2]["completion"] = "no!"
    after = prepare(DataConfig(paths=write(tmp_path / "x.jsonl", rows)), tokenizer())
    same = [a.id == b.id for a, b in zip(before.samples, after.samples, strict=True)]
    assert same == [True, True, False, True, True]


def test_the_split_is_a_function_of_the_id_alone():
    ids = [sample_id([i]) for i in range(4000)]
    held = [split_of(name, 0.1, 0) == "heldout" for name in ids]
    assert 0.08 < np.mean(held) < 0.12
    assert held != [split_of(name, 0.1, 1) == "heldout" for name in ids]
    assert all(split_of(name, 0.0, 0) == "train" for name in ids)


def test_a_row_that_names_its_split_is_put_there(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": "y", "split": s}
            for i, s in enumerate(["train", "eval", "test", "dev"])]  # fmt: skip
    data = DataConfig(paths=write(tmp_path / "x.jsonl", rows), heldout=0.0)
    prepared = prepare(data, tokenizer())
    assert [sample.split for sample in prepared.samples] == ["train", "heldout", "heldout"]
    assert "'dev'" in prepared.rejects[0].reason


def test_rows_keep_system_prompts_and_limits(tmp_path):
    row = normalize({"system": "be short", "conversations": [{"from": "human", "value": "x"}]}, "s")
    assert row.messages == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "x"},
    ]
    paths = write(tmp_path / "x.jsonl", [{"turns": ["a"]}, {"turns": []}, {"turns": ["c"]}])
    kinds = [isinstance(row, Reject) for row in read_rows(paths, limit=2)]
    assert kinds == [False, True]
