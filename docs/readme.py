"""Runs the example of README, and the same model by NUTS, and prints the seconds of both.

NUTS has four vectorized chains, all rows in each gradient, and ``LIMIT`` seconds. Both start in a process of their own
with nothing compiled.

    python docs/readme.py
"""

from pathlib import Path
import re
import subprocess
import sys

README = Path(__file__).parents[1] / "README.md"
LIMIT = 300
CLOCK = "from time import perf_counter\n"
OURS = """
print(f"SGLD, 20 particles, {mcmc.num_warmup} + {mcmc.num_samples} iterations: {perf_counter() - began:.0f} s")
table = summary(mcmc)
print(table.describe().loc[["min", "max"]].to_string())
"""
NUTS = """
import arviz, jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer import NUTS
began = perf_counter()
mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=300, num_chains=4, chain_method="vectorized", progress_bar=False)
mcmc.run(random.key(0), *map(jnp.asarray, (x, group, y)), extra_fields=("num_steps",))
jax.block_until_ready(mcmc.get_samples())
print(f"NUTS, 4 chains of 300 + 300 iterations: {perf_counter() - began:.0f} s")
print(f"{mcmc.get_extra_fields()['num_steps'].mean():.0f} gradients per draw")
table = arviz.summary(arviz.from_numpyro(mcmc), var_names=["slope", "scale", "effect"])
print(table.head(6).to_string())
print(table.describe().loc[["min", "max"]].to_string())
"""


def code():
    """The only Python block of README."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return block


def main():
    example = code()
    model, run = example.split("mcmc = ", maxsplit=1)
    ours = CLOCK + model + "began = perf_counter()\nmcmc = " + run + OURS
    theirs = CLOCK + model.replace(", subsample_size=200", "").replace("[i]", "") + NUTS
    for program, limit in ((ours, None), (theirs, LIMIT)):
        try:
            subprocess.run([sys.executable, "-c", program], check=True, timeout=limit)
        except subprocess.TimeoutExpired:
            print(f"did not end within {limit} s")


if __name__ == "__main__":
    main()
