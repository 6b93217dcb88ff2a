"""The kernels inside NumPyro's MCMC: what users do, and what they do wrong."""

import pickle
import re

import jax
from jax import lax, random
import jax.numpy as jnp
from models import one_by_one, programs_of, quadratic, vectorized
import numpy as np
import optax
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_feasible

from numpyro_repulsion import RBF, SGLD, SGLDR, SGNHTR, Balanced, BiasBudget, Polynomial, Subsampled
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.interactions import Gram
from numpyro_repulsion.kernels import requirements


def regression(X, y=None, subsample_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 0.3))
    numpyro.deterministic("norm", jnp.linalg.norm(beta))
    with numpyro.plate("rows", X.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, sigma), obs=None if y is None else y[i])


def minibatched(X, y=None):
    regression(X, y, subsample_size=8)


def simple():
    numpyro.sample("x", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("s", dist.Gamma(3, 1))


@pytest.fixture(scope="module")
def data():
    X = random.normal(random.key(0), (40, 3))
    return X, X @ jnp.array([1.0, -1.0, 0.5]) + random.normal(random.key(1), (40,))


def make(kernel, num_warmup=None, num_samples=30, num_chains=6, **kwargs):
    if num_warmup is None:  # Programs that learn take longer to compile, so only where there is something to learn.
        num_warmup = 50 if isinstance(kernel.step_size, BiasBudget) else 0
    return vectorized(kernel, num_warmup, num_samples, num_chains, **kwargs)


# What users do


@pytest.mark.parametrize(("kernel", "model", "new_style"), [(SGLD, regression, False), (SGNHTR, minibatched, True)])
def test_run(kernel, new_style, model, data):
    key = random.key(0) if new_style else random.PRNGKey(0)
    mcmc = make(kernel(model))
    mcmc.run(key, *data)
    samples = mcmc.get_samples(group_by_chain=True)
    shapes = {"beta": (6, 30, 3), "sigma": (6, 30), "norm": (6, 30)}
    assert jax.tree.map(jnp.shape, samples) == shapes
    assert (samples["sigma"] > 0).all()
    np.testing.assert_allclose(samples["norm"], jnp.linalg.norm(samples["beta"], axis=-1), rtol=1e-5)
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert set(fields) == {"potential_energy", "step_size", "bandwidth", "diverging"}
    assert all(value.shape == (6, 30) for value in fields.values())
    assert fields["diverging"].dtype == bool
    assert mcmc.last_state.rng_key.shape == key.shape
    mcmc.print_summary()


@pytest.mark.parametrize("kernel", [SGLDR, pytest.param(SGNHTR, marks=pytest.mark.slow)])
def test_resume_is_exact(kernel, data):
    kernel = kernel(minibatched, step_size=Polynomial(1e-3))
    whole = make(kernel, num_warmup=50, num_samples=40)
    whole.run(random.key(0), *data)
    parts = make(kernel, num_warmup=50, num_samples=20)
    parts.run(random.key(0), *data)
    first = parts.get_samples(group_by_chain=True)["beta"]
    state = pickle.loads(pickle.dumps(parts.last_state))
    resumed = make(kernel, num_warmup=50, num_samples=20)
    resumed.post_warmup_state = state
    resumed.run(jnp.repeat(state.rng_key[None], 6, 0), *data)
    second = resumed.get_samples(group_by_chain=True)["beta"]
    assert np.array_equal(whole.get_samples(group_by_chain=True)["beta"], jnp.concatenate([first, second], 1))
    assert int(resumed.last_state.num_updates) == int(whole.last_state.num_updates) == 900


def test_a_stored_state_is_enough_to_go_on():
    # Neither starts nor a warmup are asked for again, in a new kernel as in the old one: NumPyro reads `_sample_fn`.
    starts = random.normal(random.key(1), (6, 2))
    mcmc = make(SGLDR(potential_fn=quadratic, step_size=0.1), num_warmup=50, num_samples=10)
    mcmc.warmup(random.key(0), init_params=starts)
    mcmc.run(random.key(1))
    assert mcmc.get_samples().shape == (60, 2)
    again = make(SGLDR(potential_fn=quadratic, step_size=0.1), num_warmup=0, num_samples=10)
    again.post_warmup_state = mcmc.last_state
    again.run(random.key(2))
    assert int(again.last_state.num_updates) == 700


def test_without_what_numpyro_reads_starts_are_asked_for_again(monkeypatch):
    """The control of the above: had NumPyro another name for it, this would fail."""
    kernel = SGLD(potential_fn=quadratic, step_size=0.1)
    mcmc = make(kernel, num_samples=3)
    mcmc.run(random.key(0), init_params=random.normal(random.key(1), (6, 2)))
    mcmc.post_warmup_state = mcmc.last_state
    monkeypatch.setattr(type(kernel).__mro__[1], "_sample_fn", None)
    with raises("needs `init_params`"):
        mcmc.run(random.key(1))


def compiled(caplog, name):
    """How often programs of a name were compiled."""
    return sum("Compiling" in message and name in message for message in caplog.messages)


def test_each_quantity_freezes_in_its_turn_and_programs_serve_other_data(data, caplog):
    kernel, keys = SGLDR(minibatched), random.split(random.key(0), 6)
    states = list(one_by_one(kernel, keys, 100, *data))
    X, y = data
    with jax.log_compiles():
        kernel.start(keys, 100, None, (2.0 * X, y + 1.0), {})
        kernel.warm(states[-2], 1, 100, (2.0 * X, y + 1.0), {})
    assert compiled(caplog, "_on_arrays") == 0
    warmup = jax.tree.map(lambda *x: np.stack(x), *(state.warmup for state in states))

    def changes(x):
        x = np.nan_to_num(np.asarray(x).reshape(100, -1))
        return (np.flatnonzero((x[1:] != x[:-1]).any(1)) + 2).tolist()

    references = [25, 30, 40, 60]
    scales = {15, *references}
    assert set(changes(warmup.preconditioner.scale)) == scales
    assert set(changes(warmup.preconditioner.center)) == scales
    assert changes(warmup.reference.position) == references
    settling = [25, 30, 40, 60, 65, 70, 75, 80, 85, 90, 95, 100]
    assert changes(warmup.measurements.curvature) == settling
    assert set(changes(warmup.step_size)) <= set(settling)
    assert set(changes(warmup.bandwidth)) <= {*range(61), *settling}
    assert set(changes(warmup.arrival.step_size)) <= {*range(26), *settling}


def test_step_size_allows_for_minibatch_noise():
    # The gradient noise of a unit-variance Gaussian mean with a batch of 8 rows of 40 has variance N²/B Var(row), less
    # what stratification removes; at most that.
    def mean(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", 40, subsample_size=8) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    y = random.permutation(random.key(3), jnp.linspace(-2, 2, 40))
    kernel = SGLD(mean, step_size=BiasBudget(min_draws=0.0), preconditioner=None, gradient=Subsampled())
    mcmc = make(kernel)
    mcmc.run(random.key(0), y)
    strata = np.asarray(y).reshape(8, 5)
    exact = 40**2 / 8 * strata.var(1).mean()
    # Eight minibatches of each of 6 particles, nine times, about each particle's mean.
    implied = 0.1 / 1.05 / float(mcmc.last_state.step_size[0])
    assert abs(implied / exact - 1) < 4.5 * (2 / (7 * 6 * 9)) ** 0.5


def test_schedules_of_optax_count_updates():
    kernel = SGLD(potential_fn=quadratic, step_size=optax.exponential_decay(0.1, 100, 0.5), num_steps=5)
    mcmc = make(kernel, num_warmup=3, num_samples=4)
    mcmc.run(random.key(0), init_params=random.normal(random.key(1), (6, 2)))
    counts = 100 * np.log2(0.1 / mcmc.get_extra_fields(group_by_chain=True)["step_size"][0])
    np.testing.assert_allclose(counts, [19, 24, 29, 34], rtol=1e-4)


def test_draws_that_exceed_memory_are_refused(monkeypatch):
    each = 4 * 3 * 6  # x and s of six particles
    kernel = SGLD(simple, step_size=0.1)

    def of(memory, extra_fields=(), **kwargs):
        monkeypatch.setattr(requirements, "device_memory", lambda: memory)
        mcmc = make(kernel, **kwargs)
        mcmc.run(random.key(0), extra_fields=extra_fields)
        return mcmc.get_samples()

    with pytest.raises(ValueError, match="30 draws of 6 particles.*run_in_pieces.*leave sites out"):
        of(30 * each - 1)
    of(15 * each, thinning=2)
    # Sites that are left out take no memory.
    for progress_bar in (False, True):
        left = of(4 * 30 * 6, extra_fields=("~z.x",), progress_bar=progress_bar)
        assert set(left) == {"s"}
    with pytest.raises(ValueError, match="30 draws"):
        of(4 * 30 * 6, extra_fields=("~z.s",))


def test_potential_fn_takes_any_pytree():
    init_params = {"a": jnp.arange(6.0), "b": [jnp.ones((6, 2, 3)), (jnp.zeros((6, 1)),)]}

    def potential(z):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(z))

    mcmc = make(SGLDR(potential_fn=potential, step_size=0.05))
    mcmc.run(random.key(0), init_params=init_params)
    draws = mcmc.get_samples(group_by_chain=True)
    assert jax.tree.structure(draws) == jax.tree.structure(init_params)
    shapes = jax.tree.map(lambda x: (6, 30, *x.shape[1:]), init_params)
    assert jax.tree.map(jnp.shape, draws) == shapes


def test_starts_are_drawn_again_until_they_are_finite():
    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.factor("wall", jnp.where(x > 0, 0.0, -jnp.inf))

    state = SGLD(model, step_size=0.1).init(random.split(random.key(0), 50), 0, None, (), {})
    assert (state.z["x"] > 0).all() and np.isfinite(state.potential_energy).all()


def test_init_is_idempotent_and_depends_on_the_particle_not_only_its_key(data):
    kernel = SGLDR(minibatched, step_size=1e-3)
    keys = random.split(random.key(0), 6)
    one, two = (kernel.init(keys, 0, None, data, {}) for _ in range(2))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), one.z, two.z))
    copies = kernel.init(jnp.repeat(keys[:1], 6, 0), 0, None, data, {})
    assert len(np.unique(copies.z["sigma"])) == 6


