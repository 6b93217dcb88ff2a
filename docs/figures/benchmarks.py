"""The figures of the Benchmarks pages, from the rows in ``benchmarks/results``: one function for each study.

Writes ``docs/_static/results/NAME.png``, for all studies or for those that are named.

    python docs/figures/benchmarks.py [NAME ...]
"""

from __future__ import annotations

import json
from pathlib import Path
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from numpyro_repulsion.contrib.calibration import simultaneous_band

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "docs" / "_static" / "results"
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = *(f"C{i}" for i in range(6)), "black"
#: Plain SGLD of the paper, beside this package's ``SGLD``.
PLAIN = {"SGLD": "plain SGLD", "SGLD+R": "SGLD + repulsion"}


def rows(name: str, platform: str = "full", **wanted) -> list[dict]:
    found = json.loads((ROOT / "benchmarks" / "results" / platform / f"{name}.json").read_text())["rows"]
    return [row for row in found.values() if all(row.get(key) == value for key, value in wanted.items())]


def dots(ax, labels, values, errors=None, color=BLUE, texts=()):
    """Values beside their names, the first on top, with their texts at their right."""
    y = -np.arange(len(labels))
    ax.errorbar(values, y, xerr=errors, fmt="o", color=color, ms=5, lw=1)
    ax.set_yticks(y, labels)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", color="0.93")
    for x, height, text in zip(values, y, texts, strict=False):
        shown = ax.annotate(text, (x, height), (9, 0), textcoords="offset points", va="center", fontsize=8, color="0.3")
        shown.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})


def gaussian():
    """The paths of six particles."""
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.7), sharey=True)
    circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    found = json.loads((ROOT / "benchmarks" / "results" / "full" / "gaussian.json").read_text())["rows"]
    for ax, name in zip(axes, ("SVGD", "SGLD", "SGLD+R"), strict=True):
        for radius in (1, 2):
            ax.plot(radius * circle.real, radius * circle.imag, color="0.75", lw=0.8)
        paths = np.array(found[name]["trajectories"])
        ax.plot(*paths.transpose(2, 1, 0), color=SKY, lw=0.4)
        ax.plot(*paths[:, 0].T, "o", color="0.6", ms=4)
        ax.plot(*paths[:, -1].T, "o", color=BLUE, ms=5)
        spread = found[name]["last cloud"][1][0]
        ax.set(title=PLAIN.get(name, name), xlim=(-3.5, 5), ylim=(-3.5, 5), aspect="equal")
        ax.set_xlabel(f"sd of the six: {spread:.2f}")
    axes[0].annotate("start", (4.2, 4.2), (1.6, 4.6), fontsize=8, color="0.4")
    axes[0].annotate("end", (0, 0), (-3.2, -2.9), fontsize=8, color=BLUE)
    return figure


