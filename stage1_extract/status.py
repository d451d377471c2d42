"""How a running extraction stands: progress bars, `status.json` and a page in the cache.

`drafttape status CACHE` reads the file from any terminal; `status.html` reloads itself. Both are
written every two seconds (behind a URL every fifteen) and are no part of the cache's data.
"""

import contextlib
import html
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from shared.errors import CacheError, DrafttapeError
from shared.log import progress, say
from shared.remote import files_at
from shared.run_status import run_lines
from shared.store import Store
from stage1_extract.config import StatusConfig
from stage1_extract.worker import ShardResult

FILE, PAGE = "status.json", "status.html"
_EVERY_S = 2.0
_EVERY_REMOTE_S = 15.0
_SILENT_S = 120.0


class Status:
    """Progress of one run: a bar in total, one per device when there are several, and the file.

    Args:
        rank, size: this process's place under a launcher; rank 0 shows the sum over all.
        run: the same on all ranks, another one in every run.
    """

    def __init__(
        self,
        store: Store,
        what: str,
        tokens: int,
        shards: int,
        devices: int,
        rejects: int,
        *,
        rank: int = 0,
        size: int = 1,
        run: str = "",
    ) -> None:
        self.store, self.started, self._written = store, time.time(), 0.0
        self.rank, self.size, self._rejects_before = rank, size, rejects
        self._every_s = _EVERY_REMOTE_S if store.files.remote else _EVERY_S
        self.bar = progress(tokens, "extract", "tok", disable=rank > 0)
        self.bars: dict[str, Any] = {}
        self.devices = devices
        self.state: dict[str, Any] = {
            "state": "running",
            "run": run,
            "what": what,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": self.started,
            "tokens_total": tokens,
            "tokens": 0,
            "shards_total": shards,
            "shards": 0,
            "rejects": rejects,
            "bytes_written": 0,
            "workers": {},
        }
        self._write()

    def advance(self, worker: str, tokens: int) -> None:
        """Tokens that a worker has finished (negative when they have to be done again)."""
        self.state["tokens"] += tokens
        mine = self.state["workers"].setdefault(worker, {"tokens": 0, "shards": 0})
        mine["tokens"] += tokens
        if self.size == 1:
            self.bar.update(tokens)
        if self.devices > 1:
            if worker not in self.bars:
                self.bars[worker] = progress(
                    None, worker, "tok", position=len(self.bars) + 1, leave=False
                )
            self.bars[worker].update(tokens)
        if time.time() - self._written >= self._every_s:
            self._write()

    def finished(self, worker: str, result: ShardResult) -> None:
        """A shard is committed (or had no usable sample)."""
        mine = self.state["workers"].setdefault(worker, {"tokens": 0, "shards": 0})
        mine["shards"] += 1
        self.state["shards"] += 1
        self.state["rejects"] += len(result.bad)
        if not result.ran:
            self.advance(worker, result.shard.num_tokens)
        elif result.shard_id is not None:
            self.state["bytes_written"] += self.store.shard(result.shard_id).stored_bytes
        shown = self._write()
        self.bar.set_postfix_str(
            f"shard {shown['shards']}/{shown['shards_total']}, "
            f"{shown['bytes_written'] / 1e6:,.0f} MB, {shown['rejects']} rejects"
        )

    def close(self, state: str) -> None:
        """The last word: done, stopped or failed."""
        self.state["state"] = state
        if self.rank == 0:
            self._write()
        for bar in [*self.bars.values(), self.bar]:
            bar.close()
        with contextlib.suppress(DrafttapeError, OSError):
            for rank in range(1, self.size) if self.rank == 0 and state != "failed" else ():
                self.store.files.remove(_rank_file(rank))

    def _write(self) -> dict[str, Any]:
        """Writes what this process shows, and returns it."""
        now = time.time()
        self._written = now
        files, shown = self.store.files, self._summed()
        if self.size > 1:
            self.bar.update(shown["tokens"] - self.bar.n)
        speed = shown["tokens"] / max(now - self.started, 1e-3)
        left = shown["tokens_total"] - shown["tokens"]
        shown["updated"] = now
        shown["tokens_per_s"] = round(speed, 1)
        shown["eta_s"] = round(left / speed) if speed > 0 else None
        # A status that can't be written must not stop the run: the store reports a full disk.
        with contextlib.suppress(DrafttapeError, OSError):
            if self.rank:
                files.write(_rank_file(self.rank), json.dumps(shown).encode())
            else:
                files.write(FILE, json.dumps(shown, indent=1).encode())
                files.write(PAGE, page(shown).encode())
        return shown

    def _summed(self) -> dict[str, Any]:
        """This process's state; on rank 0 with what the other ranks of this run have written."""
        shown = self.state | {"workers": dict(self.state["workers"])}
        if self.rank:
            return shown | {"rejects": self.state["rejects"] - self._rejects_before}
        for rank in range(1, self.size):
            try:
                other = json.loads(self.store.files.read(_rank_file(rank)))
            except (DrafttapeError, OSError, ValueError):
                continue  # it hasn't begun
            if other["run"] == shown["run"]:
                for key in ("tokens", "shards", "rejects", "bytes_written"):
                    shown[key] += other[key]
                shown["workers"] |= other["workers"]
        return shown


