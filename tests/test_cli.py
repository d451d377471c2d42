"""The command line: help without torch, one sentence for a user's mistake, every YAML composes."""

import subprocess
import sys
from pathlib import Path

import pytest

from shared import cli
from shared.config import CONF, compose, describe, group_options, groups_of, load_object, to_plain
from shared.errors import ConfigError, DataError, DrafttapeError

ROOT = Path(__file__).resolve().parent.parent


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "shared.cli", *words], cwd=ROOT, capture_output=True, text=True
    )


def test_help_lists_every_word_with_an_example(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "example:" in shown
    for name, word in cli.WORDS.items():
        assert name in shown
        assert word.line in shown


@pytest.mark.parametrize("name", cli.WORDS)
def test_word_help_shows_every_key_with_a_meaning(name, capsys):
    assert cli.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    for key, _, meaning in describe(load_object(cli.WORDS[name].schema)):
        assert key in shown
        assert meaning, f"{name}: {key} has no meaning"


def test_help_and_config_errors_do_not_import_torch():
    probe = (
        "import sys, shared.cli as c\n"
        "for n in c.WORDS: c.main([n, '--help'])\n"
        "assert c.main(['train', 'nonsense=1']) == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "nonsense=1"], "nonsense"),
        (["train", "run_dir=x"], "cache.root"),
        (["train", "run_dir=x", "cache.root=y", "optimizer.lr=abc"], "optimizer.lr"),
        (["train", "run_dir=x", "cache.root=y", "optimizer=nope"], "optimizer"),
        (["extract", "cache.root=x", "data.paths=[a]", "cache.codec=zip"], "lossless"),
        (["trian"], "train"),
        (["train", "word"], "word"),
    ],
)
def test_a_users_mistake_is_one_line_with_exit_code_2(words, named, capsys):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err


OPTIONS = sorted(CONF.glob("*/*.yaml"))
# test_optimizer_conf.py and test_shipped.py compose these, to build what they describe.
BUILT = {"optimizer", "schedule", "target"}


def test_every_shipped_option_says_what_it_is_and_belongs_to_a_word():
    for path in OPTIONS:
        group = path.parent.name
        assert dict(group_options(group))[path.stem], f"{path} needs a first comment line"
        assert any(group in groups_of(name) for name in cli.WORDS), f"no word takes {group}"


@pytest.mark.parametrize(
    "path",
    [path for path in OPTIONS if path.parent.name not in BUILT],
    ids=lambda p: f"{p.parent.name}={p.stem}",
)
def test_every_shipped_option_composes(path):
    group, option = path.parent.name, path.stem
    name = next(name for name in cli.WORDS if group in groups_of(name))  # words share schemas
    schema = load_object(cli.WORDS[name].schema)
    required = [
        f"{key}=[x]" if key.endswith("paths") or key == "runs" else f"{key}=x"
        for key, default, _ in describe(schema)
        if default == "required" and not key.startswith("target.")
    ]
    assert to_plain(compose(name, schema, [f"{group}={option}", *required]))


def test_a_key_may_have_the_name_of_another_words_group():
    schema = load_object(cli.WORDS["eval"].schema)
    config = compose("eval", schema, ["run_dir=r", "data=[a.jsonl,'b c']", "cache=/moved"])
    assert (config.data, config.cache) == (["a.jsonl", "b c"], "/moved")
    assert compose("export", load_object(cli.WORDS["export"].schema),
                   ["run_dir=r", "output=o", "cache=/moved"]).cache == "/moved"  # fmt: skip
    for wrong, named in (("data=a", "list"), ("cache=[1]", "string"), ("optimizer=x", "optimizer")):
        with pytest.raises(ConfigError, match=named):
            compose("eval", schema, ["run_dir=r", wrong])


def test_errors_keep_their_parts_between_processes():
    import multiprocessing.reduction as reduction

    error = DataError("no sample", where="a.jsonl:3", do="Look at the rejects")
    again = reduction.ForkingPickler.loads(bytes(reduction.ForkingPickler.dumps(error)))
    assert isinstance(again, DataError)
    assert str(again) == str(error) == "a.jsonl:3: no sample. Look at the rejects"
    assert again.exit_code == 2


def test_config_error_is_a_drafttape_error():
    with pytest.raises(DrafttapeError):
        compose("train", load_object(cli.WORDS["train"].schema), ["seed=x"])
    with pytest.raises(ConfigError, match="seed"):
        compose("train", load_object(cli.WORDS["train"].schema), ["seed=x"])


def test_a_list_of_overrides_needs_no_quotes():
    from stage2_train.config import CodecReportConfig

    words = ["root=x", "out=y", "overrides=[experiment=demo, optimizer.lr=1e-3]", "codecs=[int8]"]
    config = compose("codec-report", CodecReportConfig, words)
    assert config.overrides == ["experiment=demo", "optimizer.lr=1e-3"]
    words[2] = "overrides=['experiment=demo']"
    assert compose("codec-report", CodecReportConfig, words).overrides == ["experiment=demo"]


@pytest.mark.parametrize(
    "text",
    ["Is Muon better, at (equal) tokens?", "it's 100 % = all", "a,b", "C:\\runs", "'q'",
     "C:\\runs (2)", "\\ (c)'s", "it\\'s (z)", "(y)\\"],
)  # fmt: skip
def test_text_needs_no_quotes_of_hydras(text):
    from shared.config import compose
    from stage2_train.config import CompareConfig

    found = compose("compare", CompareConfig, ["runs=[a,b]", f"question={text}"])
    assert found.question == text.strip("'")


def test_a_plans_text_reads_back_as_it_is():
    from shared.config import compose
    from stage2_train.config import CompareConfig
    from stage2_train.sweep_plan import to_overrides

    for text in ("C:\\runs (2)", "it's", "(y)\\"):
        words = to_overrides({"runs": ["a", text], "question": text})
        found = compose("compare", CompareConfig, words)
        assert (found.runs, found.question) == (["a", text], text)
