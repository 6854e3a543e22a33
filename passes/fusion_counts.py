"""How often each rule fired, and whether that is what it used to be.

A pattern that no longer matches fails silently: the model still runs, only slower. So the counts per architecture are a baseline that
is compared in both directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ggufc.passes.manager import PassRecord
from ggufc.passes.pipelines import FUSIONS

FUSION_PASSES = tuple(name for name in FUSIONS.split(",") if name not in ("canonicalize", "cse", "dce"))


def fusion_counts(records: Iterable[PassRecord]) -> dict[str, int]:
    """``{"fuse-norm/rms-norm-mul": 61, ...}``: rules of the fusing passes that fired, without the layout rules they carry along."""
    from ggufc.passes.canonicalize import LAYOUT_RULES

    layout_rules = {rule.name for rule in LAYOUT_RULES}
    counts: dict[str, int] = {}
    for record in records:
        if record.name not in FUSION_PASSES:
            continue
        for rule, n in record.counts.items():
            if n and rule not in layout_rules:
                key = f"{record.name}/{rule}"
                counts[key] = counts.get(key, 0) + n
    return dict(sorted(counts.items()))


def compare_counts(baseline: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """One sentence per difference: a rule that fires less often, more often, no longer, or for the first time."""
    differences = []
    for rule in sorted(baseline.keys() | now.keys()):
        was, is_now = baseline.get(rule, 0), now.get(rule, 0)
        if was != is_now:
            differences.append(f"{rule} fired {is_now} times, the baseline says {was}")
    return differences
