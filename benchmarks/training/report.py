"""What a comparison came to: a table for the terminal, a picture, and whether it is slower than a kept result.

Receives what rounds.py measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.training.contestants import CONTESTANTS, TABLES
from benchmarks.training.ratios import CLOCKS

__all__ = ["TABLES", "markdown", "picture", "slower", "table"]

COLORS = {"bare": "#9a9a9a", "pyscan": "#1f77b4", "other": "#d08b2b"}


def title(result: dict[str, Any]) -> str:
    parts = [result["model"], f"{result['rounds']} rounds of {result['steps_per_turn']}"]
    parts += [f"{result['launches']} launches" if result["launches"] > 1 else "1 launch"]
    parts += [f"accumulation {result['accumulate']}"] if result.get("accumulate", 1) > 1 else []
    parts += ["compiled"] if result.get("compiled") else []
    noise = result["contestants"]["bare again"]["wall"]
    return (
        f"{', '.join(parts)}; bare step {result['bare_ms']:.1f} ms; bare against bare: {noise['median'] - 1:+.2%} "
        f"± {noise['error']:.2%}, {'settled' if result['settled'] else 'NOT settled'}"
    )


HEADER = ("", "wall", "p20 to p80", "processor", "self", "bytes/step", "values/step", "what it records")


def cells(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    """Overhead in wall and processor time, and what was recorded for that."""
    wall, processor = (f"x{figures[clock]['median']:.4f} ± {figures[clock]['error']:.4f}" for clock in CLOCKS)
    spread = f"{figures['wall']['p20']:.3f} to {figures['wall']['p80']:.3f}"
    claimed = "" if figures["claimed"] is None else f"{figures['claimed']:.2%}"
    written = (f"{figures['bytes_per_step']:,.0f}", f"{figures['values_per_step']:,}")
    records = CONTESTANTS[name].records + ("" if figures["same_losses"] else "; LOSSES DIFFER")
    return name, wall, spread, processor, claimed, *written, records


def table(result: dict[str, Any]) -> str:
    rows = [HEADER, *(cells(name, figures) for name, figures in result["contestants"].items())]
    lines = [f"  {r[0]:18}{r[1]:18}{r[2]:16}{r[3]:18}{r[4]:>6}{r[5]:>12}{r[6]:>13}  {r[7]}" for r in rows]
    missing = [f"  {name:18}unavailable: {reason}" for name, reason in result["unavailable"].items()]
    return "\n".join([title(result), *lines, *missing])


def markdown(result: dict[str, Any]) -> str:
    rows = [HEADER, ("---",) * len(HEADER), *(cells(name, one) for name, one in result["contestants"].items())]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    missing = [f"| {name} | unavailable: {reason} |||||||" for name, reason in result["unavailable"].items()]
    return "\n".join([title(result), "", *lines, *missing]) + "\n"


def slower(now: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """What has become slower than in a kept result by more than the noise of the two runs."""
    found = []
    for name, figures in now["contestants"].items():
        if name not in kept["contestants"] or not name.startswith("pyscan"):
            continue
        for clock in CLOCKS:
            new, old = figures[clock], kept["contestants"][name][clock]
            noises = [abs(run["contestants"]["bare again"][clock]["median"] - 1) for run in (now, kept)]
            allowed = new["error"] + old["error"] + max(noises)
            if new["median"] - old["median"] > allowed:
                found.append(
                    f"{name}, {clock}: x{new['median']:.4f}, was x{old['median']:.4f}; the noise explains {allowed:.4f}"
                )
    return found


def picture(results: list[dict[str, Any]], path: Path, note: str) -> None:
    """Overhead of every contestant, its error and its spread, a panel per table; beside the bars what each writes."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("agg")
    heights = [len(result["contestants"]) for result in results]
    figure, panels = plt.subplots(
        len(results), 1, figsize=(10, 1.1 * len(results) + 0.42 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axes, result in zip(panels[:, 0], results, strict=True):
        _panel(axes, result)
    figure.text(0.01, 0.005, note, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.015, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _panel(axes: Any, result: dict[str, Any]) -> None:
    names = list(result["contestants"])
    for place, name in enumerate(names):
        figures = result["contestants"][name]
        wall = figures["wall"]
        longer, low, high = (100 * (wall[key] - 1) for key in ("median", "p20", "p80"))
        error = 100 * wall["error"]
        color = COLORS.get(name.split()[0], COLORS["other"])
        axes.barh(place, longer, xerr=error, color=color, capsize=3, height=0.6)
        axes.hlines(place, low, high, color="#cccccc", linewidth=4, zorder=1.5)  # above the bar, below the interval
        kept = f"{figures['bytes_per_step'] / 1024:,.1f} KiB a step" if figures["bytes_per_step"] >= 1 else ""
        text = f"  {longer:+.2f} ± {error:.2f} %  {kept}  {CONTESTANTS[name].records}".replace("; ", ";\n  ")
        axes.text(max(longer + error, high, 0), place, text, va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=3 * axes.get_xlim()[1])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title(title(result).replace("; bare against", "\nbare against"), fontsize=8, loc="left")
    axes.set_xlabel("longer than a bare step, %: with the 95 % interval; in grey p20 to p80 of whole turns", fontsize=7)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
