"""Arrow-shaped Hessians: how they are found, their products and roots, and the control variates made of them."""

from dataclasses import replace

from enumerated import means
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from models import moments
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, ControlVariates, Sweeps
from numpyro_repulsion.gradients import (
    Arrow,
    ArrowRoot,
    CenteredTarget,
    ModelTarget,
    Reference,
    Units,
    evaluate_reference,
)
from numpyro_repulsion.warmup import Preconditioner
from numpyro_repulsion.warmup.scales import whitening

#: Five units of three entries each, from a site whose second axis counts them and another one, beside five globals.
UNITS = Units(20, ((3, (2, 5), 1), (15, (5,), 0)))
KEY = random.key(0)


def arrow(units=UNITS, seed=0):
    rng, g, n, k = np.random.default_rng(seed), units.num_globals, units.number, units.size
    rest, blocks = rng.normal(size=(g, g)), rng.normal(size=(n, k, k))
    cross = rng.normal(size=(n, k, g))
    blocks = blocks @ np.swapaxes(blocks, 1, 2) + np.eye(k)
    schur = np.einsum("nki,nkl,nlj->ij", cross, np.linalg.inv(blocks), cross)
    return Arrow(rest @ rest.T + np.eye(g) + schur, cross, blocks, units)


def dense(found):
    return np.asarray(found.times(np.eye(found.units.dimension)))


def by_products(units, matrix):
    return Arrow.checked(units, units.probes() @ matrix)


def test_units_are_split_off_and_joined():
    x = np.random.default_rng(0).normal(size=(4, 3, 20))
    for namespace in (np, jnp):
        rest, units = UNITS.split(namespace.asarray(x))
        assert rest.shape == (4, 3, 5) and units.shape == (4, 3, 5, 3)
        np.testing.assert_array_equal(UNITS.join(rest, units), namespace.asarray(x))
    _, units = UNITS.split(np.arange(20))
    np.testing.assert_array_equal(units[1], [4, 9, 16])
    rest, none = Units(4).split(x[..., :4])
    np.testing.assert_array_equal(Units(4).join(rest, none), x[..., :4])


@pytest.mark.parametrize("units", [UNITS, Units(4), Units(9, ((1, (8,), 0),))])
def test_products_determine_an_arrow_and_tell_other_matrices(units):
    matrix = dense(arrow(units))
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(dense(by_products(units, matrix)), matrix, atol=1e-12)
    if units.sites:
        # A single entry between any two units is seen.
        entries = units.split(np.arange(units.dimension))[1][..., 0]
        for one in range(units.number):
            for other in range(one):
                wrong = matrix.copy()
                wrong[entries[one], entries[other]] = wrong[entries[other], entries[one]] = 0.01
                assert not by_products(units, wrong).is_known


@pytest.mark.parametrize("units", [UNITS, Units(9, ((1, (8,), 0),))])
def test_a_root_whitens(units):
    curvature = arrow(units)
    root, matrix = ArrowRoot.of(curvature, whitening), dense(curvature)
    scale = root.times(np.eye(units.dimension)).T
    np.testing.assert_allclose(scale.T @ matrix @ scale, np.eye(units.dimension), atol=1e-12)
    without = replace(root, cross=np.zeros_like(root.cross))
    block = without.times(np.eye(units.dimension)).T
    assert np.abs(block.T @ matrix @ block - np.eye(units.dimension)).max() > 0.1
    np.testing.assert_allclose(root.variances, np.diag(np.linalg.inv(matrix)))
    factor = np.linspace(0.5, 1.0, units.dimension)
    narrower = root.scaled(factor)
    np.testing.assert_allclose(narrower.times(np.eye(units.dimension)).T, scale * factor)
    np.testing.assert_allclose(narrower.variances, ((scale * factor) ** 2).sum(1))
    np.testing.assert_allclose(dense(curvature.scaled(factor)), matrix * np.outer(factor, factor))


def test_large_arrows_are_multiplied_the_same_in_a_program():
    """XLA of jaxlib 0.10.2 computed products wrong from about 1,000 units of two entries each on."""
    rng, units = np.random.default_rng(0), Units(6 + 2 * 1000, ((3, (1000, 2), 0),))
    identity = ArrowRoot.identity(units, jnp.float32)
    root = replace(identity, cross=jnp.asarray(rng.normal(size=identity.cross.shape), jnp.float32))
    u = jnp.asarray(rng.normal(size=(1, 20, units.dimension)), jnp.float32)
    for function in (root.times, root.solve, root.transposed_times, root.transposed_solve):
        np.testing.assert_allclose(jax.jit(function)(u), function(u), atol=1e-4, rtol=1e-4)


