"""Bugs put in by hand, and whether the quick tests see them: ``python tests/mutants.py``.

Each is one line of the package made wrong, in a temporary copy of it; of the tests that should see it, those with a
word in their name run first, and the files as a whole where these pass. What is printed last is the test that failed;
where none did, one is missing. Not collected by pytest, for it takes an hour; to run some of them, name them::

    python tests/mutants.py "sign of Γ" "lost key"     # all whose name has one of these in it
    python tests/mutants.py --tests ../other/tests     # by the tests of another checkout
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: What the tests read beside the package and themselves.
NEEDED = ("pyproject.toml", "README.md", "docs", "examples", "CHANGELOG.md", "Makefile", "LICENSE", "CITATION.cff")


class Mutant(NamedTuple):
    """A bug: what is replaced in which file, the tests that should see it, and a word for those that come first."""

    name: str
    file: str
    tests: str
    first: str
    old: str
    new: str


def parsed(text):
    """The bugs of a text in which a line names each, with its fields, above what goes (-) and what comes (+)."""
    for block in text.strip().split("\n\n"):
        head, *lines = block.split("\n")
        parts = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        yield Mutant(*head.split(" | "), *parts)


MUTANTS = list(
    parsed(r"""
known noise added to all of the injected noise | kernels/iteration.py | test_known_noise | inject
-return coupling if heat is None or not coupling.is_identity else coupling.with_less_noise(heat, u)
+return coupling

known noise of momenta without their half steps | dynamics/underdamped.py | test_known_noise | variances
-return step_size**2 * noise / (4.0 * self.temperature) / xp.tanh(self.friction * step_size / 2.0)
+return step_size * noise / (2.0 * self.temperature * self.friction)

products as accelerators round them | rounding.py | test_rounding | iteration
-return jnp.matmul(a, b, precision=FULL) if
+return jnp.matmul(a, b) if