def test_second_run_compiles_nothing_of_ours(data, monkeypatch, caplog, capsys):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    # With the progress bar NumPyro compiles once; without it, again in each run, whatever the kernel.
    mcmc = make(SGLDR(regression, step_size=1e-3), num_warmup=5, progress_bar=True)
    with jax.log_compiles():
        mcmc.run(random.key(0), *data)
        assert compiled(caplog, "_on_arrays") and compiled(caplog, "_body_fn")
        caplog.clear()
        mcmc.run(random.key(1), *data)
    assert compiled(caplog, "_on_arrays") == compiled(caplog, "_body_fn") == 0
    assert "10 steps/draw, ε = 0.001" in capsys.readouterr().err


def test_jit_model_args(data):
    """The same program on other data looks at the other data."""
    X, y = data
    traced, plain = (make(SGLD(minibatched, step_size=1e-4), jit_model_args=x) for x in (True, False))
    for mcmc, signs in ((traced, (1, -1)), (plain, (-1,))):
        for sign in signs:
            mcmc.run(random.key(0), X, y=sign * y)
    np.testing.assert_allclose(traced.get_samples()["beta"], plain.get_samples()["beta"], rtol=1e-4, atol=1e-5)


def test_run_inside_jit(data):
    X, y = data

    def run(key, **settings):
        mcmc = make(SGLD(minibatched, **settings))
        mcmc.run(key, X, y)
        return mcmc.get_samples()["beta"]

    given = {"step_size": 1e-4, "gradient": "plain"}
    inside = jax.jit(lambda key: run(key, **given))(random.key(0))
    np.testing.assert_allclose(inside, run(random.key(0), **given), rtol=1e-4, atol=1e-5)
    # What is learned is learned by programs that choose how they are compiled.
    with raises("was started within one. Use MCMC.*call kernel.init outside of jax.jit"):
        jax.jit(run)(random.key(0))