def mixtures():
    """Left: what repulsion and zero-sum noise do to a mean; right: what moves between modes do."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.3))
    sizes = (10, 20, 100)
    lines = {
        "SGLD": (PLAIN["SGLD"], ORANGE, (112, 0.074)),
        "SGLD+R": (PLAIN["SGLD+R"], PINK, (112, 0.033)),
        "SGLD, balanced": ("zero-sum noise", BLUE, (112, 0.0235)),
    }
    for name, (label, color, place) in lines.items():
        found = [
            rows("mixtures", target="exponentials", particles=n, protocol="a", sampler=name, step=0.01)[0]["mean_error"]
            for n in sizes
        ]
        mean, error = np.array(found).T
        left.errorbar(sizes, mean, error, fmt="o-", color=color, ms=4)
        left.annotate(label, place, color=color, fontsize=8)
    exact = [rows("mixtures", target="exponentials", particles=n, protocol="exact")[0]["mean_error"][0] for n in sizes]
    left.plot(sizes, exact, "--", color="0.5", lw=1)
    left.annotate("independent draws", (112, 0.0165), color="0.4", fontsize=8)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="particles",
        ylabel="mean absolute error of E X",
        ylim=(0.01, 0.4),
        xlim=(8.5, 650),
    )
    left.set_title("Exponentials, step 0.01")
    left.set_xticks(sizes, sizes)
    left.minorticks_off()
    left.set_yticks((0.01, 0.03, 0.1, 0.3), (0.01, 0.03, 0.1, 0.3))
    names = ["SGLD, archive", "SGLD+R, archive", "NumPyro's ESS", "NumPyro's AIES", "SGLD", "SGLD+R", "NumPyro's NUTS"]
    labels = ["SGLD, Archive()", "SGLDR, Archive()", *names[2:4], "SGLD", "SGLDR", names[-1]]
    found = [rows("mixtures", target="Gaussians", particles=20, protocol="d", sampler=name)[0] for name in names]
    mean, error = np.array([row["distance"] for row in found]).T
    dots(right, labels, mean, error, texts=[f"{x:.4f}" for x in mean])
    (exact,) = rows("mixtures", target="Gaussians", particles=20, protocol="exact")
    right.axvline(exact["distance"][0], color="0.5", ls="--", lw=1)
    right.annotate("1,000 independent draws", (exact["distance"][0] * 1.15, -6.42), color="0.4", fontsize=8)
    right.set(xscale="log", xlim=(8e-4, 0.6), ylim=(-6.6, 0.5), xlabel="energy distance to the target")
    right.set_title("Nine Gaussians, default settings")
    return figure


def networks():
    """The gain in log-likelihood over twenty MAP networks on the same splits."""
    sets = {
        "yacht": "yacht",
        "bostonHousing": "Boston",
        "wine-quality-red": "wine",
        "kin8nm": "kin8nm",
        "naval-propulsion-plant": "naval",
        "protein-tertiary-structure": "protein",
    }
    methods = {
        "`SGNHT(model)`": "SGNHT(model)",
        "`SGLD(model)`": "SGLD(model)",
        "`SGHMCR(model)`": "SGHMCR(model)",
        "`SGNHT(model, gradient=SVRG())`": "SGNHT, SVRG()",
        "SVGD, Adagrad": "SVGD, Adagrad",
        "20 networks, Adagrad": "20 networks, Adagrad",
        "20 MAP networks, Laplace in the last layer": "20 MAP, last-layer Laplace",
    }
    all_rows = rows("networks")
    figure, axes = plt.subplots(2, 3, figsize=(7, 4.2), sharey=True)
    for ax, (name, title) in zip(axes.flat, sets.items(), strict=True):
        by = {}
        for row in all_rows:
            if row.get("data") == name and row.get("log_likelihood") is not None:
                by.setdefault(row["method"], {})[row["split"]] = row["log_likelihood"]
        gains = [[by[m][k] - by["20 MAP networks"][k] for k in by[m]] for m in methods]
        means = [np.mean(x) for x in gains]
        dots(ax, methods.values(), means, [np.std(x, ddof=1) / len(x) ** 0.5 for x in gains])
        ax.axvline(0, color="0.5", lw=1)
        ax.set_title(f"{title}, {len(gains[0])} splits")
        ax.locator_params(axis="x", nbins=3)
        ax.plot(means[4:], -np.arange(4, 7), "o", color=ORANGE, ms=5, zorder=5)
    figure.supxlabel(
        "gain in test log-likelihood over 20 tuned MAP networks; orange: step tuned on validation rows", fontsize=9
    )
    return figure


def coverage():
    """Differences of the ranks' distribution from the uniform one, with simultaneous bands."""
    found = rows("coverage", kernel="SGLDR")
    names = list(dict.fromkeys(row["model"] for row in found))
    figure, axes = plt.subplots(2, 3, figsize=(7, 4), sharex=True, sharey=True)
    at = np.linspace(0.02, 0.98, 49)
    for ax, name in zip(axes.flat, names, strict=True):
        ranks = np.concatenate([row["ranks"] for row in found if row["model"] == name])
        number, d = ranks.shape
        low, high = simultaneous_band(number, at, 1 - 0.05 / d)
        ax.fill_between(at, low - at, high - at, color="0.9", lw=0)
        share = (ranks[:, :, None] <= at).mean(0)
        ax.plot(at, (share - at).T, color=BLUE, lw=0.7, alpha=0.7)
        outside = ((share < low) | (share > high)).any(1).sum()
        print(f"coverage, {name}: {d} parameters, {outside} outside of the band")
        ax.set_title(f"{name.replace(', effects of', '')} ({d})")
    axes[0, 0].annotate("95% band", (0.5, 0.066), color="0.4", fontsize=8, ha="center")
    figure.supxlabel("rank of the true parameter among the draws", fontsize=9)
    figure.supylabel("share of data sets below, minus rank", fontsize=9)
    return figure


