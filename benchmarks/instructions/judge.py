"""Instruction counts beside kept ones. Receives counts by name; hands on figures per site, a table and complaints."""

from __future__ import annotations

from benchmarks.instructions.shapes import NUM_SITES

TOLERANCE = 0.03  # a count differs by less than 1 % from run to run
RIVAL = 5  # plain torch needs at least so many times the instructions of the scanner
GATED = ("reduce", "pack", "hand over", "per site: pyscan")


def per_site(found: dict[str, float]) -> dict[str, float]:
    """What a step costs more than the bare one, divided by the number of sites."""
    bare = found["step bare"]
    names = {"pyscan": found["step pyscan"], "plain torch": found["step plain torch"]}
    return {f"per site: {name}": (count - bare) / NUM_SITES for name, count in names.items()}


def compare(found: dict[str, float], kept: dict[str, float]) -> list[str]:
    """What executes more instructions than it did, or too many beside plain torch."""
    complaints = [
        f"{name}: {found[name]:,.0f} instructions, were {count:,.0f}; more than {TOLERANCE:.0%} above. "
        "If that is wanted, keep the new counts with `make bench-gate-update`."
        for name, count in kept.items()
        if name.startswith(GATED) and found.get(name, float("inf")) > (1 + TOLERANCE) * count
    ]
    ours, theirs = found["per site: pyscan"], found["per site: plain torch"]
    if theirs < RIVAL * ours:
        complaints.append(f"plain torch needs only {theirs / ours:.1f} times the instructions of the hook path")
    return complaints


def table(found: dict[str, float], kept: dict[str, float]) -> str:
    lines = [f"{'instructions':32}{'now':>14}{'kept':>14}"]
    for name, count in found.items():
        before = f"{kept[name]:14,.0f}{count / kept[name] - 1:+9.2%}" if kept.get(name) else ""
        lines.append(f"{name:32}{count:14,.0f}{before}")
    ratio = found["per site: plain torch"] / found["per site: pyscan"]
    return "\n".join([*lines, f"the same capture in plain torch: {ratio:.1f} times the instructions per site"])