derivatives as accelerators round them | gradients/minibatch.py | test_rounding | own_rule
-    @unrounded()
-    def _evaluate(
+    def _evaluate(

functions of draws as accelerators round them | inference_data/rows.py | test_rounding | draws
-of_chunk = compiled(lambda target, draws: jax.vmap(partial(fn, target))(draws), target)
+of_chunk = jax.jit(jax.vmap(partial(fn, target)))

models as accelerators round them | gradients/target.py | test_rounding | functions
-    @unrounded()
-    def program(
+    def program(

sign of Γ | interactions/radial.py | test_interactions | repels or divergence
-return gram, weight.sum(1, keepdims=True) * x - matmul(weight, x)
+return gram, matmul(weight, x) - weight.sum(1, keepdims=True) * x

Γ without the derivative of K_ii | interactions/base.py | test_interactions | divergence
-return through_second + jax.grad(k, 0)(x, x)
+return through_second

half of Γ for the Laplacian | interactions/radial.py | test_interactions | divergence
-affinity, -2.0 * self.strength * repulsion
+affinity, -1.0 * self.strength * repulsion

nugget in the noise and not in the drift | interactions/base.py | test_interactions | applies
-apply=lambda x: matmul(gram, x),
+apply=lambda x: gram @ x - self.nugget * x,

Γ that does not follow the schedule | interactions/redrawn.py | test_redrawn | between
-            repulsion=w * coupling.repulsion,
+            repulsion=coupling.repulsion,

balanced noise without its scale | interactions/balanced.py | test_interactions | balanced
-return (size / (size - 1)) ** 0.5 * (noise
+return 1.0 * (noise

random features with the weight for its root | interactions/redrawn.py | test_interactions | noise
-own + weight**0.5 * matmul(Φ, common)
+own + weight * matmul(Φ, common)

median rule without log L | interactions/radial.py | test_interactions | median
-h = jnp.median(pairs) / jnp.log(jnp.asarray(float(size), u.dtype))
+h = jnp.median(pairs)

a lost key split: minibatch and noise from one key | kernels/iteration.py | test_dynamics | key or hand
-random.split(key) if self.plan.is_noisy else (key, key)
+(key, key)

the same key in every update | kernels/iteration.py | test_dynamics | key or hand
-now, keys[1 + splits_jump_key :])
+now, keys[jnp.full(self.num_steps, 1 + splits_jump_key)])

temperature forgotten in front of Γ | dynamics/base.py | test_recipe | drift
-(repulsion if temperature == 1.0 else temperature * repulsion)
+repulsion

averaged noise that carries the old half on | dynamics/overdamped.py | test_dynamics | averaged
-(drawn + memory[0]) / 2, (drawn,)
+(drawn + memory[0]) / 2, memory

the last half kick of BAOAB forgotten | dynamics/underdamped.py | test_dynamics | order or splitting
-return Cloud(z, energy, gradient, (m - step_size / 2 * gradient,))
+return Cloud(z, energy, gradient, (m,))

a thermostat that sums where it should average | dynamics/underdamped.py | test_recipe test_dynamics | thermostat
-square = jnp.mean(m**2, -1, keepdims=True)
+square = jnp.sum(m**2, -1, keepdims=True)

a thermostat of the momenta | dynamics/underdamped.py | test_dynamics | thermostat
-share = (1.0 - 1.0 / jnp.cosh(step_size * ζ)) / 2.0
+share = 0.0 * ζ

a whole kick before friction | dynamics/underdamped.py | test_step_size | first_order
-m + kick, step_size) + kick
+m + 2 * kick, step_size)

particles that are not finite are not held | dynamics/base.py | test_dynamics | hold
-return select(finite, proposal, cloud), ~finite
+return proposal, ~finite

N/B forgotten for enumerated sites | gradients/posterior.py | test_enumeration | minibatch
-energy = energy - weight * log_density(
+energy = energy - log_density(

N/B forgotten for the last piece of a pass over all rows | gradients/control.py | test_control | pass
-math.prod(count / target.plates[name][0] for name, (_, count) in combination)
+math.prod(length[name] / target.plates[name][0] for name, _ in combination)

the last row of a minibatch never | gradients/minibatch.py | test_gradients | rows or minibatch or indices
-integers_below(plate_key, (*shape, count), size)
+integers_below(plate_key, (*shape, count), size - 1)

particles in the neck of many effects send for all others | warmup/arrival.py | warmup/test_many_effects | neck
-    energy = energy - sampler.log_volume_gained(warmup, cloud.z)
+    energy = energy + sampler.log_volume_gained(warmup, cloud.z)

steps of Adam that grow with a gradient of a few updates | warmup/adam.py | warmup/test_adam | effects
-    goes_on = jnp.sign(direction) * course > ADAM.course
+    goes_on = jnp.abs(direction) > ADAM.course

control variates in a centering without its volume | gradients/control.py | test_control | centering
-return energy - volume, pull((gradient, -jnp.ones_like(volume)))[0]
+return energy, pull((gradient, jnp.zeros_like(volume)))[0]

clipped gradients of updates that are turned back count | kernels/iteration.py | test_warmup | cut_off
-jnp.where(is_rejected | turns, 0.0, cut_off[-1])
+jnp.where(is_rejected, 0.0, cut_off[-1])

no early Hessian where noise is extreme | warmup/step_size.py | test_step_size | hessian
-return is_measured and bool(
+return False and bool(

momenta never turn back with minibatches | kernels/iteration.py | test_turning | minibatches
-if not self.plan.is_noisy or has_hessian:
+if not self.plan.is_noisy:

the shift of a scale without the information on it | report.py | test_groups | many
-np.abs(excess) / np.sqrt(information))
+np.sum(1.0 - shares) / information)

control variates without the slope at the reference | gradients/control.py | test_control | enumeration or energy
-known = reference.potential_energy + jnp.sum(reference.gradient * offset, -1)
+known = reference.potential_energy

references a whole iteration too old: an off-by-one in epochs | kernels/iteration.py | test_svrg | epoch
-due = is_stale | (reference.age >= self.plan.epoch)
+due = is_stale | (reference.age > self.plan.epoch)

references of other data kept | kernels/iteration.py | test_svrg | other_data
-is_stale = ~reference.posterior_id.any() | is_other
+is_stale = ~reference.posterior_id.any()

a bandwidth that follows the cloud while the step settles | kernels/warmup_programs.py | test_kernels test_bandwidth | freezes or tuned or bandwidth
-lax.cond(window.is_adapting, rule, lambda _: warmup.bandwidth, cloud.z)
+rule(cloud.z)

scales not frozen for the last part of warmup | warmup/scales.py | test_kernels | freezes
-if plan.kind is None or not window.is_adapting:
+if plan.kind is None:

a learner that sees the wrong window: from its beginning on | warmup/windows.py | test_windows test_warmup | groups_share or windows
-(0.5 if ends <= ARRIVED else 0.25)
+(0.5 if ends <= ARRIVED else 0.0)

windows that end an iteration late | warmup/windows.py | test_windows | windows or warmup_ends
-return iteration in map(self.at, ENDS)
+return iteration - 1 in map(self.at, ENDS)

merged moments without the weight of the first batch | warmup/preconditioner.py | test_preconditioner | moments
-weight = self.number * added / count
+weight = added

S for Sᵀ in the gradient of whitened coordinates | warmup/preconditioner.py | test_kernels test_preconditioner | preconditioner or coordinates
-self._stretch(gradient * self.scale) if self.scale.ndim == 1 else matmul(gradient, self.scale)
+self._stretch(gradient * self.scale) if self.scale.ndim == 1 else matmul(gradient, self.scale.T)

jumps that forget the way back | moves.py | test_moves | exact
-/ temperature + proposal.log_ratio
+/ temperature

an off-by-one in the draws of a run in pieces that thins | checkpointing/run.py | test_checkpointing | pieces or run
-row = (i - offset) // thinning
+row = (i + 1 - offset) // thinning

both states of a run in pieces in one slot | checkpointing/directory.py | test_checkpointing | death or torn or dies
-cannot be saved", after))
-        self._next_slot = 1 - self._next_slot
+cannot be saved", after))

standard errors of ensembles without the number of ensembles | diagnostics/ensembles.py | test_diagnostics | ensembles or standard_errors
-variance = (within + between) / freedom / (groups * number)
+variance = (within + between) / freedom / number

log likelihood on the first minibatch alone | inference_data/rows.py | test_from_model test_inference_data test_gradients | rows
-msg["value"] = jnp.arange(size)
+msg["value"] = jnp.arange(size) % msg["args"][1]

groups that are never drawn anew | interactions/redrawn.py | test_redrawn | anew
-return self.interaction.learn_bandwidth(self._split(u, self._order(u)))
-
+return self.interaction.learn_bandwidth(self._split(u, self._order(u)))
+
+    at = Interaction.at
+

carried noise kept by particles that have jumped | dynamics/overdamped.py | test_dynamics test_moves test_basins | exact or noise or jump
-jnp.where(which[..., None], 0.0, x) for x in cloud.memory
+x for x in cloud.memory

half of the budget of bias | dynamics/step_error.py | test_step_size test_kernels | step_size or budget
-xp.minimum(2.0 * tolerance / (1.0 + tolerance) / xp.mean
+xp.minimum(tolerance / (1.0 + tolerance) / xp.mean

Stein discrepancies with the wrong sign of a kernel's slope | diagnostics/stein.py | test_stein | discrepancy
-* k + slope * jnp.sum(gap * (s - si), -1) + trace
+* k - slope * jnp.sum(gap * (s - si), -1) + trace

large arguments that are constants of loops | kernels/bound.py | test_bound | constants
-self._with(lax.optimization_barrier(large))
+self._with(large)

models that need values do not get them | kernels/bound.py | test_bound | values
-            return True
-        return False
+            return False
+        return False
""")  # noqa: E501
)


def broken(mutant):
    """The text of the file that a bug breaks, with the bug."""
    text = (ROOT / "numpyro_repulsion" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: not once in {mutant.file}; bring it up to date")
    return text.replace(mutant.old, mutant.new)


def copied(folder, tests):
    """A copy of the checkout to break, with these tests."""
    for name in NEEDED:
        source = ROOT / name
        if source.exists():
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    shutil.copytree(ROOT / "numpyro_repulsion", folder / "numpyro_repulsion")
    shutil.copytree(tests, folder / "tests")


def failing(folder, files, *options):
    """What failed first in some files of tests, or an empty string."""
    environment = os.environ | {"PYTHONPATH": str(folder), "MPLBACKEND": "Agg"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *options, *files]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if process.returncode in (0, 5):  # passed, or none of that name
        return ""
    said = [line for line in process.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return said[0].split(" - ")[0] if said else process.stdout[-300:]


def try_out(mutant, tests):
    """Which tests see a bug."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder, tests)
        text = broken(mutant)
        (folder / "numpyro_repulsion" / mutant.file).write_text(text)
        found = [next((folder / "tests").rglob(f"{file}.py")) for file in mutant.tests.split()]
        return failing(folder, map(str, found), "-k", mutant.first) or failing(folder, map(str, found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all of them by default")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    arguments = parser.parse_args()
    missed = 0
    for mutant in MUTANTS:
        if arguments.names and not any(name in mutant.name for name in arguments.names):
            continue
        began = time.monotonic()
        seen = try_out(mutant, arguments.tests)
        missed += not seen
        print(f"{'caught' if seen else 'NOT CAUGHT':10}  {mutant.name}  [{time.monotonic() - began:.0f} s]  {seen}")
        sys.stdout.flush()
    return missed


if __name__ == "__main__":
    sys.exit(main())
