"""What a comparison came to: a table for the terminal, a picture, and whether it is slower than a kept result.

Receives what rounds.py measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.training.contestants import CONTESTANTS, TABLES

__all__ = ["TABLES", "markdown", "picture", "slower", "table", "title"]

COLORS = {"bare": "#9a9a9a", "pyscan": "#1f77b4", "other": "#d08b2b"}


def title(result: dict[str, Any]) -> str:
    parts = [result["model"], f"{result['rounds']} rounds of {result['steps_per_turn']}"]
    parts += ["processes exchanged"] if result.get("exchanged") else []
    parts += [f"accumulation {result['accumulate']}"] if result.get("accumulate", 1) > 1 else []
    parts += ["compiled"] if result.get("compiled") else []
    noise = result["contestants"]["bare again"]["wall"]
    settled = "" if result["settled"] else ", NOT settled in the time allowed"
    return (
        f"{', '.join(parts)}; bare step {result['bare_ms']:.1f} ms; bare against bare: undisturbed steps "
        f"{noise['quiet'] - 1:+.2%} ± {noise['quiet_error']:.2%}, all {noise['median'] - 1:+.2%} ± {noise['error']:.2%}"
        f"{settled}"
    )


def table(result: dict[str, Any]) -> str:
    """A line per contestant: overhead in wall and processor time, and what it recorded for that."""
    lines = [
        title(result),
        f"  {'':18}{'undisturbed':>12}{'processor':>11}{'all':>9}  {'p20..p80':^18}{'processor':>10}"
        f"{'bytes/step':>12}{'values':>8}{'self':>8}",
    ]
    for name, figures in result["contestants"].items():
        wall, processor = figures["wall"], figures["processor"]
        lines.append(
            f"  {name:18}     x{wall['quiet']:.4f}    x{processor['quiet']:.4f}  x{wall['median']:.4f}"
            f"  [{wall['p20']:.4f}..{wall['p80']:.4f}]   x{processor['median']:.4f}"
            f"{figures['bytes_per_step']:12,.0f}{figures['values_per_step']:8,}"
            f"{'' if figures['claimed'] is None else format(figures['claimed'], '.2%'):>8}"
            f"  {CONTESTANTS[name].records}{'' if figures['same_losses'] else '  LOSSES DIFFER'}"
        )
    lines += [f"  {name:18}unavailable: {reason}" for name, reason in result["unavailable"].items()]
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    lines = [
        title(result),
        "",
        "| contestant | undisturbed | processor | all | p20 to p80 | processor | self | bytes per step "
        "| values per step | what it records |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in result["contestants"].items():
        wall, processor = figures["wall"], figures["processor"]
        lines.append(
            f"| {name} | x{wall['quiet']:.4f} | x{processor['quiet']:.4f} | x{wall['median']:.4f} | "
            f"{wall['p20']:.3f} to {wall['p80']:.3f} | x{processor['median']:.4f} | "
            f"{'' if figures['claimed'] is None else format(figures['claimed'], '.2%')} | "
            f"{figures['bytes_per_step']:,.0f} | {figures['values_per_step']:,} | {CONTESTANTS[name].records} |"
        )
    lines += [f"| {name} | unavailable: {reason} |||||||||" for name, reason in result["unavailable"].items()]
    return "\n".join(lines) + "\n"


def slower(now: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """What has become slower, in undisturbed steps, than in a kept result by more than the noise of the two runs."""
    found = []
    for name, figures in now["contestants"].items():
        if name not in kept["contestants"] or not name.startswith("pyscan"):
            continue
        for clock in ("wall", "processor"):
            new, old = figures[clock], kept["contestants"][name][clock]
            noises = [abs(run["contestants"]["bare again"][clock]["quiet"] - 1) for run in (now, kept)]
            allowed = new["quiet_error"] + old["quiet_error"] + max(noises)
            if new["quiet"] - old["quiet"] > allowed:
                found.append(
                    f"{name}, {clock}: x{new['quiet']:.4f}, was x{old['quiet']:.4f}; the noise explains {allowed:.4f}"
                )
    return found


def picture(results: list[dict[str, Any]], path: Path, note: str) -> None:
    """Overhead of every contestant with p20 and p80, a panel per table; beside the bars what each writes."""
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
    widest = max(f["wall"]["p80"] for f in result["contestants"].values()) - 1
    for place, name in enumerate(names):
        figures = result["contestants"][name]
        wall = figures["wall"]
        low, high = (100 * abs(wall[q] - wall["median"]) for q in ("p20", "p80"))
        color = COLORS.get(name.split()[0], COLORS["other"])
        axes.barh(place, 100 * (wall["median"] - 1), xerr=[[low], [high]], color=color, capsize=3, height=0.6)
        axes.plot(100 * (wall["quiet"] - 1), place, "D", color="black", markersize=3.5)
        kept = f"{figures['bytes_per_step'] / 1024:,.1f} KiB a step" if figures["bytes_per_step"] >= 1 else ""
        text = f"{100 * (wall['quiet'] - 1):+.1f} %  {kept}  {CONTESTANTS[name].records}"
        axes.text(100 * max(wall["p80"] - 1, wall["quiet"] - 1, 0) + 2 * widest, place, text, va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=100 * widest * 2.2 + 0.5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title(title(result).replace("; bare against", "\nbare against"), fontsize=8, loc="left")
    axes.set_xlabel("longer than a bare step, %; diamonds: undisturbed steps, bars: all, with p20 and p80", fontsize=7)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