def _rank_file(rank: int) -> str:
    return f".status-rank-{rank}.json"


def status(cfg: StatusConfig) -> int:
    """The word: prints how the extraction into a cache, or a training run, stands.

    Raises:
        CacheError: nothing was extracted into it yet.
    """
    if (Path(cfg.root) / "run.json").is_file():
        for line in run_lines(Path(cfg.root)):
            say(line)
        return 0
    where = f"{cfg.root}/{FILE}"
    try:
        shown = lines(json.loads(files_at(cfg.root).read(FILE)))
    except FileNotFoundError:
        raise CacheError(
            "no extraction or training has run here yet",
            where=cfg.root,
            do="Give the directory of a cache or of a run",
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CacheError(f"the status file can't be read ({error})", where=where) from None
    for line in shown:
        say(line)
    say(f"page      {cfg.root}/{PAGE}")
    return 0


def lines(state: dict[str, Any], now: float | None = None) -> list[str]:
    """A status as text."""
    now = time.time() if now is None else now
    word, silent = state["state"], now - state["updated"]
    if word == "running" and silent > _SILENT_S:
        word = f"running? silent for {_span(silent)}; was it killed?"
    total, tokens = state["tokens_total"], state["tokens"]
    out = [
        f"state     {word} ({state['what']}, {state['host']}, process {state['pid']})",
        f"tokens    {tokens:,} of {total:,} ({tokens / max(total, 1):.1%}), "
        f"{state['tokens_per_s']:,.0f} tokens/s",
        f"shards    {state['shards']:,} of {state['shards_total']:,}, "
        f"{state['bytes_written'] / 1e9:,.2f} GB written, {state['rejects']:,} rejects",
    ]
    for name, worker in sorted(state["workers"].items()):
        out.append(f"  {name:<8}{worker['tokens']:,} tokens, {worker['shards']:,} shards")
    out.append(f"time      {_span(state['updated'] - state['started'])} so far")
    if word == "running" and state["eta_s"] is not None:
        end = time.strftime("%a %H:%M", time.localtime(now + state["eta_s"]))
        out.append(f"left      {_span(state['eta_s'])}, until {end}")
    return out


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def page(state: dict[str, Any]) -> str:
    """A page that reloads itself while the run goes on."""
    share = 100 * state["tokens"] / max(state["tokens_total"], 1)
    reload = '<meta http-equiv="refresh" content="5">' if state["state"] == "running" else ""
    rows = "".join(
        f"<tr><th>{html.escape(line[:10].strip())}</th><td>{html.escape(line[10:])}</td></tr>"
        for line in lines(state)
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">{reload}
<title>{share:.0f} % extract</title><style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem;
color:#1a1a1a;background:#fff}}
th{{text-align:left;font-weight:600;padding-right:1.5rem;vertical-align:top}}
.bar{{background:#ddd;border-radius:4px;height:14px;margin:1rem 0}}
.bar div{{background:#2a6fb0;border-radius:4px;height:14px;width:{share:.2f}%}}
@media(prefers-color-scheme:dark){{body{{color:#e8e8e8;background:#16181b}}.bar{{background:#444}}}}
</style></head><body><h1>Extraction</h1>
<div class="bar" role="progressbar" aria-valuenow="{share:.0f}" aria-valuemin="0"
aria-valuemax="100"><div></div></div><table>{rows}</table></body></html>
"""
