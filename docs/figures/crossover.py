"""From how many rows on ``SGLD`` is faster than samplers that see all rows: the picture of README.

Draws what ``benchmarks/studies/crossover.py`` has stored. Writes ``docs/_static/crossover.png``.
"""

from __future__ import annotations

import json

from matplotlib.lines import Line2D
import matplotlib.pyplot as plt
from style import BLUE, DOCS, GREY, PURPLE, SKY, VERMILION, save

ROWS = DOCS.parent / "benchmarks" / "results" / "full" / "crossover.json"
COLORS = {"SGLD": BLUE, "SGHMC": SKY, "NUTS": VERMILION, "ChEES-HMC": PURPLE}
PANELS = {"plain": "logistic regression, 20 parameters", "hierarchical": "hierarchical, 57 parameters"}


def curve(axes, rows, which, color, style):
    """Seconds against rows of one sampler; hollow if extrapolated. Returns the last point."""
    points = [(row["rows"], row[which]["seconds"], row[which]["is_extrapolated"]) for row in rows if which in row]
    axes.plot([x for x, *_ in points], [y for _, y, _ in points], style, color=color, zorder=2)
    for x, y, is_extrapolated in points:
        axes.plot(x, y, "o", color=color, markersize=4, mfc="white" if is_extrapolated else color, zorder=3)
    return points[-1][:2] if points else None


def main():
    if not ROWS.exists():
        print("Nothing is stored: run `make bench-crossover` first.")
        return
    cells = list(json.loads(ROWS.read_text())["rows"].values())
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.4), sharey=True)
    ends = {}
    for axes, (model, title) in zip(panels, PANELS.items(), strict=True):
        for name, color in COLORS.items():
            rows = [cell for cell in cells if (cell["model"], cell["name"]) == (model, name) and "first" in cell]
            rows.sort(key=lambda row: row["rows"])
            curve(axes, rows, "first", color, ":")
            # A run that took too long is not repeated, and compiling is a small part of it.
            if end := curve(axes, [{"second": row["first"]} | row for row in rows], "second", color, "-"):
                ends.setdefault(axes, []).append((end, name, color))
        axes.set(title=title, xscale="log", yscale="log", xlabel="rows")
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * 5)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    panels[0].set_ylabel("seconds to 400 effective draws")
    lines = [Line2D([], [], color=GREY, linestyle=style) for style in ("-", ":")]
    lines.append(Line2D([], [], color=GREY, linestyle="", marker="o", markersize=4, mfc="white"))
    panels[0].legend(lines, ["compiled", "first run", "extrapolated"], loc="upper left")
    figure.draw_without_rendering()
    for axes, labels in ends.items():
        below, last = -1e9, max(end[0] for end, *_ in labels)
        for end, name, color in sorted(labels, key=lambda label: label[0][1]):
            if end[0] < last:
                # Other curves go on to the right of it.
                axes.annotate(name, end, (-7, 3), textcoords="offset points", ha="right", color=color)
                continue
            height = axes.transData.transform(end)[1]
            below = max(height, below + 13)
            shift = (6, (below - height) * 72 / figure.dpi)
            axes.annotate(name, end, shift, textcoords="offset points", va="center", color=color)
    for cell in cells:
        if "failed" in cell:
            print(f"Not drawn: {cell['name']} on {cell['rows']:,} rows, {cell['model']}: {cell['failed']}.")
    save(figure, "crossover.png")


if __name__ == "__main__":
    main()
