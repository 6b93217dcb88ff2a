"""Prints tables of pages (recipe, exactness, minibatch-noise, notes/noise, scale) and of docstrings.

``make measured`` takes two minutes on two cores.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, trace
from numpyro.infer import MCMC

from benchmarks.harness.runs import in_turns, through_mcmc
from benchmarks.problems.targets import gaussian, logistic_regression
from numpyro_repulsion import (
    RBF,
    SGHMC,
    SGHMCR,
    SGLD,
    SGLDR,
    SGNHTR,
    SVGD,
    Antithetic,
    Balanced,
    ControlVariates,
    Independent,
    Subsampled,
)
from numpyro_repulsion.dynamics import Overdamped, Thermostat, Underdamped
from numpyro_repulsion.gradients import ModelTarget, Reference, evaluate_reference
from numpyro_repulsion.interactions import Laplacian
from numpyro_repulsion.warmup.bandwidth import measure_steepness

PARTICLES = 20
EULER = Overdamped(integrator="euler")


def draws(kernel, *args, num_warmup=500, num_samples=20_000, key=0, **kwargs):
    """Draws of all particles, ``(chain, draw, d)``, of the model's only site."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=PARTICLES,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(key), *args, **kwargs)
    (z,) = mcmc.get_samples(group_by_chain=True).values()
    return np.asarray(z, float)


def table(title, header, rows):
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def stationary_variance():
    """The variance of z in one coordinate of N(0, I₂), by step size; Euler's for K = I is 1/(1 − ε/2) exactly."""
    rows = []
    for step_size in (0.02, 0.1, 0.5):
        kernels = (
            SGLD(gaussian, step_size=step_size, interaction=Independent(), dynamics=EULER),
            SGLD(gaussian, step_size=step_size),
            SGLDR(gaussian, step_size=step_size, interaction=RBF(bandwidth=1.0)),
            SVGD(gaussian, step_size=step_size, interaction=RBF(bandwidth=1.0)),
        )
        values = [np.mean(draws(kernel) ** 2) for kernel in kernels]
        rows.append([f"{step_size:g}", f"{1 / (1 - step_size / 2):.2f}"] + [f"{value:.2f}" for value in values])
    header = ["ε", "Euler, in theory", "SGLD, plain", "SGLD, default", "SGLDR", "SVGD"]
    table("Variance on N(0, I), which is 1; 20 particles, RBF with h = 1", header, rows)


def noisy_gaussian(pulls, batch_size):
    """N(0, I₂) with rows that pull it back and forth, and not at all when summed: gradient noise and nothing else."""
    z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("row", len(pulls), subsample_size=batch_size) as i:
        numpyro.factor("pull", pulls[i] @ z)


def whose_minibatch():
    size, batch_size, noise = 1000, 10, 4.0
    pulls = random.normal(random.key(1), (size, 2))
    pulls = (pulls - pulls.mean(0)) / pulls.std(0) * (noise * batch_size) ** 0.5 / size
    rows = []
    for name, make in {
        "SGLD": lambda **parts: SGLD(interaction=Independent(), dynamics=EULER, **parts),
        "SGLDR": lambda **parts: SGLDR(interaction=RBF(bandwidth=2.0), **parts),
    }.items():
        for shared in (True, False):
            kernel = make(model=noisy_gaussian, step_size=0.02, gradient=Subsampled(shared=shared))
            z = draws(kernel, pulls, batch_size)
            mean = PARTICLES * np.mean(z.mean(0) ** 2)
            rows.append([f"{name}, {'shared' if shared else 'own'}", f"{np.mean(z**2):.2f}", f"{mean:.2f}"])
    header = ["", "variance of a particle", "20 × variance of the cloud's mean"]
    table("N(0, I), ε = 0.02, minibatch gradients of noise variance 4; both should be 1", header, rows)


