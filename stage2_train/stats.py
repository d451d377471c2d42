"""Intervals and tests for comparisons of runs; numpy and scipy only.

Two different questions, never mixed:

* *Within one seed*: losses of neighbouring steps are correlated, so the mean of a per-step series
  gets its interval from a circular block bootstrap whose block length follows the series' own
  autocorrelation (Politis and White 2004, with the 2009 correction). It says how sure the
  difference is on these inputs and this initialisation, not what another seed would give.
* *Across seeds*: one number a seed, Student's t over the paired differences. Only this one may
  decide between arms; with many arms the p-values are corrected by Holm's step-down.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import special


def _t_quantile(level: float, df: float) -> float:
    return float(special.stdtrit(df, 0.5 + level / 2))


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        mean: the estimate.
        low, high: ends; NaN when the data can't give them.
        level: confidence, e.g. 0.95.
        method: how the ends were found, in words.
        n: values that went in (steps, samples or seeds).
        p: two-sided p-value of "no difference"; NaN where none is defined.
    """

    mean: float
    low: float
    high: float
    level: float
    method: str
    n: int
    p: float = float("nan")

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def excludes_zero(self) -> bool:
        return bool(self.low > 0 or self.high < 0)

    def to_dict(self) -> dict[str, object]:
        return {key: none_if_nan(value) for key, value in asdict(self).items()}


def none_if_nan(value: object) -> object:
    """NaN and infinities as None, so that JSON stays JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def block_length(values: np.ndarray) -> int:
    """Automatic block length of the circular block bootstrap, 1 … n/3."""
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    if n < 8 or np.ptp(x) == 0:
        return 1
    x = x - x.mean()
    correlation = np.correlate(x, x, "full")[n - 1 :] / n
    rho = correlation / correlation[0]
    run = max(5, math.ceil(math.sqrt(math.log10(n))))
    threshold = 2 * math.sqrt(math.log10(n) / n)
    last = min(n - 1, math.ceil(math.sqrt(n)) + run)
    small = np.abs(rho[1 : last + 1]) < threshold
    m = next((k for k in range(len(small)) if small[k : k + run].all()), len(small))
    width = min(max(2 * m, 1), last)
    lags = np.arange(1, width + 1)
    taper = np.clip(2 * (1 - lags / width), 0, 1) if width > 1 else np.ones(1)
    spectrum = correlation[0] + 2 * np.sum(taper * correlation[lags])
    slope = 2 * np.sum(taper * lags * correlation[lags])
    denominator = 4 / 3 * spectrum**2
    if denominator <= 0:
        return max(1, n // 3)
    best = (2 * slope**2 / denominator) ** (1 / 3) * n ** (1 / 3)
    return int(np.clip(math.ceil(best), 1, max(1, min(math.ceil(3 * math.sqrt(n)), n // 3))))


def bootstrap_means(
    values: np.ndarray, *, block: int, draws: int = 2000, seed: int = 0
) -> np.ndarray:
    """Means of circular block resamples, float64 [draws]."""
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    blocks = -(-n // block)
    rng = np.random.Generator(np.random.Philox(seed))
    # Sums of circular blocks by a cumulative sum: no [draws, n] index array is ever built.
    around = np.concatenate([[0.0], np.cumsum(np.concatenate([x, x[: block - 1]]))])
    block_sums = around[block:] - around[:-block]
    starts = rng.integers(0, n, size=(draws, blocks))
    if n % block == 0:
        return block_sums[starts].sum(1) / n
    rest = n % block
    rest_sums = around[rest : rest + n] - around[:n]
    total = block_sums[starts[:, :-1]].sum(1) + rest_sums[starts[:, -1]]
    return total / n


def mean_interval(
    values: Sequence[float] | np.ndarray, level: float = 0.95, *, draws: int = 2000, seed: int = 0
) -> Interval:
    """Mean of a correlated series by the circular block bootstrap.

    The percentile ends are widened by the t quantile at the number of blocks, since a short
    series holds few independent pieces.
    """
    x = np.asarray(values, dtype=np.float64)
    x = x[np.isfinite(x)]
    if len(x) < 4:
        mean = float(x.mean()) if len(x) else float("nan")
        return Interval(mean, float("nan"), float("nan"), level, "too few values", len(x))
    block = block_length(x)
    means = bootstrap_means(x, block=block, draws=draws, seed=seed)
    method = f"circular block bootstrap, blocks of {block}, {draws} draws"
    return from_draws(float(x.mean()), means, max(2.0, len(x) / block), level, method, len(x))


def from_draws(
    mean: float, draws: np.ndarray, pieces: float, level: float, method: str, n: int
) -> Interval:
    """Percentile ends of resampled values, widened by the t quantile at `pieces` free pieces."""
    low, high = np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2])
    wider = _t_quantile(level, pieces - 1) / float(special.ndtri(0.5 + level / 2))
    ends = mean - (mean - float(low)) * wider, mean + (float(high) - mean) * wider
    return Interval(mean, *ends, level, method, n)


def ratio_difference(
    upper_a: np.ndarray, lower_a: np.ndarray, upper_b: np.ndarray, lower_b: np.ndarray,
    level: float = 0.95, *, draws: int = 2000, seed: int = 0,
) -> Interval:  # fmt: skip
    """sum(upper_b)/sum(lower_b) - sum(upper_a)/sum(lower_a), resampling common items.

    For acceptance (tokens over passes, per prompt) and loss (sums over slots, per sample): items
    are independent, so they are resampled one by one, the same ones in both arms.
    """
    arrays = [np.asarray(part, dtype=np.float64) for part in (upper_a, lower_a, upper_b, lower_b)]
    n = len(arrays[0])
    if any(len(part) != n for part in arrays):
        raise ValueError("the arms have different items")
    if n == 0 or arrays[1].sum() <= 0 or arrays[3].sum() <= 0:
        nan = float("nan")
        return Interval(nan, nan, nan, level, "nothing to compare", n)
    ua, la, ub, lb = arrays
    mean = float(ub.sum() / lb.sum() - ua.sum() / la.sum())
    if n < 4:
        return Interval(mean, float("nan"), float("nan"), level, "too few items", n)
    rng = np.random.Generator(np.random.Philox(seed))
    counts = rng.multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = (counts @ ub) / (counts @ lb) - (counts @ ua) / (counts @ la)
    method = f"bootstrap over {n} common items, {draws} draws"
    return from_draws(mean, drawn[np.isfinite(drawn)], n, level, method, n)


def paired_t(
    differences: Sequence[float], level: float = 0.95, *, pooled: tuple[float, int] | None = None
) -> Interval:
    """Student's t over one paired difference a seed.

    Args:
        pooled: (standard deviation of a paired difference, degrees of freedom) known from more
            arms or repeated baselines; used instead of the differences' own.
    """
    d = np.asarray(differences, dtype=np.float64)
    d = d[np.isfinite(d)]
    n = len(d)
    mean = float(d.mean()) if n else float("nan")
    sd, df = (float(d.std(ddof=1)), n - 1) if n > 1 else (float("nan"), 0)
    method = f"paired t over {n} seeds"
    if pooled is not None and n:
        sd, df = pooled
        method += f", noise known from more runs ({df} degrees of freedom)"
    if df < 1 or not math.isfinite(sd):
        return Interval(mean, float("nan"), float("nan"), level, "one seed", n)
    return _from_t(mean, sd / math.sqrt(n), df, level, method, n)


def welch(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Interval:
    """Unpaired difference of means b - a (Welch): what the comparison would be without pairing."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    mean = float(y.mean() - x.mean())
    if min(len(x), len(y)) < 2:
        return Interval(mean, float("nan"), float("nan"), level, "one seed", min(len(x), len(y)))
    va, vb = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    if va + vb == 0:
        return Interval(mean, mean, mean, level, "no spread", len(x), 0.0 if mean else 1.0)
    df = (va + vb) ** 2 / (va**2 / (len(x) - 1) + vb**2 / (len(y) - 1))
    return _from_t(mean, math.sqrt(va + vb), df, level, "unpaired t (Welch)", len(x))