def second_order():
    """The bias of variances on average over parameters, with minibatches."""
    figure, ax = plt.subplots(figsize=(7, 4.8))
    found = [row for row in rows("second_order") if row.get("control_variates", "none") != "none"]
    cases = list(dict.fromkeys(row["case"] for row in found))
    for kernel, color, shift in (("SGLD", BLUE, 0.12), ("SGHMC", ORANGE, -0.12)):
        mine = [row for row in found if row["kernel"] == kernel]
        y = shift - np.array([cases.index(row["case"]) for row in mine])
        values, errors = (100 * np.array([row[key] for row in mine]) for key in ("average", "average_error"))
        ax.errorbar(values, y, xerr=errors, fmt="o", color=color, ms=5, lw=1)
        ax.annotate(kernel, (values[0], y[0]), (0, 6 if shift > 0 else -13), textcoords="offset points", color=color)
    ax.set_yticks(-np.arange(len(cases)), [case.replace(", 50,000 rows", ",\n50,000 rows") for case in cases])
    ax.axvline(0, color="0.5", lw=1)
    ax.axvline(1, color="0.5", lw=1, ls="--")
    ax.annotate("tolerance of the default step: 1%", (0.99, 0.55 - len(cases)), color="0.4", fontsize=8, ha="right")
    ax.set(xlim=(-0.2, 1.4), ylim=(0.4 - len(cases), 0.6))
    ax.set_xlabel("bias of the posterior variances, mean over parameters, %")
    return figure


def peers():
    """Effective draws a second of the best setting of each sampler."""
    best = {}
    for row in rows("peers", part="accuracy"):
        name = f"{row['sampler']}, {row['setting']}".replace("`", "").strip(", ")
        kind = name.split(", step")[0].replace(", at the mode's proxy", "").replace(", all rows", "")
        if (
            row["sd_rms"] <= 0.05
            and row["average_a_second"] > best.get(kind, {"average_a_second": 0})["average_a_second"]
        ):
            best[kind] = row | {"name": name}
    kept = sorted(best.values(), key=lambda row: -row["average_a_second"])
    figure, ax = plt.subplots(figsize=(7, 3.4))
    values = np.array([row["average_a_second"] for row in kept])
    texts = [f"{row['average_a_second']:,.0f}   ({row['seconds']:.0f} s a run)" for row in kept]
    labels = [row["name"].replace("own minibatches", "own\nminibatches") for row in kept]
    dots(ax, labels, values, [row["average_a_second_se"] for row in kept], texts=texts)
    ours = [i for i, row in enumerate(kept) if not row["sampler"].startswith(("BlackJAX", "NumPyro"))]
    ax.plot(values[ours], -np.array(ours), "o", color=ORANGE, ms=6, zorder=5)
    ax.annotate("orange: this package", (0.99, 0.12), xycoords="axes fraction", ha="right", color=ORANGE)
    ax.set(xscale="log", xlim=(8, 4e5), xlabel="ESS per second over all means, compilation included")
    return figure


