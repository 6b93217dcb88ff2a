r"""Latent variables of single rows, integrated out of a model, so that its other sites keep their exact posterior.

In a model with a latent variable :math:`u_r` of each row r of a subsampled plate,

.. math::
    p(\theta, u, y) = p(\theta) \prod_r p(u_r | \theta)\, p(y_r | u_r, \theta),

a minibatch estimates the likelihood of :math:`\theta` from integrals over the latent variables of its own rows alone:

.. math::
    \log p(y | \theta) \approx \frac{N}{B} \sum_{r \in \text{batch}} \log \int p(u | \theta)\, p(y_r | u, \theta)\, du .

Points lie around the mode of the integrand, which Newton's method finds. Of one latent variable they end where the
integrand has all but vanished on either side, and the integral is a trapezoidal sum after the change of variables
:math:`t \mapsto c t / (1 + q t)`, which takes -1, 0 and 1 to the ends and the mode: of smooth functions that vanish at
both ends such sums converge faster than any power of the number of points, however skewed they are. Of two or three it
is Gauss-Hermite quadrature, in units of the curvature at the mode. Both are exact, the sum to about 1e-8, if row and
latent variables are jointly Gaussian.

**References:**

1. *A note on Gauss-Hermite quadrature*, Q. Liu and D. A. Pierce, Biometrika 81, 1994
2. *Approximations to the log-likelihood function in the nonlinear mixed-effects model*, J. C. Pinheiro and
   D. M. Bates, Journal of Computational and Graphical Statistics 4, 1995
3. *The exponentially convergent trapezoidal rule*, L. N. Trefethen and J. A. C. Weideman, SIAM Review 56, 2014
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
import numpy as np

import numpyro
from numpyro.distributions import Delta, MaskedDistribution, biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_repulsion.gradients.minibatch import TakesRows
from numpyro_repulsion.rounding import matmul

#: The number of points along each dimension, by the number of dimensions.
NUM_POINTS = {1: 17, 2: 5, 3: 3}
#: Points of a trapezoidal sum end where the log density is this much below its maximum, or after so many doublings of
#: the distance at which a Gaussian density of the same curvature is.
DROP, MOST_DOUBLINGS = 18.0, 4.0
#: Where Newton's method begins: not at 0, where log densities written with ``abs`` have wrong derivatives.
START = 0.1
#: The longest first step of Newton's method, in standard deviations of the curvature, and the largest number of steps.
LONGEST, MAX_STEPS = 4.0, 50
#: A mode is found once a step is shorter, in the same units.
CLOSE = 1e-2

#: ``u -> log p(u, y_r | θ)`` of each row r: from ``(B, k)`` to ``(B,)``.
LogDensity = Callable[[Float[Array, "B k"]], Float[Array, " B"]]


class _Keys(Messenger):
    """Gives a model the random keys that it got in another run."""

    def __init__(self, fn: Callable, keys: Iterable[jax.Array]):
        super().__init__(fn)
        self._keys = iter(keys)

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            # NumPyro's `block` would let it pass.
            msg["value"], msg["stop"] = next(self._keys), True


class LocalSite(NamedTuple):
    """A latent site inside of a subsampled plate.

    - **shape** - that of its unconstrained values, for the rows of one minibatch.
    - **axis** - that of the plate.
    """

    shape: tuple[int, ...]
    axis: int

    def of_rows(self, u: Float[Array, "B k"]) -> Array:
        rows, *rest = self.shape[self.axis], *self.shape[: self.axis], *self.shape[self.axis + 1 :]
        return jnp.moveaxis(u.reshape(rows, *rest), 0, self.axis)


def local_sites(sites: Mapping[str, dict]) -> dict[str, str]:
    """Return the continuous latent sites inside of subsampled plates, with these plates."""
    plates = subsample_plate_sizes(sites)
    return {
        name: frame.name
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"] and not site["fn"].support.is_discrete
        for frame in site["cond_indep_stack"]
        if frame.name in plates
    }


class Outside(Messenger):
    """Hides all sites inside of some plates, and records what is outside.

    The latent sites that it hides have the values of unconstrained coordinates ``fill``.

    - **known** - the values of the sites outside, and the rows of all plates.
    - **sizes** - the sizes of all plates.
    - **keys** - the random keys that the model asked for, in their order.
    - **plates** - the plates with hidden sites, by name.
    - **latent** - the latent sites inside, by plate and name.
    """

    def __init__(self, fn: Callable | None, plates: frozenset[str], fill: float | jax.Array = 0.0):
        super().__init__(fn)
        self.names, self.fill = plates, fill
        self.known: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.keys: list[jax.Array] = []
        self.plates: dict[str, numpyro.plate] = {}
        self.latent: dict[str, dict[str, LocalSite]] = {}

    def process_message(self, msg):
        around = [frame for frame in msg.get("cond_indep_stack", ()) if frame.name in self.names]
        if not around or msg["type"] not in ("sample", "deterministic"):
            return
        msg["stop"] = True
        if msg["type"] == "deterministic":
            return
        frame, *others = around
        plates = {x.name: x for x in _PYRO_STACK if isinstance(x, numpyro.plate)}
        others += [x for x in plates.values() if x.name != frame.name and x.subsample_size < x.size]
        _check_site(msg, frame.name, others)
        self.plates.setdefault(frame.name, plates[frame.name])
        if not msg["is_observed"]:
            fn, to_support = msg["fn"], biject_to(msg["fn"].support)
            shape = jax.eval_shape(to_support.inv, jax.ShapeDtypeStruct(fn.shape(), jnp.result_type(float))).shape
            site = LocalSite(shape, len(fn.batch_shape) + frame.dim)
            self.latent.setdefault(frame.name, {})[msg["name"]] = site
            msg["value"] = to_support(jnp.full(shape, self.fill))

    def postprocess_message(self, msg):
        if msg["type"] in ("sample", "param", "mutable", "plate") and not msg.get("stop"):
            self.known[msg["name"]] = msg["value"]
        if msg["type"] == "prng_key":
            self.keys.append(msg["value"])
        if msg["type"] == "plate":
            self.sizes[msg["name"]] = msg["args"][0]


def _check_site(msg, plate, others):
    """Raise ``ValueError`` for a site inside of a plate with latent variables that cannot be integrated out."""
    name, fn = msg["name"], msg["fn"]
    if others:
        raise ValueError(
            f"The site '{name}' lies inside of the subsampled plates '{plate}' and '{others[0].name}', and one has "
            "latent variables of single rows: their integral is not one for each row. Move the latent sites out of the "
            "plate and index them, or subsample only one of the plates."
        )
    if not msg["is_observed"] and isinstance(getattr(fn, "base_dist", fn), Delta):
        raise ValueError(
            f"Latent site '{name}' has a delta distribution; write `numpyro.deterministic('{name}', ...)`."
        )
    if not msg["is_observed"] and fn.support.is_discrete:
        raise ValueError(
            f"The discrete latent site '{name}' lies inside of the subsampled plate '{plate}' beside continuous latent "
            "sites, and particles integrate over one kind only. Marginalize it by hand "
            "(numpyro.distributions.MixtureSameFamily), or drop `subsample_size`."
        )


class Integrated:
    """A model without the latent sites inside of some subsampled plates, over which it integrates.

    Each of these plates has one site, a factor with the logarithms of the integrals, in place of all of its own.
    """

    #: About how many evaluations of the density of a row take as long as one integral and its gradient.
    WORK = 50

    def __init__(
        self, model: Callable, plates: frozenset[str], num_points: Mapping[int, int] = NUM_POINTS, start: float = START
    ):
        self.model, self.plates, self.num_points, self.start = model, plates, num_points, start

    def __call__(self, *args, **kwargs):
        for plate, rows in self._rows(args, kwargs):
            with plate:
                start = rows.filled(self.start)
                found = log_integrals(rows.log_density(), rows.log_density(is_fixed=True), start, self.num_points)
                numpyro.factor(f"{plate.name}_integrated", found.reshape(-1, *(1,) * (-plate.dim - 1)))

    def draw(self, key: jax.Array, *args, **kwargs) -> dict[str, Array]:
        """Return a draw of the latent sites, in their supports, given all that is outside of their plates."""
        found: dict[str, Array] = {}
        for _, rows in self._rows(args, kwargs):
            key, own_key = random.split(key)
            sites = rows.sites(draw_rows(own_key, rows.log_density(), rows.filled(self.start)))
            found |= {name: sites[name]["value"] for name in rows.latent}
        return found

    def _rows(self, args, kwargs):
        run, outside = partial(self.model, *args, **kwargs), Outside(None, self.plates)
        with outside:
            run()
        return [(plate, Rowwise(run, outside, name)) for name, plate in outside.plates.items()]


def _fixed(x):
    # Rows stay the same objects, by which devices know them.
    return lax.stop_gradient(x) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


class Rowwise:
    """The rows of a minibatch, given all that a model has outside of their plate."""

    def __init__(self, run: Callable, outside: Outside, plate: str):
        self.run, self.outside, self.plate = run, outside, outside.plates[plate]
        self.latent = outside.latent.get(plate, {})
        self.widths = [math.prod(x.shape) // x.shape[x.axis] for x in self.latent.values()]
        if 0 < sum(self.widths) <= max(NUM_POINTS):
            return
        imputed = [name.removesuffix("_unobserved") for name in self.latent if name.endswith("_unobserved")]
        remedy = "Move them out of the plate and index them, or drop `subsample_size`."
        if imputed:
            remedy = (
                f"Leave hidden entries out instead of imputing them, `with numpyro.handlers.mask(mask=mask[i]): "
                f"numpyro.sample('{imputed[0]}', ..., obs=y[i])`: the posterior of the parameters is the same."
            )
        raise ValueError(
            f"The sites {sorted(self.latent)} inside of the subsampled plate '{plate}' have {sum(self.widths)} latent "
            f"variables for each row; particles integrate over 1 to {max(NUM_POINTS)}. {remedy}"
        )

    def filled(self, value: float) -> Float[Array, "B k"]:
        """Return unconstrained coordinates that all have a value."""
        site = next(iter(self.latent.values()))
        return jnp.full((site.shape[site.axis], sum(self.widths)), value)

    def split(self, u: Float[Array, "B k"]) -> dict[str, Array]:
        """Return the values of the unconstrained sites."""
        parts = jnp.split(u, np.cumsum(self.widths)[:-1], -1)
        return {name: site.of_rows(part) for (name, site), part in zip(self.latent.items(), parts, strict=True)}

    def sites(self, u: Float[Array, "B k"], known: dict[str, Any] | None = None) -> dict[str, dict]:
        """Return all sites of the model with some values of the latent ones.

        :param known: values of the sites outside of the plate, if not those themselves.
        """
        values, sizes = self.split(u), self.outside.sizes
        known = self.outside.known if known is None else known
        rows = {name: self.outside.known[name] for name in sizes}

        def to_support(site):
            if site["type"] == "sample" and site["name"] in values:
                return biject_to(site["fn"].support)(values[site["name"]])
            return None

        model = _Keys(substitute(substitute(self.run, data=known), substitute_fn=to_support), self.outside.keys)
        with block():
            return trace(TakesRows(seed(model, random.key(0)), rows, sizes)).get_trace()

    def log_density(self, is_fixed: bool = False) -> LogDensity:
        """Return the density of each row.

        :param is_fixed: whether derivatives take what is outside of the plate as constant: here, because JAX 0.9 cannot
            differentiate a loop by what it uses, even if that is fixed within the loop.
        """
        known = jax.tree.map(_fixed, self.outside.known) if is_fixed else None
        return lambda u: self._total(self.sites(u, known), self.split(u))

    def _total(self, sites, values):
        weight, total = self.plate.size / self.plate.subsample_size, jnp.zeros(())
        for name, site in sites.items():
            if site["type"] != "sample" or not any(x.name == self.plate.name for x in site["cond_indep_stack"]):
                continue
            fn, value, dim = site["fn"], site["value"], self.plate.dim
            found = fn.log_prob(value, site["intermediates"]) if site["intermediates"] else fn.log_prob(value)
            # The plate multiplies by N / B, which belongs to the logarithm of the integral.
            found = found if site["scale"] is None else found * (site["scale"] / weight)
            if name in values:
                transform, u = biject_to(fn.support), values[name]
                volume = transform.log_abs_det_jacobian(u, value)
                found = found + sum_rightmost(volume, volume.ndim - len(fn.batch_shape))
                if isinstance(fn, MaskedDistribution):
                    # What is masked has no density, and the integral needs some.
                    some = -0.5 * sum_rightmost(u**2 + math.log(2 * math.pi), u.ndim - len(fn.batch_shape))
                    found = jnp.where(fn._mask, found, some)
            total = total + jnp.moveaxis(found, dim, 0).reshape(found.shape[dim], -1).sum(-1)
        return total


class Mode(NamedTuple):
    """The mode of each row's density, and its width.

    - **position** - ``(B, k)``.
    - **root** - F, upper triangular, with F Fᵀ the inverse of the curvature at the mode, ``(B, k, k)``.
    """

    position: Float[Array, "B k"]
    root: Float[Array, "B k k"]

    def at(self, x: Float[Array, "K _ k"]) -> Float[Array, "K B k"]:
        """Return points x, in units of the width about the mode, for each row or for all."""
        return self.position + matmul(self.root, x[..., None])[..., 0]


def log_integrals(
    log_density: LogDensity, fixed: LogDensity, start: Float[Array, "B k"], num_points: Mapping[int, int] = NUM_POINTS
) -> Float[Array, " B"]:
    """Return the logarithm of the integral of each row's density.

    :param fixed: the same function without derivatives with respect to anything but ``u``; points do not move then,
        which leaves derivatives of the integral as exact as the integral.
    :param start: where the search for modes begins.
    """
    dimension, dtype = start.shape[-1], start.dtype
    mode, number = find_modes(fixed, lax.stop_gradient(start)), num_points[dimension]
    if dimension == 1:
        # Without the ends, where nothing is left.
        points, log_weights = spread(fixed, mode, jnp.asarray(np.linspace(-1.0, 1.0, number + 2)[1:-1, None], dtype))
        log_weights = log_weights + math.log(2.0 / (number + 1))
    else:
        x, log_weights = (jnp.asarray(part, dtype)[:, None] for part in gauss_hermite(dimension, number))
        points = mode.at(x)
        log_weights = log_weights + jnp.log(jnp.diagonal(mode.root, axis1=1, axis2=2)).sum(-1)
    points, log_weights = jax.tree.map(lax.stop_gradient, (points, log_weights))
    return logsumexp(jax.vmap(log_density)(points) + log_weights, 0)


def spread(
    log_density: LogDensity, mode: Mode, t: Float[Array, "K _"]
) -> tuple[Float[Array, "K B 1"], Float[Array, "K B"]]:
    """Return points u(t), with t from -1 to 1, over the width of each row's density, and log du/dt."""
    sides, highest = jnp.array([[-1.0], [1.0]], mode.root.dtype), log_density(mode.position)
    gaussian = (2.0 * DROP) ** 0.5 * mode.root[:, 0, 0]

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2.0
        values = jax.vmap(log_density)(mode.position + (sides * gaussian * 2.0**middle)[..., None])
        # Where there is no number, there is no density.
        is_beyond = ~(highest - values < DROP)
        return jnp.where(is_beyond, low, middle), jnp.where(is_beyond, middle, high)

    widest = jnp.full((2, len(gaussian)), MOST_DOUBLINGS, gaussian.dtype)
    low, high = lax.fori_loop(0, 5, halve, (-widest, widest))
    left, right = gaussian * 2.0 ** ((low + high) / 2.0)
    scale, skew = 2.0 * left * right / (left + right), (left - right) / (left + right)
    points = mode.position[:, 0] + scale * t / (1.0 + skew * t)
    return points[..., None], jnp.log(scale / (1.0 + skew * t) ** 2)


