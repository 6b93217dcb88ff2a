"""Exact references of `visits` and `counts`: effects integrated out, and importance sampling of the few others.

Writes ``benchmarks/references/many_effects/{visits,counts}.npz``, in a few minutes:

    python -m benchmarks.problems.effects_exact
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

from benchmarks.problems import effects

#: Degrees of freedom of the proposals.
TAILS = 10


def weighted(energy: Callable, start: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws ``(number, d)`` from a t distribution about the mode, and their weights."""
    rng, d, found = np.random.default_rng(0), len(start), minimize(energy, start, method="BFGS", options={"gtol": 1e-3})
    steps = 0.1 * np.sqrt(np.diag(found.hess_inv))

    def bend(a, b):
        corners = ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))
        return sum(sign * energy(found.x + i * a + j * b) for i, j, sign in corners) / 4.0

    shifts = np.diag(steps)
    hessian = np.array([[bend(a, b) for b in shifts] for a in shifts]) / np.outer(steps, steps)
    t = rng.standard_normal((number, d)) / np.sqrt(rng.chisquare(TAILS, (number, 1)) / TAILS)
    draws = found.x + t @ np.linalg.cholesky(np.linalg.inv(hessian)).T
    logs = (TAILS + d) / 2 * np.log1p((t**2).sum(1) / TAILS) - np.array([energy(x) for x in draws])
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    print(f"{1 / (weights**2).sum():.0f} effective draws of {number}")
    return draws, weights


def moments(draws: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations."""
    mean = weights @ draws
    return mean, np.sqrt(weights @ (draws - mean) ** 2)


def mixed(found: Callable, draws: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of effects, from their means and mean squares given each draw."""
    weights, first, second = weights / weights.sum(), 0.0, 0.0
    for x, weight in zip(draws, weights, strict=True):
        mean, square = found(x)
        first, second = first + weight * mean, second + weight * square
    return first, np.sqrt(second - first**2)


def store(name: str, found: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    flat = {f"{site} {what}": x for site, both in found.items() for what, x in zip(("mean", "sd"), both, strict=True)}
    flat = {key: np.asarray(x, np.float32).ravel() for key, x in flat.items()}
    np.savez_compressed(effects.REFERENCES / f"{name}.npz", **flat)


def visits() -> None:
    data = effects.visits().data
    y, t = (np.asarray(data[name], float).reshape(-1, effects.VISITS) for name in ("y", "t"))
    z, number, mean = np.stack([np.ones(effects.VISITS), t[0]], 1), len(y), y.mean(0)
    scatter = (y - mean).T @ (y - mean)

    def parts(x):
        """Coefficients, covariance of the effects and variance of the noise, of β, log scales, atanh ρ and log σ."""
        scale, correlation = np.exp(x[2:4]), np.array([[1.0, np.tanh(x[4])], [np.tanh(x[4]), 1.0]])
        return x[:2], correlation * np.outer(scale, scale), np.exp(2 * x[5])

    def energy(x):
        beta, covariance, noise = parts(x)
        total, off = z @ covariance @ z.T + noise * np.eye(len(z)), mean - z @ beta
        inverse = np.linalg.inv(total)
        fit = number / 2 * np.linalg.slogdet(total)[1] + (np.sum(inverse * scatter) + number * off @ inverse @ off) / 2
        # Normal, half-normal and LKJ(2) priors, with the volumes of their transformations.
        prior = (beta @ beta + np.exp(2 * x[2:4]).sum() + noise) / 2 - x[2:4].sum() - x[5]
        return fit + prior - 2 * np.log(1 - np.tanh(x[4]) ** 2)

    def effect(x):
        beta, covariance, noise = parts(x)
        spread = np.linalg.inv(np.linalg.inv(covariance) + z.T @ z / noise)
        means = (y - z @ beta) @ z @ spread / noise
        return means, means**2 + np.diag(spread)

    x, weights = weighted(energy, np.array([2, -0.5, 0, -0.7, -0.5, -0.7]), 4000)
    rho = np.tanh(x[:, 4])
    factor = np.stack([np.ones_like(rho), 0 * rho, rho, np.sqrt(1 - rho**2)], 1)
    found = {"beta": x[:, :2], "scale": x[:, 2:4], "sigma": x[:, 5:], "correlation": factor}
    known = {name: moments(draws, weights) for name, draws in found.items()}
    store("visits", known | {"effect": mixed(effect, x[:1500], weights[:1500])})


def counts() -> None:
    data = {name: np.asarray(x) for name, x in effects.counts().data.items()}
    x, areas, y = data["x"].astype(float), data["u"].max() + 1, data["y"].astype(float)
    events, slopes = np.bincount(data["u"], y, areas), y @ x
    nodes, logs = np.polynomial.hermite_e.hermegauss(24)
    logs = np.log(logs) + nodes**2 / 2

    def effect(theta):
        """The logarithm of each area's evidence, and the mean and mean square of its effect, by quadrature."""
        expected, s = np.bincount(data["u"], np.exp(theta[0] + x @ theta[1:3]), areas), np.exp(theta[3])
        e = 0.3 * np.log((events + 0.5) / expected)
        for _ in range(12):
            rate = expected * np.exp(e)
            e = e - np.clip((rate - events + e / s**2) / (rate + 1 / s**2), -1, 1)
        sd = 1 / np.sqrt(expected * np.exp(e) + 1 / s**2)
        at = e[:, None] + sd[:, None] * nodes
        fit = events[:, None] * at - expected[:, None] * np.exp(at) - (at / s) ** 2 / 2 + logs + np.log(sd / s)[:, None]
        most = fit.max(1, keepdims=True)
        share = np.exp(fit - most)
        total = share.sum(1)
        return np.log(total) + most[:, 0], (share * at).sum(1) / total, (share * at**2).sum(1) / total

    def energy(theta):
        fit = effect(theta)[0].sum() + y.sum() * theta[0] + slopes @ theta[1:3]
        return (theta[:3] @ theta[:3] + np.exp(2 * theta[3])) / 2 - theta[3] - fit

    draws, weights = weighted(energy, np.array([0.5, 0.3, -0.2, -0.7]), 400)
    found = {"mean": draws[:, :1], "beta": draws[:, 1:3], "s_area": draws[:, 3:]}
    known = {name: moments(values, weights) for name, values in found.items()}
    store("counts", known | {"area": mixed(lambda theta: effect(theta)[1:], draws[:150], weights[:150])})


if __name__ == "__main__":
    visits()
    counts()