def growth():
    """Microseconds of an update as one number grows."""
    names = {"L": "particles", "N": "rows of data", "d": "parameters", "batch": "minibatch rows"}
    shown = {"SGLD": BLUE, "SGLDR": ORANGE, "SGLDR, random features": GREEN, "SGHMC": SKY}
    figure, axes = plt.subplots(2, 2, figsize=(7, 4.6), sharey=True)
    for ax, (varied, name) in zip(axes.flat, names.items(), strict=True):
        for kernel, color in shown.items():
            found = sorted((row["size"], 1e6 * row["seconds"]) for row in rows("growth", varied=varied, kernel=kernel))
            ax.plot(*zip(*found, strict=True), "o-", color=color, ms=3, lw=1)
        ax.set(xscale="log", yscale="log", xlabel=name, ylim=(28, 1.2e4))
    texts = {"SGLDR, random features": (5, 430), "SGLDR": (200, 4600), "SGHMC": (95, 380), "SGLD": (4.6, 34)}
    for kernel, place in texts.items():
        axes[0, 0].annotate(kernel.removeprefix("SGLDR, "), place, color=shown[kernel], fontsize=8)
    for ax in axes[:, 0]:
        ax.set_ylabel("µs per update")
    return figure


SHORT = {
    "NumPyro NUTS": ("NUTS", ORANGE, "s"),
    "nutpie, diagonal": ("nutpie, diagonal", YELLOW, "^"),
    "nutpie, low rank": ("nutpie, low rank", GREEN, "D"),
    "Laplace": ("Laplace", PINK, "v"),
}


def real():
    """The worst error of a mean, by posterior, of all seeds."""
    found = [row for row in rows("real") if "mean" in row]
    order = sorted(
        {row["problem"] for row in found}, key=lambda n: max(r["mean"][0] for r in found if r["problem"] == n)
    )
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), sharey=True)
    for ax, key, title in zip(axes, ("mean", "sd"), ("error of a mean, sd", "relative error of an sd"), strict=True):
        for kernel, color, shift in (("SGLD", BLUE, 0.12), ("SGHMC", ORANGE, -0.12)):
            mine = [row for row in found if row["kernel"] == kernel]
            y = [shift - order.index(row["problem"]) for row in mine]
            flagged = [bool({"not_mixed", "separate_modes", "rounding"} & set(row["findings"])) for row in mine]
            face = ["none" if flag else color for flag in flagged]
            ax.scatter([row[key][0] for row in mine], y, s=22, facecolors=face, edgecolors=color, lw=1)
            # An arrow for what lies beyond the axis.
            for x, at in zip((row[key][0] for row in mine), y, strict=True):
                if x > 0.3:
                    ax.plot(0.295, at, ">", color=color, mfc="none", ms=4)
                    ax.annotate(f"{x:.2f}", (0.299, at - 0.15), color=color, fontsize=8, ha="right", va="top")
        ax.axvline(0.15 if key == "mean" else 0.1, color="0.5", lw=1, ls="--")
        ax.set(xlim=(0, 0.3), ylim=(-len(order) + 0.3, 0.4), xlabel=f"largest {title}")
    axes[0].set_yticks(-np.arange(len(order)), order)
    axes[0].annotate("target", (0.152, -6.3), color="0.4", fontsize=8)
    axes[1].annotate("SGLD", (0.17, -0.3), color=BLUE)
    axes[1].annotate("SGHMC", (0.17, -1.0), color=ORANGE)
    axes[1].annotate("hollow: flagged as not\nmixed, or as rounded", (0.17, -2.3), color="0.4", fontsize=8)
    return figure