def test_kernel_and_run_can_be_pickled(data):
    mcmc = make(SGLD(minibatched, step_size=Polynomial(1e-4)), num_samples=5)
    mcmc.run(random.key(0), *data)
    copy = pickle.loads(pickle.dumps(mcmc))
    assert np.array_equal(copy.get_samples()["beta"], mcmc.get_samples()["beta"])
    copy.run(random.key(0), *data)
    assert np.array_equal(copy.get_samples()["beta"], mcmc.get_samples()["beta"])


def test_starts_of_single_precision_keep_it():
    with jax.enable_x64():
        mcmc = make(SGLD(potential_fn=quadratic), num_warmup=60)
        mcmc.run(random.key(0), init_params=jnp.arange(6.0, dtype=jnp.float32))
        assert mcmc.get_samples().dtype == jnp.float32 and mcmc.last_state.step_size.dtype == jnp.float32


def test_groups_do_not_interact_and_share_no_minibatch(data):
    # What happens in the first group does not depend on where the second one starts.
    X, y = data
    gradient = Subsampled(shared=True)
    kernel = SGLDR(minibatched, step_size=1e-4, num_ensembles=2, interaction=RBF(1.0), gradient=gradient)
    starts = {"beta": random.normal(random.key(5), (8, 3)), "sigma": jnp.linspace(-1, 1, 8)}
    state = kernel.init(random.split(random.key(0), 8), 0, starts, (X, y), {})

    @jax.jit
    def run(shift):
        begun = state._replace(z=state.z | {"beta": state.z["beta"].at[4:].add(shift)})
        return lax.scan(lambda state, _: 2 * (kernel.sample(state, (X, y), {}),), begun, length=3)[1].z["beta"]

    draws = [run(shift) for shift in (0.0, 1.0)]
    assert np.array_equal(draws[0][:, :4], draws[1][:, :4])
    assert (draws[0][:, 4:] != draws[1][:, 4:]).all()


