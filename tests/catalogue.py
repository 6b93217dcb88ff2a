"""What there is to choose from: the parts that batteries of tests go through, each with what is known of it.

A new interaction, dynamics, gradient, schedule or move is added here, and every battery then has it;
``test_catalogue.py`` fails where a public class is in none of the tables. Flags say what a battery has to know and
cannot ask: a test in ``test_catalogue.py`` compares those that a part says of itself.
"""

from dataclasses import dataclass
from typing import Any

from jax import random
import jax.numpy as jnp
import optax

from numpyro_repulsion import (
    IMQ,
    RBF,
    SGHMC,
    SGHMCR,
    SGLD,
    SGLDR,
    SGNHT,
    SGNHTR,
    SVGD,
    SVRG,
    Antithetic,
    Archive,
    Balanced,
    BiasBudget,
    ControlVariates,
    Cyclical,
    FullData,
    Independent,
    Polynomial,
    Subsampled,
    Sweeps,
)
from numpyro_repulsion.dynamics import Descent, Overdamped, Recipe, Relativistic, Thermostat, Underdamped
from numpyro_repulsion.interactions import Gram, Laplacian, Radial, RandomFeatures, RandomGroups, Scheduled


@dataclass(frozen=True)
class Entry:
    """A part, and the flags that hold of it."""

    part: Any
    flags: frozenset[str]


def entry(part, *flags):
    return Entry(part, frozenset(flags))


def having(table, *flags, but=()):
    """``name -> part`` of all entries of a table that have all these flags, and none of the others."""
    return {
        name: found.part
        for name, found in table.items()
        if found.flags.issuperset(flags) and not found.flags.intersection(but)
    }


# Parts of users


@dataclass(frozen=True)
class Laplace(Radial):
    """A radial kernel of a user's own, with a long tail."""

    bandwidth: float | None = None
    nugget: float = 1e-3

    def profile(self, s):
        return 1.0 / (1.0 + s)


@dataclass(frozen=True)
class Cosine(Gram):
    """A kernel of a user's own, written for one pair."""

    nugget: float = 0.1

    def evaluate(self, x, y, bandwidth):
        return jnp.mean(jnp.cos(x - y))


@dataclass(frozen=True)
class Linear(Gram):
    """A kernel that is not stationary: K_ii depends on u_i."""

    nugget: float = 0.05

    def evaluate(self, x, y, bandwidth):
        return 0.3 * x @ y + jnp.exp(-jnp.sum((x - y) ** 2) / bandwidth) * (1 + x[0] ** 2) * (1 + y[0] ** 2)


def wave(count):
    """A weight of repulsion that is 1, 0 and all between, over and over."""
    return 0.5 + 0.5 * jnp.sin(0.2 * count)


def half(count):
    return 0.5


#: Flags: ``interacts``, ``learns`` a bandwidth in warmup, ``identity`` (K is I); ``pairs``, if K is the sum over pairs
#: that `test_interactions.py` writes out; ``redrawn`` in each update; ``many``, without a matrix of all pairs;
#: ``ensembles``, if it needs two or more of them; ``user``, of a class of the tests; ``law``, with a bandwidth for the
#: laws of `test_stationarity.py`; ``setting``, as users write them.
INTERACTIONS = {
    "rbf": entry(RBF(1.3), "pairs", "interacts"),
    "rbf, wide": entry(RBF(2.0), "interacts", "law", "setting"),
    "rbf, short": entry(RBF(0.3), "interacts", "law"),
    "rbf, large nugget": entry(RBF(2.0, nugget=0.3), "interacts", "law"),
    "rbf, learned": entry(RBF(), "pairs", "interacts", "learns", "setting"),
    "rbf, learned by its worth": entry(RBF("learned"), "interacts", "learns", "setting"),
    "imq": entry(IMQ(0.7, nugget=0.02), "pairs", "interacts"),
    "imq, wide": entry(IMQ(1.0), "interacts", "law"),
    "imq, learned": entry(IMQ(), "interacts", "learns", "setting"),
    "radial of a user": entry(Laplace(), "pairs", "interacts", "learns", "user"),
    "gram of a user": entry(Cosine(), "pairs", "interacts", "user"),
    "not stationary": entry(Linear(), "pairs", "interacts", "user"),
    "scaled": entry(0.3 * RBF(), "pairs", "interacts", "learns"),
    "sum": entry(0.5 * RBF(1.3) + 0.25 * IMQ() + 0.25 * Independent(), "pairs", "interacts", "learns"),
    "sum, wide": entry(0.6 * RBF(1.0) + 0.3 * IMQ(2.0) + 0.2 * Independent(), "interacts", "law"),
    "sum, learned": entry(0.9 * RBF() + 0.1 * Independent(), "interacts", "learns", "setting"),
    "sum, learned by its worth": entry(0.9 * IMQ("learned") + 0.1 * Independent(), "interacts", "learns", "setting"),
    "sum with a user's": entry(Cosine() + RBF() * 2, "pairs", "interacts", "learns", "user"),
    "laplacian": entry(Laplacian(RBF(1.3), strength=0.7), "pairs", "interacts"),
    "laplacian, wide": entry(Laplacian(RBF(1.0), strength=0.5), "interacts", "law"),
    "laplacian, learned": entry(Laplacian(), "interacts", "learns", "setting"),
    "laplacian of a sum": entry(
        Laplacian(2.0 * IMQ() + Laplace() + Independent()), "pairs", "interacts", "learns", "user"
    ),
    "sum with a laplacian": entry(0.5 * Laplacian(RBF(1.3)) + RBF(), "pairs", "interacts", "learns"),
    "scheduled": entry(Scheduled(RBF(2.0), wave), "interacts", "redrawn"),
    "scheduled, half": entry(Scheduled(RBF(2.0), half).at(None, 0), "interacts", "law"),
    "scheduled, learned": entry(Scheduled(RBF(), Polynomial(1.0)), "interacts", "learns", "redrawn", "setting"),
    "random features": entry(
        RandomFeatures(1.5, num_features=5, weight=0.6, key=random.key(3)), "interacts", "redrawn", "many"
    ),
    "random features without a weight": entry(
        RandomFeatures(1.5, num_features=7, key=random.key(3)), "interacts", "redrawn", "many"
    ),
    "random features, learned": entry(RandomFeatures(), "interacts", "learns", "redrawn", "setting"),
    "groups": entry(RandomGroups(RBF(1.5), size=3, key=random.key(3)), "interacts", "redrawn", "many"),
    "groups of another kernel": entry(
        RandomGroups(IMQ(1.5, nugget=0.1), size=2, key=random.key(3)), "interacts", "redrawn", "many"
    ),
    "groups, learned": entry(RandomGroups(RBF(), size=3), "interacts", "learns", "redrawn", "setting"),
    "independent": entry(Independent(), "identity", "setting"),
    "balanced": entry(Balanced(), "identity", "setting"),
    "balanced groups": entry(Balanced(RBF(1.0)), "interacts", "ensembles"),
    "balanced groups, learned": entry(Balanced(RBF()), "interacts", "learns", "ensembles", "setting"),
    "antithetic": entry(Antithetic(), "identity", "setting"),
}