def real_peers():
    """Seconds and the worst error of a mean, by posterior."""
    ours, theirs = rows("real"), rows("real_peers")
    names = ["flights", "flights_noncentered", "bikes", "protein", "kin8nm", "volatility", "gp_classification"]
    names += ["survival", "wine"]
    figure, axes = plt.subplots(3, 3, figsize=(7, 6), sharex=True, sharey=True)
    for ax, name in zip(axes.flat, names, strict=True):
        ax.axhspan(0.005, 0.15, color="0.94", lw=0)
        points = [(row["seconds"], row["mean"][0]) for row in ours if row["problem"] == name]
        points += [
            (row["seconds"], row["mean"][0])
            for row in theirs
            if row.get("problem") == name and row.get("sampler", "").startswith("`")
        ]
        ax.plot(*zip(*points, strict=True), "o", color=BLUE, ms=4)
        for row in theirs:
            if row.get("problem") == name and row.get("sampler") in SHORT and "mean" in row:
                _, color, marker = SHORT[row["sampler"]]
                ax.plot(row["seconds"], min(row["mean"][0], 8.0), marker, color=color, ms=5)
        ax.set(xscale="log", yscale="log", xlim=(3, 3000), ylim=(0.01, 10))
        ax.set_title(name)
    keys = [("SGLD, SGHMC", BLUE, "o"), *SHORT.values()]
    handles = [
        plt.Line2D([], [], color=color, marker=marker, ls="", ms=5, label=label) for label, color, marker in keys
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5)
    axes[0, 0].annotate("target", (3.5, 0.1), color="0.4", fontsize=8)
    figure.supxlabel("seconds of a run, compilation included", fontsize=9)
    figure.supylabel("largest error of a posterior mean, sd", fontsize=9)
    return figure