def gauss_hermite(dimension: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points x ``(K, k)`` and log weights ``(K,)``: the sum of w f(x) is the integral of f, if f / exp(−|x|²/2)
    is a polynomial of a degree below ``2 number`` in each coordinate."""
    x, w = np.polynomial.hermite_e.hermegauss(number)
    points = np.array(list(itertools.product(x, repeat=dimension)))
    weights = np.array(list(itertools.product(np.log(w), repeat=dimension))).sum(-1)
    return points, weights + 0.5 * (points**2).sum(-1)


def find_modes(log_density: LogDensity, start: Float[Array, "B k"]) -> Mode:
    """Return the mode of each row's density and the curvature there.

    By Newton's method, with steps of a limited length, which grows where they gain density and shrinks where they
    lose it: a precise likelihood may lie thousands of standard deviations away.
    """
    dimension = start.shape[-1]

    def expanded(u):
        value = log_density(u)
        slope = jax.grad(lambda u: log_density(u).sum())
        columns = [jax.jvp(slope, (u,), (jnp.zeros_like(u).at[:, i].set(1.0),)) for i in range(dimension)]
        curvature = [[-column[:, j] for j in range(dimension)] for _, column in columns]
        lower, pivots = _decomposed(curvature)
        return u, value, columns[0][0], lower, pivots

    def goes_on(state):
        number, *_, is_found = state
        return (number < MAX_STEPS) & ~is_found.all()

    def improve(state):
        number, found, longest, is_found = state
        u, value, slope, lower, pivots = found
        s = _forward(lower, slope) / jnp.sqrt(pivots)
        length = jnp.linalg.norm(s, axis=-1)
        factor = longest / jnp.maximum(length, longest)
        new = expanded(u + factor[:, None] * _backward(lower, s / jnp.sqrt(pivots)))
        rounding = 10 * jnp.finfo(start.dtype).eps * (1.0 + jnp.abs(value))
        # What a row has found must not depend on the others.
        is_better = (new[1] >= value - rounding) & ~is_found
        kept = jax.tree.map(lambda a, b: jnp.where(is_better[:, None] if a.ndim > 1 else is_better, a, b), new, found)
        tried = jnp.minimum(length, longest)
        longest = jnp.where(is_better, jnp.maximum(2.0 * tried, longest), tried / 4.0)
        return number + 1, kept, longest, is_found | (length < CLOSE) | (longest < 1e-4)

    begin = jnp.zeros((), int), expanded(start), jnp.full(len(start), LONGEST, start.dtype), jnp.zeros(len(start), bool)
    _, (mode, _, _, lower, pivots), *_ = lax.while_loop(goes_on, improve, begin)
    # F = L⁻ᵀ D^(−1/2), column by column.
    columns = jnp.eye(dimension, dtype=start.dtype) / jnp.sqrt(pivots)[:, None]
    return Mode(mode, jnp.stack([_backward(lower, columns[:, i]) for i in range(dimension)], -1))


def _decomposed(matrix):
    """Return L below its diagonal and D of the matrices ``matrix[i][j]``, with D made positive."""
    size = len(matrix)
    lower = [[jnp.zeros_like(matrix[0][0])] * size for _ in range(size)]
    pivots: list[Array] = []
    for j in range(size):
        pivot = matrix[j][j] - sum(lower[j][k] ** 2 * pivots[k] for k in range(j))
        # As far from 0 as an exact one would be by rounding.
        pivots.append(jnp.maximum(jnp.abs(pivot), 1e-6 * (1e-6 + jnp.abs(matrix[j][j]))))
        for i in range(j + 1, size):
            lower[i][j] = (matrix[i][j] - sum(lower[i][k] * lower[j][k] * pivots[k] for k in range(j))) / pivots[j]
    return lower, jnp.stack(pivots, -1)


def _forward(lower, x):
    """Return ``L⁻¹ x``."""
    found: list[Array] = []
    for i in range(x.shape[-1]):
        found.append(x[..., i] - sum(lower[i][k] * found[k] for k in range(i)))
    return jnp.stack(found, -1)


def _backward(lower, x):
    """Return ``L⁻ᵀ x``."""
    size = x.shape[-1]
    found = [x[..., 0]] * size
    for i in reversed(range(size)):
        found[i] = x[..., i] - sum(lower[k][i] * found[k] for k in range(i + 1, size))
    return jnp.stack(found, -1)


def draw_rows(key: jax.Array, log_density: LogDensity, start: Float[Array, "B k"]) -> Float[Array, "B k"]:
    """Return one draw from each row's density, one of 200 points, chosen by importance.

    Of one variable they are spread evenly, with a random shift; otherwise they are draws from Student's t.
    """
    point_key, scale_key, choice_key = random.split(key, 3)
    mode, number, (size, dimension) = find_modes(log_density, start), 200, start.shape
    if dimension == 1:
        shift = random.uniform(point_key, (size,), start.dtype)
        points, log_weights = spread(log_density, mode, 2.0 * (jnp.arange(number)[:, None] + shift) / number - 1.0)
    else:
        freedom = 5.0
        scale = jnp.sqrt(freedom / random.chisquare(scale_key, freedom, (number, size, 1), start.dtype))
        x = scale * random.normal(point_key, (number, *start.shape), start.dtype)
        points, log_weights = mode.at(x), 0.5 * (freedom + dimension) * jnp.log1p((x**2).sum(-1) / freedom)
    chosen = random.categorical(choice_key, jax.vmap(log_density)(points) + log_weights, 0)
    return jnp.take_along_axis(points, chosen[None, :, None], 0)[0]