def balanced_noise():
    """Errors of block averages on a skewed posterior: 200 rows, d = 5."""
    X = random.normal(random.key(2), (200, 5))
    y = trace(seed(logistic_regression, random.split(random.key(3), 1)[0])).get_trace(X)["y"]["value"]
    settings = {
        "plain, Euler": {"interaction": Independent(), "dynamics": EULER},
        "plain, averaged over two updates": {"interaction": Independent()},
        "zero-sum, averaged over two updates (default)": {},
    }
    runs = {name: draws(SGLD(logistic_regression, step_size=0.01, **parts), X, y) for name, parts in settings.items()}
    # The reference: a small step with second-order bias, and all its draws.
    reference = draws(SGLD(logistic_regression, step_size=0.002), X, y, num_samples=40_000)
    mean, variance = reference.mean((0, 1)), reference.var((0, 1))
    rows = []
    for name, z in runs.items():
        blocks = z.reshape(PARTICLES, 100, -1, 5).mean((0, 2))
        error = np.mean((blocks - mean) ** 2, 0) / variance
        effective = (1 / error).min()
        worst = np.abs(z.var((0, 1)) / variance - 1).max()
        rows.append([name, f"{effective:,.0f}", f"{worst:.1%}"])
    header = ["noise", "ESS of 2,000 updates", "worst error of a variance"]
    table("Logistic regression, ε = 0.01, 20 particles", header, rows)


def averaged_noise():
    """Euler's noise against that averaged over two updates, with repulsion: the numbers of Overdamped's docstring."""
    rows = []
    for dimension in (2, 5, 10):
        h = float(RBF().learn_bandwidth(random.normal(random.key(5), (1, PARTICLES, dimension))))
        row = [str(dimension)]
        for dynamics in (EULER, Overdamped(integrator="lm")):
            kernel = SGLDR(gaussian, step_size=0.1, interaction=RBF(bandwidth=h), dynamics=dynamics)
            z = draws(kernel, np.zeros(dimension))
            row += [f"{np.mean(z**2):.3f}", f"{PARTICLES * np.mean(z.mean(0) ** 2):.2f}"]
        rows.append(row)
    header = [
        "d",
        "euler, variance",
        "euler, 20 × variance of the mean",
        "lm, variance",
        "lm, 20 × variance of the mean",
    ]
    table("N(0, I), ε = 0.1, 20 particles, RBF with the bandwidth of warmup", header, rows)


def momenta():
    """With momenta: the variance of a coordinate of N(0, I₂), and of the cloud's mean, by step size."""
    rows = []
    for step_size in (0.05, 0.1, 0.2):
        kernels = (
            SGHMC(gaussian, step_size=step_size, interaction=Independent()),
            SGHMCR(gaussian, step_size=step_size, interaction=RBF(bandwidth=1.5)),
            SGNHTR(gaussian, step_size=step_size, interaction=RBF(bandwidth=1.5)),
        )
        row = [f"{step_size:g}"]
        for kernel in kernels:
            z = draws(kernel)
            row += [f"{np.mean(z**2):.3f} · {PARTICLES * np.mean(z.mean(0) ** 2):.2f}"]
        rows.append(row)
    header = ["ε", "SGHMC", "SGHMCR", "SGNHTR"]
    table("Variance of a particle on N(0, I) · 20 × variance of the mean; RBF with h = 1.5", header, rows)


def dense_clouds():
    """How repulsion that changes fast widens N(0, I): by the product of step size and steepness."""
    rows = []
    for number, dimension, bandwidth in ((20, 5, 3.5), (20, 2, 1.0), (60, 2, 0.29), (20, 1, 0.5), (20, 1, 0.2)):
        interaction = RBF(bandwidth)
        cloud = random.normal(random.key(0), (200, number, dimension))
        steepness = measure_steepness(random.key(1), interaction, cloud, jnp.asarray(bandwidth))
        for step_size in (0.02, 0.05, 0.1):
            found = repelled_variance(Overdamped("lm"), interaction, cloud[:64], step_size)
            rows.append(
                (
                    str(number),
                    str(dimension),
                    f"{bandwidth:g}",
                    f"{step_size:g}",
                    f"{step_size * steepness:.2f}",
                    f"{found.mean() - 1:.3f} ± {found.std() / len(found) ** 0.5:.3f}",
                    f"{(step_size * steepness) ** 2 / 10:.3f}",
                )
            )
    header = ("L", "d", "h", "ε", "εs", "relative bias of the variance", "(εs)²/10")
    table("Averaged noise and RBF repulsion on N(0, I)", header, rows)