def test_preconditioner_is_a_change_of_variables():
    covariance = np.array([[4.0, 1.5], [1.5, 1.0]], np.float32)
    root, precision = np.linalg.cholesky(covariance), np.linalg.inv(covariance)
    starts = random.normal(random.key(1), (6, 2))

    def potential(z):
        return z @ precision @ z / 2

    kernel = SGLDR(potential_fn=potential, step_size=0.1, interaction=RBF(2.0), preconditioner=covariance)
    mcmc = make(kernel, num_warmup=0, num_samples=3)
    mcmc.run(random.key(0), init_params=starts @ root.T)
    white = make(SGLDR(potential_fn=quadratic, step_size=0.1, interaction=RBF(2.0)), num_warmup=0, num_samples=3)
    white.run(random.key(0), init_params=starts)
    np.testing.assert_allclose(mcmc.get_samples(), white.get_samples() @ root.T, rtol=1e-3, atol=1e-3)


# What users do wrong


def raises(message, kind=ValueError):
    return pytest.raises(kind, match=re.compile(message, re.DOTALL))


@pytest.mark.parametrize(
    ("arguments", "message", "kind"),
    [
        ({}, "exactly one of `model` and `potential_fn`; got neither", ValueError),
        ({"model": simple, "potential_fn": quadratic}, "got both", ValueError),
        ({"model": 3}, "must be callable", TypeError),
        ({"model": simple, "step_size": "small"}, '`step_size` must be "auto"', TypeError),
        ({"model": simple, "num_steps": 0}, "`num_steps` must be an integer, 1 or more; got 0", ValueError),
        ({"model": simple, "preconditioner": "cholesky"}, "`preconditioner` must be 'auto', 'diagonal'", ValueError),
        ({"model": simple, "preconditioner": [1.0, -1.0]}, "must be positive", ValueError),
        ({"model": simple, "preconditioner": [[1.0, 2.0], [2.0, 1.0]]}, "positive definite", ValueError),
        ({"model": simple, "preconditioner": [[1.0, 2.0], [0.0, 1.0]]}, "symmetric", ValueError),
        ({"model": simple, "interaction": RBF}, "call it, `RBF\\(\\)`", TypeError),
        ({"model": simple, "interaction": "rbf"}, "`interaction` must be an instance", TypeError),
        ({"model": simple, "gradient": "minibatch"}, "`gradient` must be an instance", TypeError),
        ({"model": simple, "dynamics": "sghmc"}, "`dynamics` must be an instance", TypeError),
        ({"model": simple, "reparam": True}, "`reparam` must be 'auto' or None", ValueError),
        ({"model": simple, "moves": "jump"}, "`moves` must be an instance", TypeError),
        ({"model": simple, "moves": True}, "`moves` must be an instance such as Archive", TypeError),
        ({"model": simple, "init_strategy": 0.0}, "`init_strategy` must be callable", TypeError),
        ({"model": simple, "interaction": Balanced(RBF())}, "num_ensembles=2 or more", ValueError),
    ],
)
def test_bad_settings(arguments, message, kind):
    # Presets share what checks them: `test_presets_differ_in_their_parts_alone`.
    with raises(message, kind):
        SGLDR(**arguments)


