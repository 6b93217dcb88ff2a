"""Schemes of minibatches: which rows, how fetched, how gradients are made of them; and the loops."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from benchmarks.problems import logistic_100k as large
from benchmarks.problems.logistic_100k import BATCH, DIMENSION, PARTICLES, ROWS
from numpyro_repulsion.gradients import draw_indices

#: Without control variates gradient noise is most of the noise already at a step of 1e-6.
STEPS = {"plain": 2e-7, "control variates": 1e-5}


def strata(key, count, number):
    """One row from each of as many strata as there are rows in a minibatch, as the package draws them."""
    del count
    return draw_indices(key, {"rows": (ROWS, BATCH)}, (number,))["rows"]


def independent(key, count, number):
    """With replacement."""
    del count
    return random.randint(key, (number, BATCH), 0, ROWS)


def pieces(key, count, number, length=25):
    """Short pieces of the order of the rows, from anywhere."""
    del count
    starts = random.randint(key, (number, BATCH // length, 1), 0, ROWS)
    return _wrapped(starts + jnp.arange(length)).reshape(number, BATCH)


def contiguous(key, count, number):
    """Rows in a row, from anywhere: unbiased in any order of the rows, for each is in as many minibatches."""
    del count
    return _wrapped(random.randint(key, (number, 1), 0, ROWS) + jnp.arange(BATCH))


def one_after_another(key, count, number):
    """Each goes on where its last minibatch ended, so that none is drawn; the starts are spread evenly."""
    del key
    starts = jnp.arange(number) * (ROWS // number) + count * BATCH % ROWS
    return _wrapped(starts[:, None] + jnp.arange(BATCH))


def _wrapped(rows):
    return jnp.where(rows >= ROWS, rows - ROWS, rows)


def gathered(rows, X, y):
    return X[rows], y[rows]


def sliced(rows, X, y):
    """The same rows where they are contiguous, as slices of data whose first rows stand once more at the end."""

    def one(row):
        return lax.dynamic_slice_in_dim(X, row, BATCH), lax.dynamic_slice_in_dim(y, row, BATCH)

    return jax.vmap(one)(rows[:, 0])


def autodiff(z, X, y):
    """The gradient of the likelihood's part of U on one minibatch for several particles, ``(g, d)``."""

    def energy(z):
        logits = X @ z
        return ROWS / BATCH * jnp.sum(jax.nn.softplus(logits) - y * logits)

    return jax.vmap(jax.grad(energy))(z)


def product(z, X, y):
    """The same as two matrix products over all particles."""
    return ROWS / BATCH * (jax.nn.sigmoid(z @ X.T) - y) @ X


@dataclass(frozen=True)
class Scheme:
    """How an update comes by its gradients: ``number`` minibatches, each for as many neighbouring particles."""

    name: str
    number: int
    rows: Callable = strata
    fetch: Callable = gathered
    gradient: Callable = autodiff
    #: Whether rows are ordered by what they say.
    is_sorted: bool = False
    in_short: bool = False

    @property
    def is_distinct(self):
        """Whether no plainer scheme has the same rows."""
        return self.fetch is gathered and self.gradient is autodiff


SCHEMES = [
    Scheme("own", PARTICLES, in_short=True),
    Scheme("own, with replacement", PARTICLES, independent),
    Scheme("own, matrix products", PARTICLES, gradient=product),
    Scheme("groups of 2", 10),
    Scheme("groups of 4", 5, in_short=True),
    Scheme("groups of 4, matrix products", 5, gradient=product),
    Scheme("groups of 5", 4),
    Scheme("shared", 1, in_short=True),
    Scheme("shared, matrix products", 1, gradient=product),
    Scheme("own, pieces of 25 rows", PARTICLES, pieces),
    Scheme("own, contiguous", PARTICLES, contiguous, in_short=True),
    Scheme("own, contiguous, slices", PARTICLES, contiguous, sliced),
    Scheme("own, contiguous, slices, matrix products", PARTICLES, contiguous, sliced, product),
    Scheme("groups of 4, contiguous", 5, contiguous),
    Scheme("shared, contiguous", 1, contiguous),
    Scheme("own, one after another", PARTICLES, one_after_another),
    Scheme("own, contiguous, rows sorted by their logits", PARTICLES, contiguous, is_sorted=True),
    Scheme("own, pieces of 25 rows, sorted by their logits", PARTICLES, pieces, is_sorted=True),
]


