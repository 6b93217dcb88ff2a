"""Models, settings and data at random: a run either gives finite draws of NumPyro's shapes, or says what is wrong.

A case that fails prints itself; ``replay(...)`` of what it prints runs it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
import warnings

from catalogue import GRADIENTS, INTERACTIONS, MOVES, PRESETS, SCHEDULES, having
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import mask, scale as scaled, seed as seeded, trace
from numpyro.infer import init_to_median, init_to_sample, init_to_uniform

from numpyro_repulsion import to_inference_data

#: Latent sites by family: every support that NumPyro's bijections know, batch shapes ``s`` in front of event shapes.
FAMILIES = {
    "normal": lambda s: dist.Normal(0.0, 1.0).expand(s),
    "student": lambda s: dist.StudentT(4.0, 0.0, 1.0).expand(s),
    "lognormal": lambda s: dist.LogNormal(0.0, 1.0).expand(s),
    "gamma": lambda s: dist.Gamma(3.0, 2.0).expand(s),
    "half": lambda s: dist.HalfNormal(1.0).expand(s),
    "beta": lambda s: dist.Beta(2.0, 3.0).expand(s),
    "uniform": lambda s: dist.Uniform(-1.0, 3.0).expand(s),
    "truncated": lambda s: dist.TruncatedNormal(0.0, 1.0, low=-0.5).expand(s),
    "circular": lambda s: dist.VonMises(0.0, 2.0).expand(s),
    "event": lambda s: dist.Normal(0.0, 1.0).expand((*s, 2)).to_event(1),
    "simplex": lambda s: dist.Dirichlet(jnp.ones(3)).expand(s),
    "mvn": lambda s: dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2) + 0.5).expand(s),
    "lkj": lambda s: dist.LKJCholesky(3, 2.0).expand(s),
    "ordered": lambda s: dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand((*s, 3)).to_event(1), dist.transforms.OrderedTransform()
    ),
}
SHAPES = ((), (), (1,), (1,), (3,), (3,), (2, 2), (2, 2), (2, 1, 3), (0,))
LIKELIHOODS = ("none", "normal", "bernoulli", "poisson", "categorical", "factor")
DTYPES = ("float32", "float64", "float16", "int32", "int64", "bool", "list")


@dataclass(frozen=True)
class Case:
    """One model with its data, and how it is run."""

    latents: tuple = (("normal", ()),)
    likelihood: str = "normal"
    size: int = 12
    batch: int | None = 4
    columns: int = 0
    dtype: str = "float32"
    group: int = 0
    flaw: str = ""
    handler: str = ""
    deterministic: str = ""
    kernel: str = "SGLD"
    settings: dict = field(default_factory=dict)
    chains: int = 4
    num_warmup: int = 0
    num_samples: int = 3
    thinning: int = 1
    seed: int = 0
    legacy_key: bool = False


SETTINGS = {
    "step_size": ("auto", 50.0, *having(SCHEDULES, but={"cycle"}).values()),
    "interaction": ("auto", *having(INTERACTIONS, "setting", but={"ensembles"}).values()),
    "preconditioner": ("auto", "diagonal", "dense", None),
    "num_steps": (1, 2, 3),
    "num_ensembles": (1, 2),
    "gradient": ("auto", *having(GRADIENTS).values()),
    "moves": (*(3 * ["auto"]), *having(MOVES).values()),
    "init_strategy": (init_to_sample, init_to_uniform, init_to_median),
}
KERNELS = having(PRESETS)
FLAWS = ("nan", "inf", "local", "discrete", "unused", "negative_step", "init_shape", "chain_method", "constant")


@st.composite
def cases(draw):
    def one_of(*values):
        return draw(st.sampled_from(values))

    chosen = {}
    for name, values in SETTINGS.items():
        # Few settings at a time, so that most cases are valid and each meets others.
        if draw(st.integers(0, 2)) == 0:
            chosen[name] = one_of(*values)
    chosen.setdefault("step_size", 0.01)
    num_warmup = one_of(0, 0, 0, 6, 60) if draw(st.integers(0, 2)) == 0 else 0
    if num_warmup == 0 and draw(st.integers(0, 3)):
        # What needs a warmup, and mostly has one.
        chosen |= {"moves": "auto", "step_size": 0.01 if chosen["step_size"] == "auto" else chosen["step_size"]}
    size = one_of(1, 2, 7, 12, 40)
    rare = draw(st.integers(0, 3)) == 0
    return Case(
        latents=tuple((one_of(*FAMILIES), one_of(*SHAPES)) for _ in range(draw(st.integers(1, 3)))),
        likelihood=one_of(*LIKELIHOODS),
        size=size,
        batch=one_of(None, 1, max(1, size // 3), size),
        columns=one_of(0, 0, 1, 3),
        dtype=one_of("float32", "float32", *DTYPES),
        group=one_of(0, 0, 1, 3),
        flaw=one_of(*FLAWS) if rare else "",
        handler=one_of("", "", "scale", "mask", "scope"),
        deterministic=one_of("", "global", "local"),
        kernel=one_of(*KERNELS),
        settings=chosen,
        chains=one_of(4, 4, 6, 2, 1),
        num_warmup=num_warmup,
        num_samples=one_of(2, 3),
        thinning=one_of(1, 1, 2),
        seed=draw(st.integers(0, 1000)),
        legacy_key=draw(st.booleans()),
    )


def data(case):
    """``x`` and ``y`` of a case."""
    generator = np.random.default_rng(case.seed)
    shape = (case.size, case.columns) if case.columns else (case.size,)
    x = generator.normal(size=shape)
    y = generator.normal(size=case.size) if case.likelihood == "normal" else generator.integers(0, 2, case.size)
    kind = "float32" if case.dtype == "list" else case.dtype
    counted = "float32" if kind == "bool" else "int32"
    y = y.astype({"normal": kind, "categorical": "int32"}.get(case.likelihood, counted))
    x = x.astype("float32" if case.dtype == "list" else case.dtype)
    if case.flaw in ("nan", "inf"):
        x = x.astype("float32")
        x.flat[generator.integers(x.size)] = np.nan if case.flaw == "nan" else np.inf
    return x, y


def build(case):
    """The model of a case."""

    def model(x, y):
        total = 0.0
        for number, (family, shape) in enumerate(case.latents):
            total = total + jnp.sum(numpyro.sample(f"z/{number}", FAMILIES[family](shape)))
        if case.group:
            with numpyro.plate("group", case.group):
                total = total + numpyro.sample("effect", dist.Normal(0, 1)).mean()
        if case.flaw == "discrete":
            total = total + numpyro.sample("c", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        if case.deterministic == "global":
            numpyro.deterministic("total", total)
        if case.likelihood == "none":
            return
        with numpyro.plate("rows", case.size, subsample_size=case.batch) as i:
            rows = jnp.arange(len(i)) if case.flaw == "unused" else i
            row = jnp.asarray(x)[rows] if case.flaw == "constant" else x[rows]
            effect = 0.3 * total + (row.sum(-1) if row.ndim > 1 else row * 1.0)
            if case.flaw == "local":
                effect = effect + numpyro.sample("local", dist.Normal(0, 1))
            if case.deterministic == "local":
                numpyro.deterministic("effect.rows", effect)
            effect = jnp.tanh(effect)
            observed = y[rows]
            if case.likelihood == "normal":
                numpyro.sample("y", dist.Normal(effect, 1.0), obs=observed)
            elif case.likelihood == "bernoulli":
                numpyro.sample("y", dist.Bernoulli(logits=effect), obs=observed)
            elif case.likelihood == "poisson":
                numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=observed)
            elif case.likelihood == "categorical":
                logits = jnp.stack([effect, -effect, 0 * effect], -1)
                numpyro.sample("y", dist.Categorical(logits=logits), obs=observed)
            else:
                numpyro.factor("y", -0.5 * (effect - observed) ** 2)

    wrap = {
        "scale": lambda f: scaled(f, scale=0.5),
        "mask": lambda f: mask(f, mask=True),
        "scope": lambda f: numpyro.handlers.scope(f, prefix="s"),
    }
    return wrap[case.handler](model) if case.handler else model


def is_minibatched(case):
    return case.likelihood != "none" and case.batch is not None and case.batch < case.size


def must_fail(case):
    """Whether a case is known to be wrong; others may be refused too, but must say so."""
    # A saturated `tanh` has no trace of an infinity.
    wrong = case.flaw in ("negative_step", "init_shape")
    wrong |= case.flaw == "chain_method" and case.chains > 1
    wrong |= case.flaw == "nan" and case.likelihood != "none"
    wrong |= case.flaw in ("unused", "discrete") and is_minibatched(case) and case.handler != "mask"
    return wrong


def replay(case):
    """Runs a case; raises an AssertionError where it neither works nor says what is wrong."""
    x, y = data(case)
    model = build(case)
    kwargs = dict(case.settings)
    if case.flaw == "negative_step":
        kwargs["step_size"] = -0.1
    key = random.PRNGKey(case.seed) if case.legacy_key else random.key(case.seed)
    init_params = {"z/0": jnp.zeros((case.chains, 7, 5))} if case.flaw == "init_shape" else None
    given = {"thinning": case.thinning, "chain_method": "sequential" if case.flaw == "chain_method" else "vectorized"}
    try:
        kernel = KERNELS[case.kernel](model, **kwargs)
        mcmc = vectorized(kernel, case.num_warmup, case.num_samples, case.chains, **given)
        mcmc.run(key, x, y, init_params=init_params)
    except (ValueError, TypeError) as error:
        said = str(error)
        assert len(said) > 40, f"not a message for a user: {error!r}"
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        where = frame.tb_frame.f_code.co_filename
        assert "numpyro_repulsion" in where, f"raised in {where}: {error!r}"
        return f"refused: {said}"
    assert not must_fail(case), "ran, and must not"
    check(case, mcmc, model, x, y)
    return "ran"


def check(case, mcmc, model, x, y):
    """What a run must have left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sites = trace(seeded(model, 0)).get_trace(x, y)
    latent = {
        name: site
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"] and not site["fn"].support.is_discrete
    }
    if is_minibatched(case):
        latent.pop("local", None)  # integrated out
    draws = mcmc.get_samples(group_by_chain=True)
    kept = case.num_samples // case.thinning
    plain = {name: value for name, value in draws.items() if name in latent}
    assert set(plain) == set(latent), (set(draws), set(latent))
    for name, site in latent.items():
        value = np.asarray(plain[name])
        assert value.shape == (case.chains, kept, *site["value"].shape), (name, value.shape, site["value"].shape)
        assert value.dtype == site["value"].dtype, (name, value.dtype)
        assert np.isfinite(value).all(), f"{name} is not finite"
        inside = np.asarray(site["fn"].support(plain[name]))
        # Rounding puts draws on the boundary of a bounded support.
        assert not inside.size or inside.mean() > 0.99 or case.settings["step_size"] == 50.0, (
            f"{name} leaves its support"
        )
    if case.deterministic == "global" and "total" in sites:
        assert draws["total"].shape[:2] == (case.chains, kept)
    state = mcmc.last_state
    assert np.isfinite(np.asarray(state.potential_energy)).all()
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state.z))
    if kept:
        found = to_inference_data(mcmc)["posterior"]
        expected = (1, case.chains) if case.kernel == "SVGD" else (case.chains, kept)
        assert (found.sizes["chain"], found.sizes["draw"]) == expected


#: What a kernel may say of runs that are far too short, or of steps far too long.
SAID = ("More chains", "A particle's update", "Warmup found problems", "num_warmup=", "observed_data is left out")


def fuzz(number, shard):
    """So many different cases; returns how many ran and how many were refused."""
    outcomes: dict[str, str] = {}

    @settings(
        # Some come twice.
        max_examples=3 * number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(shard)
    @given(cases())
    def one(case):
        if len(outcomes) == number or repr(case) in outcomes:
            return
        with warnings.catch_warnings():
            for said in SAID:
                warnings.filterwarnings("ignore", f".*{said}")
            outcomes[repr(case)] = replay(case)
        if len(outcomes) % 20 == 0:
            jax.clear_caches()

    one()
    ran = list(outcomes.values()).count("ran")
    return {"ran": ran, "refused": len(outcomes) - ran}


def test_a_few_cases():
    assert sum(fuzz(4, 1000).values()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(20))
def test_a_thousand_cases(shard):
    counts = fuzz(50, shard)
    print(counts)
    # Neither kind may be rare, or the other is all that is tested.
    assert sum(counts.values()) == 50 and min(counts.values()) >= 10