def nowhere():
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.factor("nowhere", -jnp.inf + 0 * x)


class Distance(Gram):
    def evaluate(self, x, y, bandwidth):
        return jnp.sum((x - y) ** 2)


class Laplace(Gram):
    def evaluate(self, x, y, bandwidth):
        return jnp.exp(-jnp.sqrt(jnp.sum((x - y) ** 2)))


class Undetermined(Gram):
    def evaluate(self, x, y, bandwidth):
        return jnp.exp(-jnp.sum((x - y) ** 2) / bandwidth)


def sgldr(model=simple, step_size=0.1, **settings):
    return SGLDR(model, step_size=step_size, **settings)


ENERGY = SGLDR(potential_fn=quadratic, step_size=0.1)
ONES = {"x": jnp.ones((6, 2)), "s": jnp.ones(6)}


@pytest.mark.parametrize(
    ("kernel", "settings", "init_params", "message"),
    [
        # Chains move together.
        (sgldr(), {"chain_method": "sequential"}, None, 'num_chains=6, chain_method="vectorized".*6 by .sequential'),
        (SGLD(simple, step_size=0.1), {"chain_method": jax.vmap, "num_chains": 2}, None, "num_chains=2, .*got num"),
        (sgldr(), {"num_chains": 1}, None, "num_chains=20, .*got num_chains=1 by 'vectorized'"),
        # Groups.
        (sgldr(num_ensembles=4), {}, None, "num_chains=6 and num_ensembles=4"),
        (sgldr(num_ensembles=3), {"num_chains": 3}, None, "one particle in each ensemble; use num_chains=6"),
        (SGLD(simple, step_size=0.1, num_ensembles=3), {"num_chains": 3}, None, "or fewer ensembles"),
        # Starts.
        (sgldr(init_strategy=init_to_feasible), {}, None, "start at the same point.*init_to_sample"),
        (ENERGY, {}, jnp.zeros((6, 2)), "start at the same point"),
        (ENERGY, {}, None, "needs `init_params`.*leading axis of 6"),
        (ENERGY, {}, jnp.arange(6.0).at[2].set(jnp.nan), "start of particles .2.. Look for.*or change these `init_p"),
        (sgldr(nowhere), {}, None, "after 100 draws from init_strategy"),
        (sgldr(), {}, {"x": ONES["x"]}, "latent sites .'s', 'x'.*got .'x'."),
        (sgldr(), {}, ONES | {"t": jnp.ones(6)}, "got .'s', 't', 'x'."),
        (sgldr(), {}, ONES | {"x": jnp.ones((6, 3))}, "of shapes .*.6, 2.*got .*.6, 3."),
        (sgldr(), {}, ONES | {"x": jnp.ones((5, 2))}, "a leading axis of 6|leading dimension"),
        (sgldr(), {}, jnp.ones((6, 3)), "must be a dictionary with the latent sites"),
        (sgldr(step_size="auto"), {"num_warmup": 0}, None, "num_warmup=0 the step size cannot be adapted; give `st"),
        # Interactions and functions of one's own.
        (sgldr(interaction=Distance()), {}, None, "not positive definite on the starting particles"),
        (sgldr(interaction=Undetermined()), {}, None, "not finite on the starting particles.*differentiable where"),
        (sgldr(interaction=Balanced(Laplace()), num_ensembles=2), {}, None, "not finite on the starting particles"),
        (SGLDR(potential_fn=lambda z: z**2, step_size=0.1), {}, jnp.ones((6, 2)), "a scalar; got shape .2,."),
    ],
)
def test_runs_that_are_refused(kernel, settings, init_params, message):
    with raises(message):
        make(kernel, **settings).run(random.key(0), init_params=init_params)


