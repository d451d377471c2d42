"""The `drafttape` command: a table of words, their help, and one-sentence errors.

A word's schema and function are named as text and imported only when needed, so that
`--help` answers without torch and `shared` depends on neither stage.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from shared.config import compose, describe, group_options, groups_of, load_object, quote
from shared.errors import DrafttapeError
from shared.fs import disk_fault
from shared.log import say


@dataclass(frozen=True)
class Word:
    """One word of the command: its help line, an example, and where its code lives."""

    line: str
    example: str
    schema: str
    run: str
    positional: tuple[str, ...] = ()


WORDS = {
    "generate": Word(
        "let the target answer prompts, to make training conversations",
        "drafttape generate data.paths=[examples/prompts.jsonl] output=conversations.jsonl",
        "stage1_extract.config:GenerateConfig",
        "stage1_extract.generate:generate",
    ),
    "plan": Word(
        "tokens, bytes per codec and hours of an extraction, before it runs and without weights",
        "drafttape plan target=qwen3_6_27b data.paths=[chats.jsonl]",
        "stage1_extract.config:PlanConfig",
        "stage1_extract.plan_word:plan",
    ),
    "extract": Word(
        "run the target over chats and write its hidden states into a cache",
        "drafttape extract target=smollm2 data.paths=[chats.jsonl] cache.root=cache",
        "stage1_extract.config:ExtractConfig",
        "stage1_extract.build:extract",
    ),
    "mask-audit": Word(
        "show which tokens of the data are trained on, coloured, with statistics",
        "drafttape mask-audit data.paths=[chats.jsonl] html=audit.html",
        "stage1_extract.config:MaskAuditConfig",
        "stage1_extract.mask_audit:mask_audit",
    ),
    "status": Word(
        "how a running extraction or training stands, from another terminal",
        "drafttape status build/demo/cache",
        "stage1_extract.config:StatusConfig",
        "stage1_extract.status:status",
        ("root",),
    ),
    "cache": Word(
        "list, verify and manage a cache: drafttape cache ls|verify|diff|gc|… ROOT",
        "drafttape cache verify build/demo/cache",
        "stage1_extract.config:CacheWordConfig",
        "stage1_extract.cache_word:cache",
        ("action", "root", "args..."),
    ),
    "train": Word(
        "train a drafter from a cache",
        "drafttape train cache.root=cache run_dir=runs/muon optimizer=muon trainer.steps=150",
        "stage2_train.config:TrainConfig",
        "stage2_train.build:train",
    ),
    "eval": Word(
        "held-out loss, accuracy per slot, estimated and real acceptance length of a run",
        "drafttape eval runs/muon",
        "stage2_train.config:EvalConfig",
        "stage2_train.evaluate:evaluate",
        ("run_dir",),
    ),
    "export": Word(
        "write a run's drafter as a Hugging Face directory that loads without drafttape",
        "drafttape export runs/muon output=my-drafter",
        "stage2_train.config:ExportConfig",
        "stage2_train.export:export",
        ("run_dir",),
    ),
    "compare": Word(
        "compare runs on proven-identical inputs; writes an HTML report and a verdict",
        "drafttape compare runs/adamw runs/muon report=report.html",
        "stage2_train.config:CompareConfig",
        "stage2_train.compare:compare",
        ("runs...",),
    ),
    "inspect": Word(
        "what a run's updates did: sizes, clipping, decay, spectra; writes an HTML page",
        "drafttape inspect runs/muon",
        "stage2_train.config:InspectConfig",
        "stage2_train.inspect_run:inspect",
        ("run_dir",),
    ),
    "mup": Word(
        "write a base-shapes file for muP; check that activations move alike at every width",
        "drafttape mup drafter=demo width=576 base_shapes=base.json report=mup.html",
        "stage2_train.config:MupConfig",
        "stage2_train.mup_check:mup_word",
    ),
    "codec-report": Word(
        "what each codec costs on a cache: bits, error, KL, speed and, with train=true, acceptance",
        "drafttape codec-report build/demo/cache out=build/codecs",
        "stage2_train.config:CodecReportConfig",
        "stage2_train.codec_report:codec_report",
        ("root",),
    ),
    "sweep": Word(
        "run a plan of trials from one cache, resumable; maps, near-optimal region, robust pick",
        "drafttape sweep docs/studies/muon-on-gdn.yaml out=build/sweep launcher=joblib jobs=2",
        "stage2_train.config:SweepConfig",
        "stage2_train.sweep:sweep",
        ("plan",),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one word; returns its exit code (1 bad data or training, 2 a user's mistake)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        _help_all()
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        from importlib.metadata import version

        say(version("drafttape"))
        return 0
    try:
        if name not in WORDS:
            import difflib

            near = difflib.get_close_matches(name, WORDS, n=1)
            hint = f"Did you mean {near[0]}?" if near else "See drafttape --help"
            raise DrafttapeError(f"there is no word {name!r}", do=hint)
        word = WORDS[name]
        if any(argument in {"-h", "--help"} for argument in rest):
            _help_word(name, word)
            return 0
        schema = load_object(word.schema)
        config = compose(name, schema, _positional(word, rest))
        return int(load_object(word.run)(config) or 0)
    except DrafttapeError as error:
        sys.stderr.write(f"drafttape {name}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"drafttape {name}: stopped by the keyboard; the same command goes on\n")
        return 4
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        if (fault := disk_fault(error)) is None:
            raise
        sys.stderr.write(f"drafttape {name}: {fault}\n")
        return fault.exit_code


def _positional(word: Word, arguments: list[str]) -> list[str]:
    """Turns words without `=` into overrides, in the order the word names them."""
    plain = [text for text in arguments if _is_plain(text)]
    overrides = [text for text in arguments if not _is_plain(text)]
    for key in word.positional:
        if key.endswith("..."):
            if plain:
                overrides.append(f"{key[:-3]}=[{','.join(quote(text) for text in plain)}]")
            plain = []
        elif plain:
            overrides.append(f"{key}={quote(plain.pop(0))}")
    if plain:
        raise DrafttapeError(f"{plain[0]!r} is not key=value", do="Overrides look like key=value")
    return overrides


def _is_plain(text: str) -> bool:
    """Whether a word is a value, not an override; also runs/lr=1e-3, if such a path is there."""
    key, equals, _ = text.partition("=")
    if equals:
        return "/" in key and Path(text).exists()
    return not text.startswith("~")


def _help_all() -> None:
    say("drafttape records a target model's hidden states once and replays them for every drafter")
    say("experiment.\n\nusage: drafttape WORD [key=value …]\n")
    width = max(map(len, WORDS))
    for name, word in WORDS.items():
        say(f"  {name:<{width}}  {word.line}")
    say("\nexample:\n  " + WORDS["train"].example)
    say("\ndrafttape WORD --help lists a word's keys with meaning and default.")


def _help_word(name: str, word: Word) -> None:
    say(f"drafttape {name}: {word.line}\n\nexample:\n  {word.example}\n")
    groups = groups_of(name)
    if groups:
        say("groups (GROUP=OPTION):")
        for group in groups:
            say(f"  {group}")
            for option, line in group_options(group):
                say(f"    {option:<16} {line}")
        say()
    rows = describe(load_object(word.schema))
    width = min(34, max(len(key) for key, _, _ in rows))
    say("keys (key=value; a group's file may set other defaults):")
    for key, default, meaning in rows:
        say(f"  {key:<{width}}  {meaning} [{default}]")


if __name__ == "__main__":
    sys.exit(main())