def test_as_a_preconditioner_it_changes_coordinates_and_gradients():
    root = ArrowRoot.of(arrow(), whitening)
    change = Preconditioner(np.linspace(1.0, 2.0, 20), np.ones(20), root=root)
    assert change.kind == "arrow"
    z = np.random.default_rng(1).normal(size=(2, 3, 20))
    matrix = change.to_positions(np.eye(20)).T - 1.0
    u = change.whiten(z)
    np.testing.assert_allclose(u @ matrix.T + 1.0, z)
    np.testing.assert_allclose(change.to_positions(u), z)
    np.testing.assert_allclose(change.whiten_gradient(z), z @ matrix)
    np.testing.assert_allclose(change.unwhiten_gradient(change.whiten_gradient(z)), z)
    np.testing.assert_allclose(change.lengths(), np.linalg.norm(matrix, axis=1))
    on_device = jax.tree.map(jnp.asarray, change)
    np.testing.assert_allclose(jax.jit(lambda c, z: c.whiten(z))(on_device, jnp.asarray(z)), u, rtol=1e-4, atol=1e-5)


def ratings(user, item, y, num_users=600, num_items=20, kind=""):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("users", num_users):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
        slope = numpyro.sample("slope", dist.Normal(0.0, scale)) if kind == "slopes" else 0.0
    quality = numpyro.sample("quality", dist.Normal(0, 1).expand([num_items]).to_event(1))
    if kind == "walk":
        effect = jnp.cumsum(effect)
    if kind == "sum":
        effect = effect - effect.mean()
    with numpyro.plate("rows", len(y), subsample_size=2) as i:
        mean = effect[user[i]] + quality[item[i]]
        if kind == "slopes":
            mean = mean + slope[user[i]] * y[(i + 1) % len(y)]
        numpyro.sample("y", dist.StudentT(4.0, mean, 0.5), obs=y[i])


def rows(number, num_users=600, num_items=20):
    rng = np.random.default_rng(0)
    user, item = rng.integers(num_users, size=number), rng.integers(num_items, size=number)
    return jnp.asarray(user), jnp.asarray(item), jnp.asarray(rng.normal(size=number))


def flat(target, seed=0):
    zero, unravel = ravel_pytree({name: jnp.zeros(x.shape, x.dtype) for name, x in target.prototype.items()})
    return zero + 0.3 * random.normal(random.key(seed), zero.shape, zero.dtype), unravel


@pytest.mark.parametrize(
    ("kind", "names"), [("", ["effect"]), ("slopes", ["effect", "slope"]), ("walk", None), ("sum", None)]
)
def test_which_effects_are_units(kind, names):
    target = ModelTarget(ratings, (*rows(3000), 600, 20, kind))
    z, _ = flat(target)
    units = ControlVariates().hessian_units(target, len(z))
    if names is None:
        assert units is None
        return
    inside = ravel_pytree({name: jnp.full(x.shape, name in names) for name, x in target.prototype.items()})[0]
    rest, own = units.split(np.asarray(inside))
    assert own.all() and not rest.any() and own.shape == (600, len(names))


def test_two_crossed_groups_are_not_units_together():
    target = ModelTarget(ratings, (*rows(3000, 600, 600), 600, 600, "slopes"))
    units = ControlVariates().hessian_units(target, 1801)
    assert units.size == 2 and units.num_globals == 601


def test_of_an_arrow_the_corrected_gradient_is_unbiased_by_enumeration():
    """Over all minibatches of one row from each half of six rows, of which one has no row of its own."""
    user, item = jnp.array([0, 1, 2, 3, 0, 599]), jnp.arange(6)
    target = ModelTarget(ratings, (user, item, jnp.cos(jnp.arange(6.0))))
    (point, unravel), (z, _) = flat(target), flat(target, 1)
    units = ControlVariates().hessian_units(target, len(z))
    empty = Reference.none(len(z), z.dtype, 2, units)._replace(position=point, order=None)
    reference = jax.jit(lambda empty: evaluate_reference(KEY, target, unravel, empty, 20))(empty)

    def energy(z):
        return target.potential_energy(unravel(z), target.all_rows, KEY)

    np.testing.assert_allclose(dense(reference.hessian), jax.jit(jax.hessian(energy))(point), atol=2e-4)

    def mean(reference):
        return means(ControlVariates, target, unravel, z[None], reference)[1][0]

    expected = np.asarray(jax.grad(energy)(z))
    np.testing.assert_allclose(mean(reference), expected, rtol=1e-4, atol=2e-4)
    wrong = replace(reference.hessian, cross=reference.hessian.cross.at[599, 0, 5].set(0.0))
    assert np.abs(mean(reference._replace(hessian=wrong)) - expected).max() > 0.01


def test_a_model_without_such_effects_cannot_have_an_arrow():
    with pytest.raises(ValueError, match="needs a model of more than 512 parameters .* Use preconditioner='auto'"):
        run(SGLD(ratings, preconditioner="arrow"), *rows(3000, 30, 20), 30, 20, num_warmup=60)


def test_starts_are_whitened_without_the_root(monkeypatch):
    # Which is the identity yet: of its zeros, as constants of a program, XLA made NaN on some CPUs.
    def refuse(*_):
        raise AssertionError

    args = (*rows(3000), 600, 20)
    for name in ("solve", "transposed_times"):
        monkeypatch.setattr(ArrowRoot, name, refuse)
    begun = SGLD(ratings).start(random.split(random.key(0), 4), 100, None, args, {})
    assert begun.warmup.preconditioner.kind == "arrow" and np.isfinite(begun.cloud.z).all()