def test_starts_must_be_floating_point():
    with raises("must be floating point", TypeError):
        make(ENERGY).run(random.key(0), init_params=jnp.arange(6))


def test_identical_starts_are_fine_without_interaction():
    SGLD(simple, step_size=0.1, init_strategy=init_to_feasible).init(random.split(random.key(0), 6), 0, None, (), {})


@pytest.mark.parametrize(("model", "where"), [(regression, "y"), (minibatched, "X")])
def test_nan_in_the_data(model, where, data):
    X, y = data
    X, y = (X.at[33, 1].set(jnp.nan), y) if where == "X" else (X, y.at[33].set(jnp.nan))
    with raises("data contain NaN: 1 in the model's args"):
        make(SGLDR(model, step_size=1e-4)).run(random.key(0), X, y)


def test_nan_that_the_model_masks_is_no_error(data):
    X, y = data
    y = y.at[33].set(jnp.nan)

    def model(X, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", 40, subsample_size=8) as i, numpyro.handlers.mask(mask=~jnp.isnan(y[i])):
            numpyro.sample("y", dist.Normal(X[i] @ beta, 1), obs=jnp.nan_to_num(y[i]))

    mcmc = make(SGLD(model, step_size=1e-3))
    mcmc.run(random.key(0), X, y)
    assert np.isfinite(mcmc.get_samples()["beta"]).all()


def test_a_preconditioner_of_another_dimension(data):
    with raises("`preconditioner` has shape .3,., but a particle has 4"):
        make(SGLDR(regression, step_size=0.1, preconditioner=[1.0, 1.0, 1.0])).run(random.key(0), *data)


def test_settings_of_another_precision_leave_particles_as_they_are():
    with jax.enable_x64():
        settings = {"interaction": np.float64(0.5) * RBF(np.float64(2.0))}
        settings["dynamics"] = Overdamped(temperature=np.float64(0.5))
        starts, keys = random.normal(random.key(1), (6, 2), jnp.float32), random.split(random.key(0), 6)
        for step_size in (np.float64(0.1), lambda count: jnp.ones((), int)):
            kernel = SGLDR(potential_fn=quadratic, step_size=step_size, **settings)
            ((iterate, state),) = programs_of(kernel, keys, 0, init_params=starts)
            after = jax.eval_shape(iterate, state)
            assert after.z.dtype == after.step_size.dtype == jnp.float32


def test_a_model_is_analyzed_once_for_the_same_arguments():
    calls = []

    def model(y, scale=1.0):
        calls.append(None)
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 1)), scale), obs=y)

    y, kernel = np.zeros(5, np.float32), SGLD(model, step_size=1e-3)
    first = kernel.bind((y,))
    before = len(calls)
    assert kernel.bind((y,)) is first and kernel.bind((y.copy(),), {}) is first and len(calls) == before
    y[0] = 1.0
    second = kernel.bind((y,))
    assert second is not first and kernel.bind((y,), {"scale": 2.0}) is not second
    assert kernel.bind((y,), {"scale": 2.0}).target.kwargs == {"scale": 2.0}


def test_a_model_that_needs_the_values_of_its_arguments():
    def model(group, y):
        effects = numpyro.sample("effects", dist.Normal(0, 1).expand([len(np.unique(group))]).to_event(1))
        numpyro.sample("y", dist.Normal(effects[group], 1), obs=y)

    kernel, keys = SGLD(model, step_size=0.01), random.split(random.key(0), 6)
    for group, number in (([0, 0, 1, 2, 2], 3), ([0, 0, 1, 3, 2], 4)):
        state = kernel.init(keys, 0, None, (np.array(group), np.arange(5.0)), {})
        assert state.z["effects"].shape == (6, number)
