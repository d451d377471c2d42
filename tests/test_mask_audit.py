"""mask-audit shows what is trained on, as text and as a page."""

import json

from shared.config import compose
from stage1_extract.config import MaskAuditConfig
from stage1_extract.mask_audit import mask_audit, terminal

CHATS = [
    {"id": "a", "prompt": "what is <b>?", "completion": "an & answer: ä"},
    {"id": "b", "messages": [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "eins"},
        {"role": "user", "content": "two"}, {"role": "assistant", "content": "zwei"},
    ]},
    "broken",
]  # fmt: skip


def test_supervised_text_is_marked_in_terminal_and_page(tmp_path, capsys):
    data, page = tmp_path / "x.jsonl", tmp_path / "audit.html"
    data.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    overrides = ["target=tiny_qwen3_5", f"data.paths=[{data}]", f"html={page}"]
    assert mask_audit(compose("mask-audit", MaskAuditConfig, overrides)) == 0
    shown = capsys.readouterr().out
    assert "assistant\n⟦an & answer: ä<|im_end|>⟧\n" in shown
    assert "⟦eins<|im_end|>⟧" in shown
    assert "⟦zwei<|im_end|>⟧" in shown
    assert "2, 1 rejects" in shown
    assert "1.50 supervised spans a sample, at most 2" in shown
    text = page.read_text()
    assert "<mark>an &amp; answer: ä&lt;|im_end|&gt;</mark>" in text
    assert "what is &lt;b&gt;?" in text
    assert "http" not in text.replace("http-equiv", "")


def test_colours_are_for_terminals_only():
    runs = [("plain", False), ("learnt", True)]
    assert terminal(runs, False) == "plain⟦learnt⟧"
    assert "\033[30;42mlearnt\033[0m" in terminal(runs, True)


def test_control_characters_of_the_data_never_reach_the_terminal():
    shown = terminal([("a\x1b[31m\u202e\tb\n", True), ("שלום 👩\u200d👧", False)], False)
    assert shown == "⟦a�[31m�\tb\n⟧שלום 👩\u200d👧"
