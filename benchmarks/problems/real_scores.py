"""How draws from posteriors of real data are scored: errors against the references, R-hat, effective draws."""

import numpy as np

from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from benchmarks.problems import real

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
    stored = real.reference(name)
    if stored is None:
        return {}
    few = FEW_LEVELS.get(name, ())
    row = {}
    for kind, sites in (("", [s for s in found if s not in few]), ("few ", [s for s in found if s in few])):
        worst = {"mean": (0.0, ""), "sd": (0.0, "")}
        for site in sites:
            mean, sd, x = stored[site]["mean"], stored[site]["sd"], found[site]
            gaps = {"mean": np.abs(x.mean((1, 2)) - mean) / sd, "sd": np.abs(x.std((1, 2)) / sd - 1.0)}
            for what, gap in gaps.items():
                worst[what] = max(worst[what], (float(gap.max()), f"{site}[{int(gap.argmax())}]"))
        if sites:
            row |= {f"{kind}{what}": value for what, value in worst.items()}
    return row


def squares(name, found):
    """Squared distances from the reference's means, or where there is none from those of the draws."""
    stored = real.reference(name)

    def center(site, x):
        return x.mean((1, 2)) if stored is None else stored[site]["mean"]

    return {site: (x - center(site, x)[:, None, None]) ** 2 for site, x in found.items()}


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
