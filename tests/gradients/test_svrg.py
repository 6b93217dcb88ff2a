"""References of each particle's own: when they are renewed, and that gradients corrected by them are right."""

from enumerated import BATCHES, means
import jax
from jax import lax, random
import jax.numpy as jnp
from models import mean_of, moments, one_by_one, student, vectorized
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, SGLDR, SVRG, BiasBudget, Independent, Subsampled
from numpyro_repulsion.gradients import ModelTarget, Reference, evaluate_reference

KEY = random.key(0)
Y = 2.0 + random.normal(random.key(1), (400,))


def two_modes(y, batch=20):
    theta = numpyro.sample("theta", dist.Normal(0, 3))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(theta**2, 1), obs=y[i])


students = mean_of(student)


def anchors(kernel, number, y=Y, state=None):
    """The states of an iteration after another, as one; and the last."""
    if state is None:
        state = kernel.init(random.split(random.key(0), 6), 0, None, (y,), {})
    iterate = jax.jit(lambda state: kernel.sample(state, (y,), {}))
    states = [state := iterate(state) for _ in range(number)]
    return jax.tree.map(lambda *x: jnp.stack(x), *states), state


def renewals(states):
    """In which iterations, from 1, references moved."""
    x = np.asarray(states.learned.reference.position)
    x = np.concatenate([np.zeros_like(x[:1]), x]).reshape(len(x) + 1, -1)
    return (np.flatnonzero((x[1:] != x[:-1]).all(1)) + 1).tolist()


# --- The estimate. ---


