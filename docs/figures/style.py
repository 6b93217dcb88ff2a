"""What the figures of the docs share: ``docs/style.mplstyle``, names of its colors, and how a figure is written."""

from __future__ import annotations

from pathlib import Path
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageSequence

DOCS = Path(__file__).parents[1]
STATIC = DOCS / "_static"
#: Okabe and Ito's colors, which color-blind readers can tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
INK, GREY = "#333333", "#8a8a8a"

plt.style.use(DOCS / "style.mplstyle")
# Scripts import the package `benchmarks`, not `benchmarks.py` beside them.
sys.path.insert(0, str(DOCS.parent))


def save(drawn, name, **settings):
    """Write a figure, or an animation, to ``docs/_static``."""
    path = STATIC / name
    getattr(drawn, "savefig", getattr(drawn, "save", None))(path, **settings)
    plt.close("all")
    shrink(path)
    print(f"Wrote {path.relative_to(DOCS.parent)}, {path.stat().st_size / 1000:.0f} kB.")


def shrink(path):
    """Write the picture again with few colors, which takes about half the space."""
    with Image.open(path) as image:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
        duration = image.info.get("duration")
    palette = frames[-1].quantize(128 if len(frames) == 1 else 24)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    # White, as in the corner, stays white beside the page.
    colors = np.reshape(palette.getpalette(), (-1, 3))
    colors[np.asarray(frames[0])[0, 0]] = 255
    for frame in frames:
        frame.putpalette(colors.ravel().tolist())
    first, *rest = frames
    motion = {"save_all": True, "append_images": rest, "duration": duration, "loop": 0} if rest else {}
    first.save(path, optimize=True, **motion)
