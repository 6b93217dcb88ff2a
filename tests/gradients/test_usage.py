"""Which rows the sites of a model use: what is right is accepted, and what gives a wrong posterior is refused."""

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
from numpyro.infer.reparam import LocScaleReparam

from numpyro_repulsion import (
    SGLD,
    SVRG,
    Archive,
    ControlVariates,
    FullData,
    Rows,
    Subsampled,
    Sweeps,
    to_inference_data,
)
from numpyro_repulsion.diagnostics import scores
from numpyro_repulsion.gradients import Gradient, ModelTarget, draw_indices, influenced, minibatch
from numpyro_repulsion.gradients.control import full_gradient
from numpyro_repulsion.kernels.bound import choose_gradient

KEY = random.key(0)
N, B, D = 20, 4, 3
RNG = np.random.default_rng(0)
X, Y, TABLE = (RNG.normal(size=shape).astype(np.float32) for shape in ((N, D), N, (N, 6)))
GROUP = RNG.integers(0, 5, N)
X, Y, TABLE, GROUP = map(jnp.asarray, (X, Y, TABLE, GROUP))


def rows(size=N, batch=B, **settings):
    return numpyro.plate("rows", size, subsample_size=batch, **settings)


def parameters():
    return numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1)), numpyro.sample("s", dist.HalfNormal(1))


def observe(name, mean, value, scale=1.0):
    numpyro.sample(name, dist.Normal(mean, scale), obs=value)


def within(likelihood, size=N, batch=B, **settings):
    """A model with a likelihood of coefficients, a scale and rows."""

    def model():
        b, s = parameters()
        with rows(size, batch, **settings) as i:
            likelihood(b, s, i)

    return model


def outside(likelihood, weight=lambda i: N / len(i)):
    """A model whose likelihood uses rows outside of their plate, scaled for any number of them, or otherwise."""

    def model():
        b, s = parameters()
        with rows() as i:
            x, y = X[i], Y[i]
        with handlers.scale(scale=weight(i)):
            likelihood(b, s, x, y)

    return model


def test_outputs_of_one_equation_are_told_apart():
    unlike = lambda x, y: (x, y)  # noqa: E731
    for fn in (unlike, jax.jit(unlike), lambda x, y: (jax.nn.relu(x), jax.nn.relu(y))):
        assert influenced(fn, 1.0, 2.0) == [True, False]
        assert influenced(lambda x, y, fn=fn: fn(y, x)[1], 1.0, 2.0) == [True]


# --- Right models; those of test_gradients.py are right, too. ---


plain = within(lambda b, s, i: observe("y", X[i] @ b, Y[i], s))


def linear(b, s, x, y):
    observe("y", x @ b, y, s)


any_number, outside_by_hand = outside(linear), outside(linear, lambda i: N / B)


def as_many_groups_as_rows():
    with numpyro.plate("groups", B):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with rows() as i:
        observe("y", z[GROUP[i] % B], Y[i], 1 + z.std())


def hierarchical():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("groups", 5):
        z = numpyro.sample("z", dist.Normal(mu, 1))
    with rows() as i:
        observe("y", z[GROUP[i]], Y[i])


def network():
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D, B]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([B]).to_event(1))
    net = jax.jit(jax.checkpoint(lambda x: jax.nn.gelu(x @ w) @ v))
    with rows() as i:
        numpyro.sample("y", dist.StudentT(4.0, jax.vmap(net)(X[i]), 1.0), obs=Y[i])


def picked_by_label():
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D, 5]).to_event(2))
    with rows() as i:
        numpyro.factor("f", jax.nn.log_softmax(X[i] @ w)[jnp.arange(len(i)), GROUP[i]])


def events(b, s, i):
    numpyro.sample("y", dist.MultivariateNormal(b, jnp.eye(D) * (1 + s)), obs=X[i])
    numpyro.sample("x", dist.Normal(b, s).to_event(1), obs=X[i])


def all_rows_alike(b, s, i):
    observe("y", X[i] @ b, Y[i], s)
    observe("same", b[0], 0.3)
    numpyro.factor("penalty", -(b[0] ** 2))