def test_gradients_are_unbiased_by_enumeration(x64):
    target = ModelTarget(two_modes, (Y[:6].astype(float), 2))

    def unravel(z):
        return {"theta": z[0]}

    z = jnp.array([[1.3], [-1.5]])
    positions = jnp.repeat(jnp.array([[[1.1]], [[-1.7]]]), len(BATCHES), 1)
    reference = Reference.none(positions.shape, z.dtype, True)._replace(position=positions)
    reference = jax.jit(lambda reference: evaluate_reference(KEY, target, unravel, reference, 1))(reference)
    energy = jax.value_and_grad(lambda z: target.potential_energy(unravel(z), target.all_rows, KEY))
    exact = jax.jit(jax.vmap(energy))(z)
    for found, expected in zip(means(SVRG, target, unravel, z, reference), exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    # Each with the other's reference is something else.
    swapped = reference._replace(position=reference.position[::-1])
    assert (np.abs(means(SVRG, target, unravel, z, swapped)[1] / exact[1] - 1) > 0.1).all()


# --- When. ---


def crossed(x):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("outer", 7, subsample_size=2, dim=-2) as i, numpyro.plate("inner", 5, subsample_size=2) as j:
        numpyro.sample("y", dist.Normal(a, 1), obs=x[i][:, j])


def test_an_epoch_is_as_many_updates_as_there_are_minibatches():
    rows = ModelTarget(two_modes, (Y[:401], 20))
    assert SVRG().epoch_length(rows, 1) == 20 and SVRG().epoch_length(rows, 8) == 24
    assert SVRG(epoch=5).epoch_length(rows, 1) == 5 and SVRG(epoch=np.int64(5)).epoch_length(rows, 4) == 8
    assert SVRG().epoch_length(ModelTarget(two_modes, (Y[:23], 4)), 1) == 6
    assert SVRG().epoch_length(ModelTarget(crossed, (jnp.sin(jnp.arange(35.0)).reshape(7, 5),)), 1) == 9
    assert Subsampled().epoch_length(rows, 1) is None


def test_references_are_renewed_every_epoch_from_the_first_update_on():
    kernel = SGLDR(two_modes, step_size=1e-6, num_steps=2, gradient=SVRG(epoch=5))
    states, _ = anchors(kernel, 9)
    assert renewals(states) == [1, 4, 7]
    assert np.asarray(states.learned.reference.age).tolist() == [2, 4, 6] * 3
    # A reference is where its particle was.
    np.testing.assert_array_equal(states.learned.reference.position[3, 0, :, 0], states.z["theta"][2])


def test_warmup_measures_in_the_middle_of_an_epoch():
    kernel, keys = SGLD(two_modes, num_steps=1, gradient=SVRG(epoch=4)), random.split(random.key(0), 6)
    states = list(one_by_one(kernel, keys, 100, Y))
    in_use = np.array([bool(state.warmup.reference.order) for state in states])
    ages = np.array([int(state.warmup.reference.age) for state in states])
    # Particles arrive by plain minibatches.
    assert not in_use[:24].any() and in_use[24:].all() and not states[23].warmup.reference.position.any()
    for end in (30, 40, 60, 65, 70, 75, 80, 85, 90, 95, 100):
        assert ages[end - 1] == 2
    assert ages[25:].max() == 4
    # After warmup epochs have their length.
    sampling, _ = anchors(kernel, 12, state=kernel.freeze(states[-1], (Y,), {}, False, 100))
    assert np.asarray(sampling.learned.reference.age).tolist() == [3, 4] + [1, 2, 3, 4] * 2 + [1, 2]
    plain, corrected, _ = states[-1].warmup.measurements.noise[-1, 0]
    assert corrected < 1e-2 * plain


def test_other_data_renew_all_references():
    kernel = SGLD(two_modes, step_size=1e-6, gradient=SVRG(epoch=1000))
    _, state = anchors(kernel, 2)
    other = 1.0 + Y[::-1]
    states, after = anchors(kernel, 2, y=other, state=state)
    reference = after.learned.reference
    assert renewals(states) == [1] and int(reference.age) == 20
    np.testing.assert_array_equal(reference.position.ravel(), state.z["theta"])
    position = np.asarray(reference.position, float)
    slope = position / 9 + 2 * position * (400 * position**2 - float(other.sum()))
    np.testing.assert_allclose(reference.gradient, slope, rtol=1e-3, atol=1.0)
    states, _ = anchors(kernel, 2, y=other, state=after)
    assert (states.learned.reference.position == reference.position).all() and int(
        states.learned.reference.age[-1]
    ) == 40


@pytest.mark.slow
def test_other_data_that_are_inputs_of_the_program_renew_references_once():
    mcmc = vectorized(
        SGLD(students, step_size=1e-6, num_steps=2, gradient=SVRG(epoch=1000)), 0, 3, 6, jit_model_args=True
    )
    found = []
    for seed, y in enumerate((Y, Y + 1.0, Y + 1.0)):
        mcmc.run(random.key(seed), y)
        mcmc.post_warmup_state = mcmc.last_state
        found.append(mcmc.last_state.learned.reference)
    assert not np.array_equal(found[0].gradient, found[1].gradient) and int(found[1].age) == 6
    assert np.array_equal(found[1].position, found[2].position) and int(found[2].age) == 12


def test_a_reference_without_a_finite_gradient_is_not_taken():
    def bounded(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 40, subsample_size=2) as i:
            # One row cannot be evaluated beyond 1.
            cost = jnp.where(i == 7, jnp.sqrt(1.0 - mu), mu**2)
            numpyro.factor("y", -cost)

    kernel = SGLD(bounded, step_size=1e-6, num_steps=1, gradient=SVRG(epoch=1), interaction=Independent())
    state = kernel.init(random.split(KEY, 2), 0, {"mu": jnp.array([0.5, 0.6])}, (Y,), {})
    state = kernel.sample(state, (Y,), {})
    before = state.learned.reference
    state = kernel.sample(state._replace(z={"mu": jnp.array([0.5, 1.5])}), (Y,), {})
    reference = state.learned.reference
    assert np.isfinite(reference.gradient).all() and reference.position[0, 0, 0] == 0.5
    assert reference.position[0, 1, 0] == before.position[0, 1, 0]


# --- The law. ---


def scores(gradient, y, change=lambda state: state):
    """Errors of the mean and the variance over 64 independent chains, in their standard errors."""
    grid = np.linspace(-1.0, 1.0, 4001) + float(jnp.median(y))
    energy = 3.0 * np.log1p((np.asarray(y, float)[:, None] - grid) ** 2 / 5).sum(0) + grid**2 / 200
    mean, variance = moments(grid, -energy)
    # A tenth of the posterior's own time in each update.
    kernel = SGLD(students, step_size=0.1 * variance, gradient=gradient, interaction=Independent())
    starts = mean + variance**0.5 * random.normal(random.key(9), (64,))
    state = change(kernel.init(random.split(random.key(0), 64), 0, {"mu": starts}, (y,), {}))

    def iterate(state, _):
        state = kernel.sample(state, (y,), {})
        return state, state.z["mu"]

    _, draws = jax.jit(lambda state: lax.scan(iterate, state, length=300))(state)
    error = (np.asarray(draws, float).T - mean) / variance**0.5
    found = error.mean(1), (error**2).mean(1) - 1
    return [abs(x.mean()) / (x.std(ddof=1) / 8.0) for x in found]


DATA = 2.0 + random.t(random.key(5), 5.0, (400,))


@pytest.mark.slow
def test_a_long_run_is_right_and_none_without_correction_or_with_that_of_other_data():
    assert max(scores(SVRG(), DATA)) < 4.5
    assert scores(Subsampled(), DATA)[1] > 9.0

    def stale(state):
        # Taken for references on these data, which those shifted by half a standard deviation are not.
        target = ModelTarget(students, (DATA + 0.5,))
        reference = state.learned.reference._replace(position=state.z["mu"].reshape(1, 64, 1))
        reference = evaluate_reference(KEY, target, lambda z: {"mu": z[0]}, reference, 64)
        own = SGLD(students, step_size=0.1, gradient=SVRG()).bind((DATA,)).posterior_id()
        return state._replace(
            learned=state.learned._replace(reference=reference._replace(posterior_id=jnp.asarray(own)))
        )

    assert scores(SVRG(epoch=10**6), DATA, stale)[0] > 9.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_far_modes_come_out_in_their_own_size():
    # Each of two modes has a standard deviation many times smaller than the distance to the other.
    kernel = SGLD(two_modes, gradient=SVRG(), step_size=BiasBudget(0.05, min_draws=0))
    mcmc = run(kernel, Y, num_warmup=400, num_samples=400, num_chains=20)
    grid = np.linspace(1.0, 2.0, 20_001)
    mean, variance = moments(grid, -200 * (grid**2 - float(Y.mean())) ** 2 - grid**2 / 18)
    draws = np.abs(np.asarray(mcmc.get_samples(group_by_chain=True)["theta"], float))
    error = ((draws - mean) ** 2).mean(1) / variance - 1
    assert (abs(error.mean()) - 0.05) / (error.std(ddof=1) / 20**0.5) < 4.5
    # Gradients are long here, but none is cut.
    assert mcmc.last_state.learned.reference is not None and int(mcmc.last_state.num_flagged_updates) == 0
