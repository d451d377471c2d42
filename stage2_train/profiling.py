"""A profiler trace over a window of updates, chosen by their numbers."""

from pathlib import Path
from typing import Any

import torch


class ProfileWindow:
    """Traces updates start … start+count-1 (1-based) and writes a Chrome trace and a table.

    Args:
        folder: where `update-START.json` and `update-START.txt` go.
        start: first traced update; None traces nothing.
        count: traced updates.
    """

    def __init__(self, folder: Path, start: int | None, count: int) -> None:
        self.folder, self.start, self.count = folder, start, count
        self._profiler: Any = None

    def before(self, update: int) -> None:
        """Called before update number `update`."""
        if self.start is None or update != self.start:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def after(self, update: int) -> None:
        """Called after update number `update`."""
        if self._profiler is not None and update >= (self.start or 0) + self.count - 1:
            self.close()

    def close(self) -> None:
        """Ends the trace, if one is running, and writes it."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = self.folder / f"update-{self.start:06d}"
        profiler.export_chrome_trace(str(stem.with_suffix(".json")))
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=50)
        stem.with_suffix(".txt").write_text(table + "\n")
