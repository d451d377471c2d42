"""trainer.compile: the losses of plain layers, under every option that it meets."""

import pytest
import torch
import torch._dynamo
from rank_main import Run
from test_export import drafter_config, trained
from test_ranks import start
from tiny_cache import tiny_cache, tiny_config
from trainer_tools import gradients_of, job_of, lines_of

from shared.config import Dtype
from shared.errors import ConfigError, TrainingError
from stage2_train.build import train_run
from stage2_train.compiled import compile_layers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # in torch's compiler
]
LAYERS = ["linear_attention", "full_attention", "sliding_attention"]
KEYS = {"drafter__layer_types": LAYERS, "drafter__sliding_window": 9}


def num_graphs():
    """Graphs compiled in this process since the last reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_losses_are_those_of_plain_layers(cache, tmp_path):
    def losses(name, **keys):
        train_run(tiny_config(cache, tmp_path / name, steps=5, optimizer="muon", **KEYS | keys))
        lines = lines_of(tmp_path / name) + lines_of(tmp_path / name, "heldout_loss")
        return [line.get("loss", line.get("heldout_loss")) for line in lines]

    plain = losses("plain")
    assert num_graphs() == 0
    assert losses("compiled", trainer__compile=True) == pytest.approx(plain, rel=1e-5)
    # Training, held-out measurement: rows of other lengths and other layers compile nothing anew.
    assert 0 < num_graphs() <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    again = losses("recompute", trainer__compile=True, trainer__recompute=True)
    assert again == pytest.approx(plain, rel=1e-5)


def test_gradients_are_as_near_to_float64_as_plain_ones(cache, tmp_path):
    found = {}
    for name, keys in {
        "exact": {}, "plain": {}, "compiled": {"trainer__compile": True},
        "bf16": {"trainer__dtype": Dtype.bfloat16},
        "bf16 compiled": {"trainer__dtype": Dtype.bfloat16, "trainer__compile": True},
    }.items():  # fmt: skip
        with job_of(tiny_config(cache, tmp_path / name, **KEYS | keys), tmp_path / name) as job:
            if name == "exact":
                job.drafter.double()
                job.drafter.compute_dtype = torch.float64
                job.embed = job.head = job.head.double()
            gradients = gradients_of(job)
            found[name] = torch.cat([g.double().flatten() for g in gradients.values()])

    def error(name):
        return float((found[name] - found["exact"]).norm())

    assert num_graphs() > 0
    assert error("compiled") <= 2 * error("plain")
    assert error("bf16 compiled") <= 2 * error("bf16")


def test_two_ranks(tmp_path):
    tiny_cache(tmp_path / "cache", count=17)
    fast = {"trainer__compile": True, "trainer__recompute": True}
    runs = [
        Run(str(tmp_path / "cache"), str(tmp_path / name), how, "adamw", 0, "", tuple(keys.items()))
        for name, how, keys in (
            ("plain", "ddp", KEYS), ("ddp", "ddp", KEYS | fast), ("fsdp", "fsdp", KEYS | fast)
        )
    ]  # fmt: skip
    codes, texts = start(2, runs)
    assert codes == [[0] * len(runs)] * 2, texts
    plain, *others = ([line["loss"] for line in lines_of(run.run_dir)] for run in runs)
    for losses in others:
        assert losses == pytest.approx(plain, rel=1e-5)


def test_what_cant_be_compiled_is_said():
    drafter = trained(drafter_config("full_attention"))

    def broken(graph, inputs):
        raise OSError("no compiler is there\nand more")

    with pytest.raises(ConfigError, match=r"trainer\.compile.*no compiler is there.*false"):
        compile_layers(drafter, torch.device("cpu"), backend=broken)

    def wrong(graph, inputs):
        return lambda *given: tuple(t * 1.1 for t in graph(*given))

    torch._dynamo.reset()
    with pytest.raises(TrainingError, match="differ from plain ones"):
        compile_layers(trained(drafter_config("full_attention")), torch.device("cpu"), wrong)