def collection():
    """The worst errors of each posterior."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), sharex=True, sharey=True)
    for ax, kernel in zip(axes, ("SGLD", "SGHMC"), strict=True):
        found = rows("collection", kernel=kernel)
        ax.fill_between([1e-3, 0.1], 1e-3, 0.1, color="0.94", lw=0)
        for flagged, face in ((False, BLUE), (True, ORANGE)):
            mine = [row for row in found if bool(row["named"]) == flagged]
            ax.plot([row["mean"] for row in mine], [row["sd"] for row in mine], "o", color=face, ms=4)
            for row in mine if flagged else ():
                name = row["posterior"].replace(" regression", "").replace(" of one hundred", "")
                shift, side = {
                    "horseshoe": ((-6, -3), "right"),
                    "banana": ((5, 3), "left"),
                    "local level": ((24, -16), "left"),
                }.get(name, ((0, 7), "center"))
                place = row["mean"], row["sd"]
                line = {"arrowstyle": "-", "color": ORANGE, "lw": 0.8} if name == "local level" else None
                ax.annotate(
                    name, place, shift, textcoords="offset points", ha=side, color=ORANGE, fontsize=8, arrowprops=line
                )
        ax.set(xscale="log", yscale="log", xlim=(4e-3, 0.5), ylim=(2.5e-3, 3), xlabel="largest error of a mean, sd")
        ax.set_title(f"{kernel}, 49 posteriors")
    axes[0].set_ylabel("largest relative error of an sd")
    axes[0].annotate("right", (0.0043, 0.075), color="0.4", fontsize=8)
    axes[1].annotate("orange: flagged by diagnose", (0.0043, 1.9), color=ORANGE, fontsize=8)
    return figure


def measure():
    """Effective draws a second, compiled, of what is known worst."""
    shown = {
        "`SGLD(model)`": ("SGLD", BLUE, "o"),
        "`SGLDR(model)`": ("SGLDR", SKY, "o"),
        "NumPyro NUTS": ("NUTS", ORANGE, "s"),
        "nutpie, low rank": ("nutpie, low rank", GREEN, "D"),
        "BlackJAX ChEES-HMC": ("BlackJAX ChEES-HMC", PINK, "^"),
    }
    found = rows("measure")
    names = list(dict.fromkeys(row["posterior"] for row in found))
    known = {"eight_schools_noncentered": 1e4, "garch11": 1e4, "arK": 1e4}
    figure, ax = plt.subplots(figsize=(7, 3.8))
    for label, (text, color, marker) in shown.items():
        mine = {row["posterior"]: row for row in found if row["method"] == label}
        values = []
        for name in names:
            number = np.inf if name.startswith("gaussian") else known.get(name, 2e4)
            left = np.mean(mine[name]["errors"], 0).max() - 1 / number
            values.append(min(1 / left if left > 0 else np.inf, number) / mine[name]["seconds"])
        ax.plot(values, -np.arange(len(names)), marker, color=color, ms=6, label=text)
    titles = [
        name.replace("_noncentered", "").replace("_", " ").replace(", batch 200", ",\nminibatches of 200")
        for name in names
    ]
    ax.set_yticks(-np.arange(len(names)), titles)
    ax.grid(axis="y", color="0.93")
    ax.set(xscale="log", xlabel="ESS per second once compiled (worst of means, squares, quantiles)")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def learning_coefficients():
    """Estimates over the theorem's values."""
    theorem = {"(3, 2, 6)": 5, "(5, 3, 5)": 9.5, "(4, 3, 8)": 8.5, "(3, 8, 4)": 6, "(4, 4, 4, 4)": 7.5}
    stored = json.loads((ROOT / "benchmarks" / "results" / "full" / "learning_coefficients.json").read_text())["rows"]
    figure, ax = plt.subplots(figsize=(7, 2.9))
    shown = {"SGLD": BLUE, "SGHMC": ORANGE, "SGNHT": GREEN, "NUTS": BLACK}
    for k, (kernel, color) in enumerate(shown.items()):
        found = [
            row for name in theorem for key, row in stored.items() if key.startswith(name) and key.endswith(kernel)
        ]
        truth = np.array(list(theorem.values()))
        values, errors = (np.array([row[key] for row in found]) / truth for key in ("value", "error"))
        x = np.arange(5) + 0.12 * (k - 1.5)
        ax.errorbar(
            x, values, errors, fmt="o", color=color, ms=4, lw=1, label=f"{kernel}{', all rows' * (kernel == 'NUTS')}"
        )
    ax.axhspan(0.9, 1.1, color="0.95", lw=0)
    ax.axhline(1, color="0.5", lw=1)
    labels = [f"{'-'.join(name.strip('()').split(', '))}\nλ = {value:g}" for name, value in theorem.items()]
    ax.set_xticks(np.arange(5), labels)
    ax.set(ylabel="estimate / theorem's value", ylim=(0.86, 1.14), xlabel="widths of the network")
    ax.annotate("target", (-0.42, 1.085), color="0.4", fontsize=8)
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def accelerator():
    """Seconds of whole runs on a million rows."""
    stored = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "accelerator.json").read_text())["rows"]
    figure, ax = plt.subplots(figsize=(7, 2.2))
    names = ("SGLD", "SGLDR", "SGHMC")
    first, second = np.array([stored[f"million {name}"]["seconds"] for name in names]).T
    y = -np.arange(4)
    ax.barh(y[:3], first, height=0.55, color=SKY)
    ax.barh(y[:3], second, height=0.55, color=BLUE)
    ax.barh(y[3:], [190], height=0.55, color="0.85")
    for height, one, two in zip(y, first, second, strict=False):
        ax.annotate(
            f"{one:.0f} s, compilation included; {two:.1f} s once compiled", (one + 2, height), va="center", fontsize=8
        )
    ax.annotate("not finished after 190 s", (186, -3), va="center", ha="right", fontsize=8)
    ax.set_yticks(y, [*names, "NUTS, all rows"])
    ax.set(xlabel="seconds of a run on an H100: 1,000,000 rows, 50 coefficients", xlim=(0, 195))
    return figure


FIGURES = (
    *(gaussian, mixtures, networks, coverage, second_order, peers, growth, real, real_peers),
    *(collection, measure, learning_coefficients, accelerator),
)

if __name__ == "__main__":
    plt.style.use(ROOT / "docs" / "style.mplstyle")
    STATIC.mkdir(exist_ok=True)
    for draw in FIGURES:
        if draw.__name__ in (sys.argv[1:] or [f.__name__ for f in FIGURES]):
            draw().savefig(STATIC / f"{draw.__name__}.png")
            plt.close()