def unravelled(b, s, i):
    observe("y", b[0], TABLE[jnp.unravel_index(i, TABLE.shape)] + TABLE[jnp.divmod(i, 6)], s)


def beyond_the_end(b, s, i):
    after = Y.at[i + 1].get(mode="clip") + Y.at[i + 2].get(mode="fill", fill_value=0.0)
    hidden = i < N - 3
    with handlers.mask(mask=hidden):
        observe("y", b[0] * after, Y[jnp.where(hidden, i, 0)] + Y[: N - 3][jnp.minimum(i, N - 4)], s)


def full_plates_of_one_name():
    for size in (3, 5):
        with numpyro.plate("p", size):
            numpyro.sample(f"z{size}", dist.Normal(0, 1))


def series(any_number=True):
    phi = numpyro.sample("phi", dist.Normal(0, 1))
    with rows() as i:
        table = TABLE[i]

    def step(before, now):
        observe("y", phi * before, now)
        return now, None

    with handlers.scale(scale=N / (len(i) if any_number else B)):
        scan(step, table[:, 0], table[:, 1:].T)


def mixture():
    means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    with rows() as i:
        c = numpyro.sample("c", dist.Bernoulli(0.3))
        with handlers.scale(scale=jnp.abs(X[i, 0])), handlers.mask(mask=Y[i] > -0.5):
            observe("y", means[c], Y[i])


RIGHT = {
    "plain": plain,
    "as many groups as rows": as_many_groups_as_rows,
    "partly centered": handlers.reparam(hierarchical, {"z": LocScaleReparam()}),
    "network": network,
    "picked by label": picked_by_label,
    "events": within(events),
    "all rows alike": within(all_rows_alike),
    "a single row": within(lambda b, s, i: observe("y", X[i] @ b, Y[i], s), batch=1),
    "windows": within(
        lambda b, s, i: observe("y", jax.vmap(lambda k: lax.dynamic_slice(Y, (k,), (D,)))(i) @ b, Y[i + D], s), N - D
    ),
    "unravelled": within(unravelled, 6 * N),
    "beyond the end": within(beyond_the_end),
    "full plates of one name": full_plates_of_one_name,
    "any number": any_number,
    "series": series,
    "mixture": mixture,
}


@pytest.mark.parametrize("model", RIGHT.values(), ids=RIGHT)
def test_right_models_are_accepted(model):
    target = ModelTarget(model)
    assert target.rows_outside == {}
    if model in (plain, RIGHT["beyond the end"], series, mixture):  # Inside a program, too.
        jax.eval_shape(lambda: ModelTarget(model).potential_energy(target.draw(KEY, init_to_uniform), {}, KEY))


def series_by_hand():
    series(any_number=False)


@pytest.mark.parametrize(
    ("model", "whole"),
    [(any_number, any_number), (series_by_hand, series), (mixture, mixture)],
    ids=["any number", "series by hand", "mixture"],
)
def test_minibatches_and_pieces_add_up_to_all_rows(x64, model, whole):
    target, whole = ModelTarget(model), ModelTarget(whole)
    flat, unravel = ravel_pytree(target.draw(random.key(1), init_to_uniform))

    @jax.jit
    def energy(rows):
        return target.potential_energy(unravel(flat), rows, KEY)

    full = whole.potential_energy(unravel(flat), whole.all_rows, KEY)
    pieces, _ = jax.jit(lambda z: full_gradient(KEY, whole, unravel, z, 3))(flat)
    np.testing.assert_allclose(pieces, full, rtol=1e-6)
    drawn = jax.vmap(lambda key: draw_indices(key, target.plates))(random.split(KEY, 5000))
    found = np.asarray(jax.vmap(energy)(drawn))
    error = found.std() / np.sqrt(len(found))
    assert error > 1e-3
    assert abs(found.mean() - full) < 4.5 * error


# --- Wrong models. ---


def one_site_of_two(b, s, i):
    observe("y", X[i] @ b, Y[i], s)
    observe("y2", b[0], Y[:B])


