"""The figure of ``docs/warmup.md``: what moves the particles during warmup, and when warmup learns what.

All times come from the package's own windows. Writes ``docs/_static/warmup-windows.png``.
"""

from __future__ import annotations

from matplotlib.lines import Line2D
import matplotlib.pyplot as plt
from style import BLUE, GREY, save

from numpyro_repulsion.moves import Basins
from numpyro_repulsion.warmup import Timetable, Window
from numpyro_repulsion.warmup.windows import ENDS

NUM_WARMUP = 1000
# Okabe and Ito's colors, mixed with white so that dark text is legible.
PALE_ORANGE, PALE_PURPLE, PALE_YELLOW = "#f5cf80", "#e6c3d7", "#f7f0a0"
PALE_BLUE, PALE_GREEN = "#a9d6f2", "#8fd1ba"
INK = "#1f1f1f"


def windows(is_prolonged):
    """Return the windows of warmup, in order."""
    timetable = Timetable(NUM_WARMUP, is_prolonged)
    return [Window(timetable, end) for end in sorted(map(timetable.at, ENDS))]


def ends(windows, which=lambda window: True):
    """Return after how many iterations some windows end."""
    return [window.ends for window in windows if which(window)]


def title(axes, text):
    axes.set_title(text, loc="left", fontsize=10, weight="bold", color=INK)


def movements(axes, usual, prolonged):
    """Draw what moves the particles: with all rows, with minibatches, and where gradients stay noisy."""
    (arrived, frozen), (late, late_frozen) = (
        (max(ends(of, lambda x: x.was_arrival)), max(ends(of, lambda x: x.is_adapting))) for of in (usual, prolonged)
    )
    sampler = [
        (frozen, PALE_BLUE, "sampler; preconditioner adapts"),
        (NUM_WARMUP, PALE_GREEN, "sampler; preconditioner frozen"),
    ]
    cases = (
        ("all rows", usual, [(arrived, PALE_ORANGE, "Metropolis steps"), *sampler]),
        ("minibatches", usual, [(arrived, PALE_PURPLE, "Adam with noise"), *sampler]),
        (
            "minibatches, gradients stay noisy",
            prolonged,
            [
                (arrived, PALE_PURPLE, "Adam with noise"),
                (late, PALE_YELLOW, "Adam without noise"),
                (late_frozen, PALE_BLUE, ""),
                (NUM_WARMUP, PALE_GREEN, ""),
            ],
        ),
    )
    for y, (name, of, parts) in zip((2, 1, 0), cases, strict=True):
        start = 0
        for end, color, text in parts:
            axes.barh(y, end - start, left=start, height=0.62, color=color, edgecolor="white", lw=1.5)
            axes.text((start + end) / 2, y, text, ha="center", va="center", fontsize=9, color=INK)
            start = end
        ticks = ends(of)
        if of is prolonged:
            # The arrival is prolonged at its end; until then windows end as usual.
            ticks = [end for end in ends(usual) if end <= arrived] + [end for end in ticks if end > arrived]
        axes.vlines(ticks, y - 0.45, y - 0.31, color=INK, lw=1)
        axes.text(-12, y, name, ha="right", va="center", fontsize=9, color=INK)
    axes.set(xlim=(0, NUM_WARMUP), ylim=(-0.6, 2.6), xticks=[], yticks=[])
    title(axes, "What moves the particles (ticks: ends of windows)")
    axes.spines[:].set_visible(False)


def lessons(axes, of):
    """Draw when warmup changes what it learns, if the arrival is not prolonged."""
    moves = ends(of, lambda x: x.moves_references)
    arrived, frozen = min(moves), max(moves)
    rescues = [x for x in of if x.finds_lost and x.may_replace]
    begins, stops = (share * NUM_WARMUP for share in Basins.span)
    # (name, in both cases, with all rows only, with minibatches only, bars)
    rows = (
        (
            "diverged particles move to others",
            ends(rescues, lambda x: x.was_arrival),
            [],
            ends(rescues, lambda x: not x.was_arrival),
            [],
        ),
        (
            "preconditioner",
            ends(of, lambda x: x.is_adapting and x.whitens),
            ends(of, lambda x: x.is_adapting and not x.whitens),
            [],
            [],
        ),
        (
            "centering of hierarchical sites",
            ends(of, lambda x: x.centers),
            [],
            [],
            [],
        ),
        ("control-variate reference", [], [], moves, []),
        ("bandwidth", ends(of, lambda x: not x.is_adapting), [], [], [(arrived, frozen)]),
        ("step size", ends(of, lambda x: x.has_arrived), [], [], []),
        ("jumps between modes", [], [stops], [], [(begins, stops)]),
    )
    markers = (
        ("o", BLUE, "with all rows and with minibatches"),
        ("D", "white", "with all rows only"),
        ("s", INK, "with minibatches only"),
    )
    for i, (name, *cases, bars) in enumerate(rows):
        y = -i
        axes.axhline(y, color="#dddddd", lw=0.8, zorder=0)
        for start, end in bars:
            axes.plot((start, end), (y, y), color=BLUE, lw=5, alpha=0.45, solid_capstyle="butt")
        for moments, (shape, color, _) in zip(cases, markers, strict=True):
            axes.plot(moments, [y] * len(moments), shape, mfc=color, mec=INK, ms=6, mew=0.9, clip_on=False, zorder=3)
        axes.text(-12, y, name, ha="right", va="center", fontsize=9, color=INK)
    for x in (arrived, frozen):
        axes.axvline(x, color=GREY, lw=1, ls="--", zorder=0)
    legend = [
        Line2D([], [], ls="", marker=shape, mfc=color, mec=INK, ms=6, label=text) for shape, color, text in markers
    ]
    legend.append(Line2D([], [], color=BLUE, lw=5, alpha=0.45, label="in every iteration"))
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.37, -0.24), ncol=4, fontsize=9, frameon=False)
    axes.set(xlim=(0, NUM_WARMUP), ylim=(0.6 - len(rows), 0.6), yticks=[])
    axes.set_xlabel(f"iterations done, for num_warmup={NUM_WARMUP}", fontsize=9, color=INK)
    title(axes, "When warmup learns what (without a prolonged initial phase)")
    axes.tick_params(labelsize=9)
    axes.spines[["top", "left", "right"]].set_visible(False)


def main():
    usual, prolonged = windows(False), windows(True)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9.6, 5.6), height_ratios=(1, 1.7), facecolor="white")
    movements(top, usual, prolonged)
    lessons(bottom, usual)
    save(figure, "warmup-windows.png")


if __name__ == "__main__":
    main()
