"""Peak memory of a worker that runs shards, for test_worker_memory: prints bytes as JSON."""

import json
import resource
import sys
from types import SimpleNamespace

import numpy as np
import torch

from shared.sample import sample_id
from shared.spec import CaptureSpec
from shared.store import Store
from stage1_extract import worker
from stage1_extract.plan import plan_job

LAYERS, WIDTH, TOKENS, SAMPLES, BATCH_TOKENS = 5, 1024, 512, 36, 1024


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(root: str) -> None:
    torch.set_num_threads(1)
    spec = CaptureSpec("w", "Fake", tuple(range(LAYERS)), WIDTH)
    shard_bytes = SAMPLES // 3 * TOKENS * spec.bytes_per_token

    def capture(_target, ids, _lengths, *_args):
        # Random bits of finite numbers: the codec's worst case.
        bits = torch.randint(-(2**15), 2**15, (*ids.shape, LAYERS, WIDTH), dtype=torch.int16)
        return (bits & 0x3FFF).view(torch.bfloat16)

    worker.capture = capture
    info = SimpleNamespace(cfg=SimpleNamespace(tensor_parallel=1))
    target = SimpleNamespace(device=torch.device("cpu"), info=info)
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 9, TOKENS).astype(np.int32) for _ in range(SAMPLES)]
    tokens = {sample_id(item): item for item in made}
    store = Store.create(root, spec)
    runner = worker.Worker(store, target, "lossless", "zarr")
    jobs = plan_job([(n, TOKENS) for n in tokens], spec.bytes_per_token, shard_bytes, BATCH_TOKENS)
    short = {sample_id(np.arange(9, dtype=np.int32)): np.arange(9, dtype=np.int32)}
    (warm,) = plan_job([(n, 9) for n in short], spec.bytes_per_token, shard_bytes, 9).shards
    runner.run(warm, short)
    before = peak()
    for shard in jobs.shards:
        runner.run(shard, tokens)
    figures = {
        "grown": peak() - before,
        "shard": shard_bytes,
        "batch": BATCH_TOKENS * spec.bytes_per_token,
        "shards": len(jobs.shards),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