def simulate(scheme, kind, num_updates, key, X, y, centre, known, start):
    """Means and standard deviations over particles and the last nine tenths of the updates.

    :param centre: the reference of control variates.
    :param known: the gradient of the likelihood's part of U there.
    :param start: ``(L, d)``.
    """
    step_size = STEPS[kind]

    def noise(key):
        white = random.normal(key, start.shape)
        return (PARTICLES / (PARTICLES - 1)) ** 0.5 * (white - white.mean(0))

    def energy_and_grad(key, count, z):
        rows = scheme.fetch(scheme.rows(key, count, scheme.number), X, y)
        groups = z.reshape(scheme.number, -1, DIMENSION)
        found = jax.vmap(scheme.gradient)(groups, *rows)
        if kind == "control variates":
            found = found - jax.vmap(lambda X, y: scheme.gradient(centre[None], X, y))(*rows) + known
        return z + found.reshape(z.shape)

    def update(carry, count):
        z, old, total, squares = carry
        rows_key, noise_key = random.split(random.fold_in(key, count))
        new = noise(noise_key)
        z = z - step_size * energy_and_grad(rows_key, count, z) + (2 * step_size) ** 0.5 * (old + new) / 2
        # About the centre, lest squares lose what single precision has.
        seen = jnp.where(count >= num_updates // 10, z - centre, 0.0)
        return (z, new, total + seen.mean(0), squares + (seen**2).mean(0)), None

    zero = jnp.zeros(DIMENSION)
    carry = (start, noise(random.fold_in(key, num_updates)), zero, zero)
    (_, _, total, squares), _ = lax.scan(update, carry, jnp.arange(num_updates))
    kept = num_updates - num_updates // 10
    mean = total / kept
    return centre + mean, jnp.sqrt(squares / kept - mean**2)


class Problem:
    """The data in both orders, the reference, and what control variates know."""

    def __init__(self):
        X, y = large.data()
        self.mean, self.sd = large.reference(X, y)
        order = np.argsort((2 * y - 1) * (X @ self.mean))
        self.data = {
            is_sorted: _repeated(X[rows], y[rows]) for is_sorted, rows in ((False, slice(None)), (True, order))
        }
        self.plain = large.as_jax(X, y)
        self.centre = jnp.asarray(self.mean, jnp.float32)
        p = 1 / (1 + np.exp(-X @ np.asarray(self.centre, float)))
        self.known = jnp.asarray(X.T @ (p - y), jnp.float32)
        each = X * (p - y)[:, None]
        each = each - each.mean(0)
        #: Of the gradient at the reference, from rows drawn with replacement.
        self.covariance = ROWS / BATCH * each.T @ each

    def program(self, scheme, kind, num_updates):
        """``key -> (means, standard deviations)``, from particles of about the right spread."""
        simulated = jax.jit(partial(simulate, scheme, kind, num_updates))
        X, y = self.data[scheme.is_sorted]

        def start(key):
            return self.centre + jnp.asarray(self.sd, jnp.float32) * random.normal(key, (PARTICLES, DIMENSION))

        return lambda key: simulated(key, X, y, self.centre, self.known, start(random.fold_in(key, num_updates + 1)))

    def noise(self, scheme, num_updates):
        """One particle's gradient at the reference less its mean over all rows, ``(num_updates, d)``."""
        X, y = self.data[scheme.is_sorted]

        @jax.jit
        def gradients(key, X, y):
            def one(count):
                rows = scheme.rows(random.fold_in(key, count), count, 1)
                return scheme.gradient(self.centre[None], *(x[0] for x in scheme.fetch(rows, X, y)))[0] - self.known

            return lax.map(one, jnp.arange(num_updates))

        return np.asarray(gradients(random.key(0), X, y), float)


def _repeated(X, y):
    return large.as_jax(np.concatenate((X, X[:BATCH])), np.concatenate((y, y[:BATCH])))