def dense_clouds_with_momenta():
    """The same for momenta, whose step is one of time: up to a limit little, and beyond it all is lost."""
    rows = []
    for number, dimension, bandwidth in ((20, 1, 0.15), (60, 1, 0.1), (60, 2, 0.1)):
        interaction = RBF(bandwidth)
        cloud = random.normal(random.key(0), (200, number, dimension))
        steepness = measure_steepness(random.key(1), interaction, cloud, jnp.asarray(bandwidth))
        for change in (0.7, 1.0, 2.0):
            step_size = change / steepness
            found = repelled_variance(Underdamped(), interaction, cloud[:32], step_size)
            bias = f"{found.mean() - 1:.3f} ± {found.std() / len(found) ** 0.5:.3f}"
            rows.append((str(number), str(dimension), f"{bandwidth:g}", f"{step_size:.4f}", f"{change:g}", bias))
    header = ("L", "d", "h", "ε", "εs", "relative bias of the variance")
    table("Momenta and RBF repulsion on N(0, I)", header, rows)


def repelled_variance(dynamics, interaction, z, step_size, num_steps=3000):
    """The variance of groups of particles, over time."""
    couple = interaction.couple

    def energy_and_grad(z):
        return jnp.sum(z**2, -1) / 2, z

    @jax.jit
    def run(key):
        def update(cloud, key):
            cloud = dynamics.step(key, cloud, energy_and_grad, couple, step_size)
            return cloud, jnp.mean(cloud.z**2, (1, 2))

        cloud = dynamics.init(key, z, energy_and_grad, couple)
        return lax.scan(update, cloud, random.split(key, num_steps))[1][num_steps // 4 :].mean(0)

    return np.asarray(run(random.key(2)), float)


def thermostats():
    """The tails of a thermostat of few parameters on N(0, I), by its inertia."""
    rows = []
    for dimension in (1, 2, 5):
        for inertia in (1.0, None):
            dynamics, couple = Thermostat(inertia=inertia), Independent().couple

            def energy_and_grad(z):
                return jnp.sum(z**2, -1) / 2, z

            def update(cloud, key, dynamics=dynamics, energy_and_grad=energy_and_grad, couple=couple):
                cloud = dynamics.step(key, cloud, energy_and_grad, couple, 1.0)
                return cloud, (jnp.abs(cloud.z).max(), jnp.mean(cloud.z**2), jnp.mean(cloud.z**4))

            start = dynamics.init(
                random.key(0), random.normal(random.key(1), (1000, dimension)), energy_and_grad, couple
            )
            largest, square, fourth = jax.jit(partial(lax.scan, update))(start, random.split(random.key(2), 4000))[1]
            rows.append(
                (
                    str(dimension),
                    "1" if inertia else "max(1, 10 / d)",
                    f"{largest.max():.1f}",
                    f"{square.mean():.3f}",
                    f"{fourth.mean():.2f}",
                )
            )
    header = ("d", "μ", "farthest of 1,000 particles in 4,000 updates", "E z², 1", "E z⁴, 3")
    table("SGNHT at ε = 1 on N(0, I)", header, rows)


class KineticThermostat(Thermostat):
    """The published form, in which the friction follows the temperature of the momenta."""

    def _excess(self, m, ζ, step_size):
        return (jnp.mean(m**2, -1, keepdims=True) - self.temperature) / self._inertia(m.shape[-1])


def thermostats_with_noise():
    """The variance of positions where gradient noise is large, for the friction that follows it and as published."""
    rows, couple = [], Independent().couple
    for step_size, noise in ((0.6, 2.0), (1.0, 0.5)):
        cells = []
        for dynamics in (Thermostat(), KineticThermostat()):

            def update(cloud, key, dynamics=dynamics, step_size=step_size, noise=noise):
                own, other = random.split(key)

                def noisy(z):
                    return jnp.sum(z**2, -1) / 2, z + noise**0.5 * random.normal(other, z.shape)

                cloud = dynamics.step(own, cloud, noisy, couple, step_size)
                return cloud, jnp.mean(cloud.z**2)

            starts = random.normal(random.key(1), (1000, 20))
            start = dynamics.init(random.key(0), starts, lambda z: (jnp.sum(z**2, -1) / 2, z), couple)
            square = jax.jit(partial(lax.scan, update))(start, random.split(random.key(2), 2000))[1]
            cells.append(f"{square[200:].mean():.3f}")
        rows.append((f"{step_size:g}", f"{noise:g}", *cells))
    table("SGNHT with noise on N(0, I_20)", ("ε", "V", "E z², 1", "the published form"), rows)


def averaged_bias():
    """The bias of averaged noise in units of (ελ)², with λ the curvature that nine draws in ten stay below."""
    potentials = {
        "x⁴/4": lambda x: x**4 / 4,
        "log cosh x": lambda x: jnp.logaddexp(x, -x),
        "Student, 5 degrees of freedom": lambda x: 3 * jnp.log1p(x**2 / 5),
        "Gumbel": lambda x: x + jnp.exp(-x),
    }
    rows = []
    for name, potential in potentials.items():
        grid = np.linspace(-30.0, 30.0, 100_001)
        weight = np.exp(-np.asarray(jax.vmap(potential)(grid), float))
        weight /= weight.sum()
        center = weight @ grid
        variance = weight @ (grid - center) ** 2
        curvature = np.abs(np.asarray(jax.vmap(jax.grad(jax.grad(potential)))(grid), float))
        order = np.argsort(curvature)
        λ = curvature[order][np.searchsorted(np.cumsum(weight[order]), 0.9)]
        kernel = SGLD(potential_fn=lambda z, U=potential: U(z[0]), step_size=0.5 / λ, interaction=Independent())
        mcmc = MCMC(kernel, num_warmup=100, num_samples=2000, num_chains=2000, chain_method="vectorized")
        starts = np.random.default_rng(0).choice(grid, size=(2000, 1), p=weight)
        mcmc.run(random.key(0), init_params=jnp.asarray(starts, jnp.float32))
        z = np.asarray(mcmc.get_samples(group_by_chain=True), float)
        inflations = ((z - center) ** 2).mean((1, 2)) / variance - 1
        mean, error = (f(inflations) / 0.25 for f in (np.mean, lambda x: np.std(x) / len(x) ** 0.5))
        rows.append([name, f"{λ:.2f}", f"{mean:.3f} ± {error:.3f}"])
    header = ["U", "λ", "inflation of the variance / (ελ)²"]
    table("Averaged noise in one dimension, ελ = 1/2", header, rows)


def apart_with_momenta():
    """The variance on N(0, I₅) of a graph Laplacian with momenta: the figures of Laplacian's docstring."""
    target = partial(gaussian, jnp.zeros(5))
    rows = []
    for step_size in (0.01, 0.005):
        kernel = SGHMCR(target, step_size=step_size, interaction=Laplacian())
        squares = np.mean(draws(kernel, num_samples=round(100 / step_size)) ** 2, (1, 2))
        rows.append([f"{step_size:g}", f"{squares.mean():.3f} ± {squares.std() / PARTICLES**0.5:.3f}"])
    table("Variance on N(0, I₅) of SGHMCR with Laplacian(), which is 1", ["ε", "variance"], rows)


def two_modes(y):
    theta = numpyro.sample("theta", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(theta**2, 1), obs=y[i])


def far_modes():
    """Variances of minibatch gradients in two modes, with references here and there."""
    target = ModelTarget(two_modes, (4.0 + random.normal(random.key(1), (2000,)),), {})
    σ = 0.0056

    def unravel(flat):
        return {"theta": flat[0]}

    def variance(position, reference=None):
        z = jnp.full((1, 4000, 1), position)
        if reference is None:
            _, gradient = Subsampled().energy_and_grad(random.key(2), target, unravel, z)
        else:
            reference = Reference.none(1, z.dtype, order=1)._replace(position=jnp.array([reference]))
            reference = evaluate_reference(random.key(0), target, unravel, reference, 100)
            _, gradient = ControlVariates().energy_and_grad(random.key(2), target, unravel, z, reference)
        return f"{float(jnp.var(gradient)):.3g}"

    rows = [
        ["plain", variance(2.0), variance(-2.0)],
        ["a common reference between the modes", variance(2.0, 0.0), variance(-2.0, 0.0)],
        ["a common reference in the first mode, σ away", variance(2.0 + σ, 2.0), variance(-2.0, 2.0)],
        ["each particle's own, σ away", variance(2.0 + σ, 2.0), variance(-2.0 + σ, -2.0)],
        ["each particle's own, 3σ away", variance(2.0 + 3 * σ, 2.0), variance(-2.0 + 3 * σ, -2.0)],
    ]
    table("Variances of gradients, y ~ N(θ², 1), 20 of 2,000 rows", ["", "first mode", "second mode"], rows)


def opposed_noise():
    """ESS of averages by the kind of noise: numbers of Antithetic's docstring, and the table of the note on noise."""
    functions = {
        "E z": lambda z: z,
        "E z²": lambda z: z**2,
        "P(z > 1.5)": lambda z: (z > 1.5).astype(z.dtype),
        "E z₁z₂": lambda z: z * jnp.roll(z, 1, -1),
    }
    energy_and_grad = jnp.vectorize(
        jax.value_and_grad(lambda z: jnp.sum(z**2 / 2 + z**4 / 80)), signature="(d)->(),(d)"
    )
    dynamics = Overdamped("lm")

    def runs(interaction, step_size, runs=400, skipped=200, updates=500):
        """Averages of each run, and the variance of a draw."""

        @jax.jit
        def run(key):
            start_key, init_key, key = random.split(key, 3)
            z = random.normal(start_key, (runs, PARTICLES, 3))
            cloud = dynamics.init(init_key, z, energy_and_grad, interaction.couple)

            def update(cloud, key):
                cloud = dynamics.step(key, cloud, energy_and_grad, interaction.couple, step_size)
                return cloud, [(f(cloud.z).mean(1), f(cloud.z).var((0, 1))) for f in functions.values()]

            _, found = lax.scan(update, cloud, random.split(key, skipped + updates))
            return [(mean[skipped:].mean(0), variance[skipped:].mean(0)) for mean, variance in found]

        return run(random.key(7))

    rows = []
    for step_size in (0.03, 0.1, 0.3):
        found = [runs(interaction, step_size) for interaction in (Independent(), Balanced(), Antithetic())]
        for k, name in enumerate(functions):
            ess = (float((each[k][1] / each[k][0].var(0)).mean()) for each in found)
            rows.append([f"ε = {step_size}, {name}", *(f"{x:,.0f}" for x in ess)])
    table(
        "ESS of averages of 20 particles over 500 updates",
        ["", "independent", "zero-sum", "antithetic"],
        rows,
    )


def chunks():
    """Memory and time of updates of 20 convolutional networks, with all particles at a time and fewer."""
    x = random.normal(random.key(0), (5000, 28, 28, 1))
    y = random.randint(random.key(1), (5000,), 0, 10)

    def network(x, y):
        shapes = {"first": (3, 3, 1, 16), "second": (3, 3, 16, 16), "last": (784, 10)}
        weights = {
            name: numpyro.sample(name, dist.Normal(0, np.prod(shape[:-1]) ** -0.5).expand(shape).to_event())
            for name, shape in shapes.items()
        }
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            h = x[i]
            for name in ("first", "second"):
                h = jax.nn.relu(
                    lax.conv_general_dilated(
                        h, weights[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                    )
                )
            numpyro.sample("y", dist.Categorical(logits=h.reshape(100, -1) @ weights["last"]), obs=y[i])

    programs = {}
    for size in (None, 5, 1):
        gradient = Subsampled(chunk_size=size)
        kernel = SGLD(network, step_size=1e-5, preconditioner=None, gradient=gradient)
        programs[str(size)] = through_mcmc(kernel, 10, PARTICLES)
    seconds = in_turns(programs, (x, y), 3)
    rows = []
    for size, program in programs.items():
        memory = program.lower(random.key(0), x, y).compile().memory_analysis().temp_size_in_bytes
        rows.append([size, f"{memory / 1e6:.0f}", f"{np.median(seconds[size]) / 10:.2f}"])
    table("Updates of 20 convolutional networks", ["chunk_size", "MB", "seconds of an update"], rows)


if __name__ == "__main__":
    jnp.set_printoptions(precision=3)
    chunks()
    stationary_variance()
    whose_minibatch()
    balanced_noise()
    averaged_noise()
    momenta()
    dense_clouds()
    dense_clouds_with_momenta()
    thermostats()
    thermostats_with_noise()
    averaged_bias()
    apart_with_momenta()
    far_modes()
    opposed_noise()