def effects(user, y, meet=False):
    """Effects of which two may meet in one row, which no sample of the rows has."""
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    with numpyro.plate("users", 600):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
    with numpyro.plate("rows", len(y), subsample_size=20) as i:
        other = jnp.where(i == len(y) - 1, effect[0], 0.0) if meet else 0.0
        numpyro.sample("y", dist.Normal(effect[user[i]] + other, 1.0), obs=y[i])


def test_where_all_rows_refuse_what_a_sample_accepts_warmup_takes_first_order():
    args = jnp.arange(24_000) % 600, jnp.cos(jnp.arange(24_000.0)), True
    assert ControlVariates().hessian_units(ModelTarget(effects, args), 601) is not None
    mcmc = run(SGLD(effects), *args, num_warmup=100, num_chains=8)
    state = mcmc.last_state
    assert state.learned.reference.hessian is None
    assert float(state.learned.figures.noise) >= 0
    assert np.isfinite(mcmc.get_samples()["effect"]).all() and int(state.num_flagged_updates) < 100


@pytest.mark.slow
def test_on_other_data_without_an_arrow_corrections_are_of_first_order():
    user, y = jnp.arange(24_000) % 600, jnp.cos(jnp.arange(24_000.0))
    mcmc = run(SGLD(effects), user, y, num_warmup=100, num_chains=8)
    assert mcmc.last_state.learned.reference.hessian is not None
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(1), user, y, meet=True)
    state = mcmc.last_state
    assert state.learned.reference.hessian is None and int(state.num_flagged_updates) < 100


def test_only_effects_beside_other_parameters_and_with_references_are_units():
    def alone(user, y):
        with numpyro.plate("users", 600):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(y), subsample_size=20) as i:
            numpyro.sample("y", dist.Normal(effect[user[i]], 1.0), obs=y[i])

    args = jnp.arange(2400) % 600, jnp.cos(jnp.arange(2400.0))
    assert ControlVariates().hessian_units(ModelTarget(alone, args), 600) is None
    assert Sweeps().hessian_units(ModelTarget(effects, args), 601).number == 600
    assert Sweeps(control_variates=False).hessian_units(ModelTarget(effects, args), 601) is None


@pytest.mark.slow
def test_the_scale_of_many_effects_is_that_of_quadrature():
    """Each effect's variance is too large by little with first order, and the scale adds it up over all effects."""
    rng, user = np.random.default_rng(0), np.arange(3000) % 600
    y = 0.4 * rng.normal(size=600)[user] + rng.normal(size=3000)
    log_scale = np.linspace(-2.0, 0.0, 2001)
    variance, means = np.exp(2 * log_scale) + 0.2, y.reshape(5, 600).mean(0)
    log_density = -300 * np.log(variance) - (means**2).sum() / 2 / variance - (log_scale + 1) ** 2 / 2
    expected, variance = moments(log_scale, log_density)
    errors = {}
    for order, reparam in ((None, "auto"), (1, None)):
        kernel = SGLD(effects, gradient=ControlVariates(order=order), reparam=reparam)
        data = map(jnp.asarray, (user, y))
        mcmc = run(kernel, *data, num_warmup=400, num_samples=1000, num_chains=20)
        assert (mcmc.last_state.learned.preconditioner.kind == "arrow") == (order is None)
        errors[order] = (np.log(mcmc.get_samples()["scale"]).mean() - expected) / variance**0.5
    # A tenth of a standard deviation is what the step allows. First order is off by 0.9 where effects are centered, and
    # by 0.1 where they are centered by their share.
    assert abs(errors[None]) < 0.1 < abs(errors[1]), errors


def about_a_mean(unit, y):
    mean, scale = numpyro.sample("mean", dist.Normal(0, 5)), numpyro.sample("scale", dist.HalfNormal(1))
    effects = numpyro.sample("effects", dist.Normal(0, scale).expand([600]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Normal(mean + effects[unit[i]], 1), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize("knows_units", [True, False])
def test_effects_about_a_mean_leave_the_hessian_an_arrow(knows_units, monkeypatch):
    """While particles reach the posterior they differ in the scale, and the mean of few effects gets a coordinate."""
    if not knows_units:
        structure_at = CenteredTarget.structure_at
        monkeypatch.setattr(CenteredTarget, "structure_at", lambda target, *args: structure_at(target, *args[:2]))
    rng, unit = np.random.default_rng(0), np.arange(12_000) % 600
    y = 1.0 + 0.3 * rng.standard_normal(600)[unit] + rng.standard_normal(12_000)
    mcmc = run(SGLD(about_a_mean), jnp.asarray(unit), jnp.asarray(y), num_warmup=300, num_samples=10, num_chains=20)
    learned = mcmc.last_state.learned
    assert learned.preconditioner.kind == "arrow"
    # In coordinates in which units depend on each other, the curvature is refused, and the root remains the identity.
    assert np.any(learned.preconditioner.root.cross) == knows_units
    assert learned.figures.high_curvature < 20.0
