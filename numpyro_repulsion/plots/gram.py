"""Heat map of the matrix K, which couples the particles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.interactions import Interaction, Sum
from numpyro_repulsion.kernels import ParticleKernel, sampler_positions
from numpyro_repulsion.plots.style import check_axes, new_axes, require_pyplot

__all__ = ["plot_gram"]


def plot_gram(
    source: Any,
    positions: Any = None,
    *,
    bandwidth: float | None = None,
    ensemble: int | None = None,
    sort: bool = False,
    colorbar: bool = True,
    ax: Any = None,
    **kwargs: Any,
) -> Any:
    r"""Plots a heat map of K: how much each particle moves with each other one.

    For a run it is the K of the update after its last draw: at the last positions, in the whitened coordinates in which
    distances are measured, with the bandwidth that warmup froze, nugget included. Ensembles that do not interact are
    blocks.

    :param source: an interaction with a Gram matrix, such as ``RBF()``, together with ``positions``; or an ``MCMC``
        that has run with a kernel of this package.
    :param positions: ``(L, d)``, or ``(G, L, d)`` for G ensembles, in whitened coordinates.
    :param bandwidth: h for an interaction without a bandwidth; ``None`` applies its rule to these positions.
    :param ensemble: the number of one ensemble, from 0; ``None`` draws all.
    :param sort: whether to order the particles of each ensemble along the line on which they vary most, so that
        neighbours are neighbours in the matrix too.
    :param colorbar: whether to draw a colour bar.
    :param ax: axes to draw on; ``None`` makes a figure.
    :param kwargs: passed to ``Axes.imshow``.
    :return: the axes.
    :raises ImportError: without matplotlib.
    :raises ValueError: for positions of another shape, the number of an ensemble that does not exist, a run without
        draws, or chains that ran one by one.
    :raises TypeError: for an interaction without a Gram matrix, or with one that is redrawn in every update; and for
        any other ``source``.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import RBF, plot_gram
        >>> ax = plot_gram(RBF(bandwidth=2.0), random.normal(random.key(0), (20, 3)), sort=True)
        >>> ax.images[0].get_array().shape
        (20, 20)
    """
    check_axes(ax)
    if isinstance(source, MCMC):
        if positions is not None or bandwidth is not None:
            raise TypeError("An MCMC has positions and a bandwidth of its own; pass them with an interaction only.")
        interaction, u, bandwidth = _of_run(source)
    else:
        interaction = source
        _require_gram(interaction)
        u = _require_positions(positions)
        bandwidth = _choose_bandwidth(interaction, u, bandwidth)
    matrices = [np.asarray(interaction.gram(group, bandwidth)[0]) for group in u]
    orders = [_order(np.asarray(group)) if sort else np.arange(u.shape[1]) for group in u]
    which = range(len(u))
    if ensemble is not None:
        expected = f"a number from 0 to {len(u) - 1}"
        if (ensemble := integer("`ensemble`", ensemble, 0, expected)) >= len(u):
            raise ValueError(f"`ensemble` must be {expected}; got {ensemble!r}.")
        which = range(ensemble, ensemble + 1)
    size = u.shape[1]
    gram = np.zeros((len(which) * size,) * 2)
    for place, i in enumerate(which):
        block = slice(place * size, (place + 1) * size)
        gram[block, block] = matrices[i][np.ix_(orders[i], orders[i])]
    return _draw(gram, size, _title(interaction, bandwidth), sort, colorbar, ax, kwargs)


def _of_run(mcmc):
    """Return the interaction at the last update, the last cloud ``(G, L, d)`` whitened, and the bandwidth."""
    kernel = mcmc.sampler
    if not isinstance(kernel, ParticleKernel):
        raise TypeError(
            f"plot_gram takes an MCMC with a kernel of this package, such as SGLDR(model); got {type(kernel).__name__}."
        )
    _require_gram(kernel.interaction)
    state = mcmc.last_state
    if state is None:
        raise ValueError("This MCMC has not run yet; call mcmc.run(key, ...) first.")
    if np.ndim(state.num_updates) or not np.ndim(state.potential_energy):
        raise ValueError(
            'Chains that ran one by one share no matrix; run them with chain_method="vectorized", as the particles of '
            "an ensemble."
        )
    flat, _ = sampler_positions(state)
    u = state.warmup.scales.preconditioner.whiten(flat)
    u = u.reshape(kernel.num_ensembles, -1, u.shape[-1])
    return kernel.interaction.at(None, state.num_updates), u, state.warmup.bandwidth


def _require_gram(interaction):
    if not isinstance(interaction, Interaction):
        raise TypeError(
            "plot_gram takes an interaction with a Gram matrix, such as RBF(), and positions; or an MCMC that has run. "
            f"Got {type(interaction).__name__}."
        )
    if interaction.is_redrawn:
        raise TypeError(
            f"{interaction!r} draws another matrix in every update. Plot an interaction with a fixed one, such as "
            "plot_gram(RBF(), positions)."
        )
    part = interaction
    # Balanced() has `gram` only to raise an error.
    while hasattr(part, "gram") and hasattr(part, "interaction"):
        part = part.interaction
    if not hasattr(part, "gram"):
        raise TypeError(f"{interaction!r} has no Gram matrix to plot. Give an interaction that has one, such as RBF().")


def _require_positions(positions):
    try:
        u = jnp.asarray(positions)
    except (TypeError, ValueError):
        u = jnp.zeros(0)
    if not jnp.issubdtype(u.dtype, jnp.floating):
        u = u.astype(float)
    if u.ndim not in (2, 3) or not u.size or u.shape[-2] < 2:
        got = jnp.shape(positions) if u.size else type(positions).__name__
        raise ValueError(
            f"`positions` must be of shape (L, d), or (G, L, d) for G ensembles, with two particles or more; got {got}."
        )
    return u if u.ndim == 3 else u[None]


def _choose_bandwidth(interaction, u, bandwidth):
    if bandwidth is None:
        return interaction.learn_bandwidth(u)
    if not interaction.learns_bandwidth:
        raise ValueError(f"{interaction!r} leaves no bandwidth to pass; got bandwidth={bandwidth!r}. Leave it out.")
    if not 0.0 < bandwidth < float("inf"):
        raise ValueError(f"`bandwidth` must be a positive, finite number; got {bandwidth!r}.")
    return bandwidth


def _order(u):
    """Return the order of the particles ``(L, d)`` along the direction in which they vary most."""
    x = np.where(np.isfinite(u), u, 0.0)
    x = x - x.mean(0)
    return np.argsort(x @ np.linalg.svd(x, full_matrices=False)[2][0], kind="stable")


def _title(interaction, bandwidth):
    name = type(interaction).__name__
    if isinstance(interaction, Sum):
        name = " + ".join(f"{weight:g} {type(term).__name__}" for weight, term in interaction.terms)
    h = float(bandwidth) if interaction.learns_bandwidth else getattr(interaction, "bandwidth", None)
    return name if h is None or np.isnan(h) else f"{name}, h = {h:.3g}"


def _draw(gram, size, title, is_sorted, colorbar, ax, kwargs):
    plt = require_pyplot()
    ax = new_axes((5.0, 4.4)) if ax is None else ax
    largest = np.nanmax(np.abs(gram), initial=0.0)
    # The scale is white at 0; if K has negative entries, it has another colour for them.
    scale = {"cmap": "Blues", "vmin": 0.0, "vmax": largest}
    if np.nanmin(gram, initial=0.0) < 0.0:
        scale = {"cmap": "PuOr", "vmin": -largest, "vmax": largest}
    image = ax.imshow(gram, **scale | {"interpolation": "nearest"} | kwargs)
    for edge in range(size, len(gram), size):
        ax.axhline(edge - 0.5, color="0.6", linewidth=0.6)
        ax.axvline(edge - 0.5, color="0.6", linewidth=0.6)
    name = "particle, in order of position" if is_sorted else "particle"
    ax.set(title=title, xlabel=name, ylabel=name)
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if colorbar:
        plt.colorbar(image, ax=ax, label=r"$K_{ij}$", shrink=0.9).outline.set_visible(False)
    return ax