#: Flags: ``sampler``, if its stationary law is the posterior; ``memory``, if it keeps more of a particle than its
#: place; ``alone``, if it takes no interaction beside its own; ``optimizer``, if for an optimizer alone.
DYNAMICS = {
    "overdamped": entry(Overdamped(), "sampler"),
    "euler": entry(Overdamped("euler"), "sampler"),
    "averaged": entry(Overdamped("lm"), "sampler", "memory"),
    "without noise": entry(Overdamped(noise=False)),
    "underdamped": entry(Underdamped(), "sampler", "memory"),
    "relativistic": entry(Underdamped(kinetic=Relativistic(2.0)), "sampler", "memory"),
    "thermostat": entry(Thermostat(), "sampler", "memory"),
    "recipe": entry(Recipe(lambda x: jnp.eye(x.size), extra=2), "sampler", "memory", "alone"),
    "descent": entry(Descent(optax.scale_by_adam()), "memory", "optimizer"),
}

#: Flags: ``rows``, if it looks at some of the rows; ``shared`` by all particles of an ensemble; ``reference``, if it
#: keeps one; ``own``, if one for each particle; ``sweeps``, if its minibatches depend on each other.
GRADIENTS = {
    "all rows": entry(FullData()),
    "minibatches": entry(Subsampled(), "rows"),
    "shared minibatches": entry(Subsampled(shared=True), "rows", "shared"),
    "minibatches in blocks": entry(Subsampled(block_size=2), "rows"),
    "control variates": entry(ControlVariates(), "rows", "reference"),
    "shared control variates": entry(ControlVariates(shared=True), "rows", "shared", "reference"),
    "sweeps": entry(Sweeps(control_variates=False), "rows", "sweeps"),
    "sweeps with control variates": entry(Sweeps(), "rows", "reference", "sweeps"),
    "shared sweeps in blocks": entry(Sweeps(True, block_size=2), "rows", "shared", "reference", "sweeps"),
    "references of one's own": entry(SVRG(), "rows", "reference", "own"),
    "shared, with references of one's own": entry(SVRG(shared=True), "rows", "shared", "reference", "own"),
}

#: Step sizes. Flags: ``measured`` by warmup; ``cycle``, whose length ``num_steps`` must have; ``falls``, without end.
SCHEDULES = {
    "measured": entry(BiasBudget(), "measured"),
    "measured strictly": entry(BiasBudget(0.01, min_draws=0.0), "measured"),
    "a number": entry(0.01),
    "polynomial": entry(Polynomial(0.01), "falls"),
    "of optax": entry(optax.exponential_decay(0.01, 100, 0.5), "falls"),
    "cyclical": entry(Cyclical(0.01, length=10), "cycle"),
}

MOVES = {"archive": entry(Archive())}

#: Flags: ``repels`` by default, which needs several chains at once; ``momenta``; ``sampler``.
PRESETS = {
    "SGLD": entry(SGLD, "sampler"),
    "SGLDR": entry(SGLDR, "sampler", "repels"),
    "SVGD": entry(SVGD, "repels"),
    "SGHMC": entry(SGHMC, "sampler", "momenta"),
    "SGHMCR": entry(SGHMCR, "sampler", "momenta", "repels"),
    "SGNHT": entry(SGNHT, "sampler", "momenta"),
    "SGNHTR": entry(SGNHTR, "sampler", "momenta", "repels"),
}

TABLES = {
    "INTERACTIONS": INTERACTIONS,
    "DYNAMICS": DYNAMICS,
    "GRADIENTS": GRADIENTS,
    "SCHEDULES": SCHEDULES,
    "MOVES": MOVES,
    "PRESETS": PRESETS,
}
