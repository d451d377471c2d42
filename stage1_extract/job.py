"""One extraction as a set of samples: what is missing, the stored plan, what turned out bad."""

from collections.abc import Sequence

from shared.store import Store
from stage1_extract.config import ExtractConfig
from stage1_extract.plan import JobPlan, ShardPlan, job_id, plan_job
from stage1_extract.prompts import Prepared
from stage1_extract.rows import Reject
from stage1_extract.worker import ShardResult


class Job:
    """A job is named by its settings and its samples, so the same request finds its plan again.

    Args:
        store: an open cache.
        prepared: the data's samples and rejects.
    """

    def __init__(self, cfg: ExtractConfig, store: Store, prepared: Prepared) -> None:
        self.cfg, self.store, self.prepared = cfg, store, prepared
        self.samples = {sample.id: sample for sample in prepared.samples}
        self.results: list[ShardResult] = []
        settings = (store.spec.digest, cfg.cache.codec.value, cfg.cache.container.value)
        self.settings = (*settings, cfg.cache.shard_bytes, cfg.batch_tokens)
        self.id = job_id(self.settings, list(self.samples))
        # What an earlier run of this job found to be unusable is not tried again.
        self.bad: dict[str, str] = {
            row["id"]: row["reason"]
            for row in store.rejects(self.id)
            if row.get("id") in self.samples
        }
        committed = store.committed()
        self.num_reused = sum(name in committed for name in self.samples)

    def todo(self) -> list[ShardPlan]:
        """Shards to run: those of the stored plan, then a plan for samples that it lacks.

        Writes the plan when there is none yet.
        """
        committed = self.store.committed()
        missing = {n for n in self.samples if n not in committed and n not in self.bad}
        stored = self.store.job(self.id)
        if stored is None and not missing:
            return []
        planned = JobPlan.from_json(stored).shards if stored else self._plan(self.id, missing)
        shards = []
        for shard in planned:
            rest = shard.without(self.bad.keys() & set(shard.ids))
            if rest.ids and missing.issuperset(rest.ids):
                shards.append(rest)
                missing -= set(rest.ids)
        if missing:
            extra = job_id((*self.settings, self.id), list(missing))
            stored = self.store.job(extra)
            shards += JobPlan.from_json(stored).shards if stored else self._plan(extra, missing)
        return shards

    def _plan(self, job: str, missing: set[str]) -> Sequence[ShardPlan]:
        plan = plan_job(
            [(name, len(self.samples[name].tokens_T)) for name in missing],
            self.store.spec.bytes_per_token,
            self.cfg.cache.shard_bytes,
            self.cfg.batch_tokens,
            packed=self.store.spec.backend.get("batching") == "packed",
        )
        self.store.write_job(job, plan.to_json())
        return plan.shards

    def add(self, result: ShardResult) -> None:
        self.results.append(result)
        self.bad |= result.bad

    def rejects(self) -> list[Reject]:
        """Rows that could not be used, then samples that could not be captured."""
        captured = [
            Reject(self.samples[name].source, reason, self.samples[name].name)
            for name, reason in self.bad.items()
        ]
        return self.prepared.rejects + captured

    def write_rejects(self) -> None:
        """Stores the rejects; those that could not be captured carry their sample id."""
        rows = [{"source": r.source, "reason": r.reason, "name": r.name} for r in self.rejects()]
        for row, name in zip(rows[len(self.prepared.rejects) :], self.bad, strict=True):
            row["id"] = name
        self.store.write_rejects(self.id, rows)