def weights_of_the_first_rows(b, s, i):
    with handlers.scale(scale=jnp.abs(Y)[:B]):
        observe("y", X[i] @ b, Y[i], s)


def all_pairs():
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D, 1]).to_event(2))
    with rows() as i:
        observe("y", X[i] @ w, Y[i])


def empirical(prior):
    def model():
        with rows() as i:
            y = Y[i]
        m = numpyro.sample("m", prior(y))
        with rows() as i:
            observe("y", m, Y[i])

    return model


def outside_unscaled():
    b, s = parameters()
    with rows() as i:
        x, y = X[i], Y[i]
    observe("y", x @ b, y, s)


def sizes_of_two_plates():
    plain()
    with rows(6, 2) as i:
        observe("y2", 0.0, TABLE[0][i])


def named_as_a_site():
    shift = numpyro.sample("rows", dist.Normal(0, 1))
    with rows() as i:
        observe("y", shift, Y[i])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (within(one_site_of_two), r"'y2' does not depend.*'rows' draws.*same 4 of 20 rows.*obs=y\[i\]"),
        (
            within(lambda b, s, i: observe("y", jax.jit(lambda x: jnp.tanh(x @ b))(X[i]), Y[:B], s)),
            r"'y' combines the rows.*'rows'.*values that stay.*obs=y\[i\]",
        ),
        (within(weights_of_the_first_rows), "'y' combines.*masks and weights"),
        (
            within(lambda b, s, i: numpyro.factor("f", dist.Normal(X[i] @ b, s).log_prob(Y[i]).sum())),
            r"'f' has one log density for a whole minibatch.*'rows'.*no sum.*scale=20 / len\(i\)",
        ),
        (
            within(lambda b, s, i: numpyro.factor("f", dist.Normal(X[i] @ b, s).log_prob(Y[i]).sum()), batch=1),
            "'f' has one log density",
        ),
        (
            within(lambda b, s, i: numpyro.sample("y", dist.Normal(X[i] @ b, s).to_event(1), obs=Y[i])),
            "'y' has one log density.*to_event",
        ),
        (all_pairs, r"'y' the rows.*'rows' lie along an axis.*dimension -1.*\[:, 0\]"),
        (
            empirical(lambda y: dist.Normal(y.mean(), 1)),
            "prior of the latent site 'm' depends on the rows.*'rows'.*whole data",
        ),
        (
            empirical(lambda y: dist.ImproperUniform(dist.constraints.greater_than(y.max()), (), ())),
            "prior of the latent site 'm'",
        ),
        (outside_unscaled, r"'y' uses rows.*'rows'.*4 of 20 rows.*scale=20 / len\(i\)"),
        (sizes_of_two_plates, "name 'rows'.*size=20 and subsample_size=4.*size=6 and subsample_size=2"),
        (named_as_a_site, "'rows' has the name of a site.*another name"),
        (within(events, batch=N + 1), r"subsample_size=21, more than its 20 rows.*min\(21, 20\)"),
        (
            within(lambda b, s, i: numpyro.factor("f", b[0] * i), 2**31),
            "'rows' has 2147483648 rows.*32-bit.*2147483647 at most.*several plates",
        ),
    ],
)
def test_refusals_name_the_site_the_plate_and_the_remedy(model, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        ModelTarget(model)


# --- Plates longer than the data. ---


INDEXED = {
    "in brackets": lambda i: Y[i],
    "integers by take": lambda i: jnp.take(GROUP, i) * 1.0,
    "one by one": lambda i: jax.vmap(lambda k: Y[k])(i),
    "in a loop": lambda i: lax.map(lambda k: Y[k], i),
    "in a program": jax.jit(lambda i: Y[i]),
    "entries by a label": lambda i: TABLE[i, GROUP[jnp.minimum(i, N - 1)]],
    "shifted": lambda i: Y[i - 2],
}


@pytest.mark.parametrize("index", INDEXED.values(), ids=INDEXED)
def test_plates_longer_than_the_data_are_refused(index):
    def model(size, batch=B):
        b, s = parameters()
        with rows(size, batch) as i:
            observe("y", b[0], index(i), s)

    ModelTarget(model, (N,))
    message = r"'y' uses the entry 2[0-2] of an axis of length 20.*in row 2.*'rows' of size 23.*as long as"
    for batch in (B, None) if index is INDEXED["in brackets"] else (B,):
        with pytest.raises(ValueError, match=message):
            ModelTarget(model, (N + 3, batch))


def test_parameters_with_too_few_entries_are_refused():
    def model(groups):
        with numpyro.plate("groups", groups) as g:
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.deterministic("shown", jnp.arange(6.0)[g])
        with rows() as i:
            observe("y", z[i % 5], Y[i])

    ModelTarget(model, (6,))
    for groups, message in (
        (4, "'y' uses the entry 4 of an axis of length 4"),
        (7, "'shown' uses the entry 6 .* length 6"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelTarget(model, (groups,))


# --- Rows used outside of their plate, multiplied by hand. ---


def factor_by_hand():
    b, s = parameters()
    with rows() as i:
        x, y = X[i], Y[i]
    numpyro.factor("f", N / B * dist.Normal(x @ b, s).log_prob(y).sum())


OUTSIDE = [
    (outside_by_hand, {"y": ["rows"]}),
    (factor_by_hand, {"f": ["rows"]}),
    (series_by_hand, {"y": ["rows"]}),
]


class OwnGradient(Gradient):
    pass


@pytest.mark.parametrize(("model", "expected"), OUTSIDE, ids=["site", "factor", "series"])
def test_rows_outside_of_their_plate_leave_plain_minibatches(model, expected):
    target = ModelTarget(model)
    assert target.rows_outside == expected
    assert choose_gradient("auto", target) == Subsampled()
    for gradient in (Subsampled(shared=True), Subsampled(block_size=2), Sweeps(control_variates=False)):
        assert choose_gradient(gradient, target) is gradient
    (name, (plate,)), *_ = expected.items()
    for gradient in (ControlVariates(), SVRG(), FullData(), Sweeps(), OwnGradient()):
        with pytest.raises(ValueError, match=rf"'{name}' uses rows.*'{plate}'.*into the plate.*=Subsampled\(\)"):
            choose_gradient(gradient, target)


def test_sites_for_any_number_of_rows_leave_every_gradient():
    for model in (any_number, handlers.scale(any_number, scale=0.5), series, plain):
        target = ModelTarget(model)
        assert choose_gradient("auto", target) == ControlVariates()
        for gradient in (Subsampled(), SVRG(), FullData()):
            assert choose_gradient(gradient, target) is gradient


def test_the_kernel_refuses_at_once():
    for kernel in (SGLD(factor_by_hand, gradient=FullData()), SGLD(factor_by_hand, moves=Archive(), step_size=0.1)):
        with pytest.raises(ValueError, match="into the plate"):
            kernel.init(random.split(KEY, 4), 50)


def test_what_is_computed_over_all_rows(pretended):
    by_factor, by_site = pretended(factor_by_hand), pretended(outside_by_hand)
    with pytest.raises(ValueError, match=r"factors \['f'\] use rows"):
        to_inference_data(by_factor, log_likelihood=["f"])
    with pytest.raises(ValueError, match="'f' uses rows"):
        scores(by_factor)
    assert scores(by_factor, gradient=Subsampled())[1].shape == (24, 4)
    # Neither a warning that the site is weighted, nor the weight.
    data = to_inference_data(by_site, log_likelihood=True)
    b, s = (data["posterior"][name].values[0, 0] for name in ("b", "s"))
    expected = dist.Normal(X @ b, s).log_prob(Y)
    np.testing.assert_allclose(data["log_likelihood"]["y"].values[0, 0], expected, rtol=1e-3, atol=1e-4)


def test_weights_beside_the_factor_of_a_minibatch_are_warned_of(pretended):
    def model():
        with handlers.scale(scale=0.5):
            outside_by_hand()

    with pytest.warns(UserWarning, match=r"weights the sites \['y'\]"):
        to_inference_data(pretended(model), log_likelihood=True)


# --- Very long plates. ---


@pytest.mark.parametrize("batch", [1, 3, 65_536])
def test_the_longest_plate_has_rows_without_overflow(monkeypatch, batch):
    size = 2**31 - 1
    for r in (0, 1, 2**31 - 3, 2**31 - 2):
        monkeypatch.setattr(minibatch, "integers_below", lambda key, shape, size, r=r: jnp.full(shape, r, jnp.uint32))
        found = np.asarray(draw_indices(KEY, {"rows": (size, batch)})["rows"], dtype=object)
        assert (found == (np.arange(batch).astype(object) * size + r) // batch).all()


SHARED = {
    "standardized": lambda x, i: (x - x.mean(0)) / x.std(0),
    "minus a maximum": lambda x, i: x - lax.stop_gradient(x.max()),
    "cumulative sum": lambda x, i: jnp.cumsum(x, 0),
    "in a program": jax.jit(lambda x, i: x - jnp.median(x, 1, keepdims=True) + x.sum()),
    "a lag": lambda x, i: jnp.roll(x, 1, 0),
    "counts": lambda x, i: x * jnp.bincount(GROUP[i], length=5)[GROUP[i]][:, None],
    "neighbors among those drawn": lambda x, i: x[jnp.argsort(jnp.abs(i[:, None] - i[None]), 1)[:, 1]],
    "first row as a reference": lambda x, i: x - x[0],
    "positions in a minibatch": lambda x, i: x * jnp.arange(len(i))[:, None],
}


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_rows_that_depend_on_each_other_are_refused(share):
    message = r"depends on the other rows that the subsampled plate 'rows' draws.*y\[i - 1\]|combines the rows.*'rows'"
    with pytest.raises(ValueError, match=message):
        ModelTarget(within(lambda b, s, i: observe("y", share(X[i], i) @ b, Y[i], s)))


def filtered(b, s, x, y):
    def step(before, now):
        observe("y", b[0] * before, now, s)
        return now, None

    scan(step, 0.0, y)


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda b, s, x, y: numpyro.sample("y", dist.MultivariateNormal(x @ b, 0.5 + s * jnp.eye(len(y))), obs=y),
        lambda b, s, x, y: observe("y", (x - x.mean(0)) @ b, y, s),
        filtered,
    ],
)
def test_what_is_no_sum_over_rows_is_refused_outside_of_the_plate(likelihood):
    with pytest.raises(ValueError, match="'rows' outside of that plate, and its log density is not a sum over"):
        ModelTarget(outside(likelihood))


LAGS = jnp.pad(Y, (1, 0))[:-1]
ALONE = {
    "standardized within a row": lambda x, i: (x - x.mean(1, keepdims=True)) / (1e-3 + x.std(1, keepdims=True)),
    "standardized by all rows": lambda x, i: (x - X.mean(0)) / X.std(0),
    "attention within a row": jax.vmap(lambda v, i: jax.nn.softmax(v[:, None] * v) @ v),
    "scan within a row": jax.vmap(lambda v, i: lax.scan(lambda c, w: (0.5 * c + w, c), 0.0, v)[1]),
    "Fourier within a row": lambda x, i: jnp.fft.fft(x).real,
    "a lag of all rows": lambda x, i: x * LAGS[i][:, None],
    "the row before": lambda x, i: x * jnp.where(i > 0, Y[i - 1], 0.0)[:, None],
    "ranks among all rows": lambda x, i: jnp.argsort(jnp.argsort(X, 0), 0)[i].astype(float),
    "in halves": lambda x, i: jnp.concatenate([x[: len(x) // 2] * 2, x[len(x) // 2 :] * 2]),
    "number of the row": lambda x, i: x * i[:, None] / N,
    "solver": lambda x, i: (
        x * lax.while_loop(lambda z: jnp.sum((z**2 - 1.0) ** 2) > 1e-6, lambda z: (z + 1 / z) / 2, 1 + x**2)
    ),
    "weights that differ by 1e6": lambda x, i: x * jnp.array([1e-3, 1.0, 1e3]),
}


@pytest.mark.parametrize("share", ALONE.values(), ids=ALONE)
def test_rows_that_do_not_are_fine(share):
    assert ModelTarget(within(lambda b, s, i: observe("y", share(X[i], i) @ b, Y[i], s))).plates


# --- Indices, over all rows. ---


def grouped(g, size=5, index=lambda u, g: u[g]):
    def model(g):
        u = numpyro.sample("u", dist.Normal(0, 3).expand([size]).to_event(1))
        with rows() as i:
            observe("y", index(u, g[i]), Y[i])

    return ModelTarget(model, (g,))


LAST = np.asarray(GROUP).copy()
LAST[13] = 7
MISSING = np.asarray(GROUP).copy()
MISSING[[4, 13]] = -1


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        (np.asarray, lambda u, g: u[g]),
        (Rows, lambda u, g: u[g]),
        (np.asarray, lambda u, g: jnp.take_along_axis(u, g, 0)),
        (np.asarray, lambda u, g: jnp.stack([u, u], 1)[g, 0]),
    ],
)
def test_codes_beyond_the_last_group_are_refused_with_their_rows(kind, index):
    grouped(kind(np.asarray(GROUP)), index=index)
    with pytest.raises(ValueError, match="'y' uses the entry 7 of an axis of length 5.* in row 13 of the plate 'rows'"):
        grouped(kind(LAST), index=index)


def test_codes_from_one_and_missing_codes_are_refused():
    with pytest.raises(ValueError, match=r"the entry 5 of an axis of length 5.*from 0"):
        grouped(GROUP + 1)
    grouped(GROUP + 1, 6)
    for kind in (np.asarray, Rows):
        with pytest.raises(ValueError, match=r"args\[0\] has negative integers \(at 4, 13 .*of length 5.*last group"):
            grouped(kind(MISSING))
    # Its own treatment of what is missing.
    grouped(MISSING, 6, lambda u, g: u[g + 1])
    grouped(MISSING, 5, lambda u, g: jnp.where(g < 0, 0.0, u[jnp.maximum(g, 0)]))
    grouped(MISSING, 5, lambda u, g: u[jnp.abs(g)] + g)


def test_codes_of_groups_within_groups_are_refused():
    def model(county, state):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("county", 5):
            u = numpyro.sample("u", dist.Normal(mu[state], 1))
        with rows() as i:
            observe("y", u[county[i]], Y[i])

    ModelTarget(model, (GROUP, np.array([0, 1, 2, 0, 1])))
    with pytest.raises(ValueError, match="'u' uses the entry 3 of an axis of length 3.*row 4 of the plate 'county'"):
        ModelTarget(model, (GROUP, np.array([0, 1, 2, 0, 3])))


def test_indices_that_change_nothing_are_fine():
    def hidden(b, s, i):
        with handlers.mask(mask=i < N):
            observe("y", X[i] @ b, Y[i], s)

    ModelTarget(within(hidden, N + 3))
    ModelTarget(within(lambda b, s, i: observe("y", b[(1.5 * s).astype(int)], Y[i], s)))  # of parameters


# --- Latent sites that a handler hides. ---


def test_sites_that_block_draws_anew_are_refused():
    for hidden in (["b"], ["s", "rows"]):
        with pytest.raises(
            ValueError, match=r"\['y'\] change with the random key, because numpyro.handlers.block hides"
        ):
            ModelTarget(handlers.block(plain, hide=hidden))
    fixed = ModelTarget(handlers.block(handlers.substitute(plain, data={"s": 2.0}), hide=["s"]))
    assert not fixed.is_random and fixed.latent == ["b"]


def test_plates_that_block_hides_are_not_missed():
    target = ModelTarget(handlers.block(hierarchical, hide=["groups"]))
    assert target.plates == {"rows": (N, B)} and target.dims["z"] == {}