def _from_t(mean: float, error: float, df: float, level: float, method: str, n: int) -> Interval:
    half = _t_quantile(level, df) * error
    exact = 0.0 if mean else 1.0
    p = float(2 * special.stdtr(df, -abs(mean) / error)) if error > 0 else exact
    return Interval(mean, mean - half, mean + half, level, method, n, p)


def pooled_noise(table_AS: np.ndarray) -> tuple[float, int] | None:
    """Seed noise of a paired difference from all arms (arms x seeds, complete).

    Two-way layout: what is left after an arm's mean and a seed's mean are taken out. The standard
    deviation of a difference of two arms is sqrt(2) times that of the rest.

    Returns:
        (standard deviation of a paired difference, degrees of freedom), None if undetermined.
    """
    table = np.asarray(table_AS, dtype=np.float64)
    arms, seeds = table.shape
    df = (arms - 1) * (seeds - 1)
    if df < 1 or not np.isfinite(table).all():
        return None
    rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    return math.sqrt(2 * float((rest**2).sum()) / df), df


def known_noise(baseline: Sequence[float]) -> tuple[float, int] | None:
    """Seed noise of a difference from repeated baselines: two runs differ by sqrt(2) times it.

    Returns:
        (standard deviation of a difference, degrees of freedom), None with fewer than three runs.
    """
    x = np.asarray(baseline, dtype=np.float64)
    x = x[np.isfinite(x)]
    if len(x) < 3 or np.ptp(x) == 0:
        return None
    return math.sqrt(2) * float(x.std(ddof=1)), len(x) - 1


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given; NaN stays NaN and isn't counted."""
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(len(p), np.nan)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, float(p[index]) * (len(order) - rank)))
        adjusted[index] = running
    return adjusted.tolist()


def seeds_to_resolve(
    difference: float, noise: float, level: float = 0.95, *, most: int = 1000
) -> int | None:
    """Seeds a paired comparison needs so that its interval excludes zero at this difference.

    Args:
        noise: standard deviation of a paired difference between two seeds.

    Returns:
        A number of seeds in all, or None if more than `most`.
    """
    if not (math.isfinite(difference) and math.isfinite(noise)) or difference == 0:
        return None
    for n in range(2, most + 1):
        if _t_quantile(level, n - 1) * noise / math.sqrt(n) < abs(difference):
            return n
    return None
