"""Runs the example of README, and the same model by NUTS, and prints the seconds of both.

NUTS has four vectorized chains and all rows in each gradient. Both start in a process of their own with nothing
compiled. Seconds of the processor are printed too, because they change less with other work on the machine; NUTS is
stopped after ``LIMIT`` of them, which are five minutes on two cores.

    python docs/readme.py
"""

from functools import partial
from pathlib import Path
import re
import resource
import subprocess
import sys

README = Path(__file__).parents[1] / "README.md"
LIMIT = 600
CLOCK = """
from time import perf_counter, process_time
def seconds():
    return perf_counter(), process_time()
def report(name):
    passed = [now - then for now, then in zip(seconds(), began)]
    print("{}: {:.0f} s, {:.0f} s of the processor".format(name, *passed), flush=True)
"""
OURS = """
report("SGLD, 20 particles, 500 + 500 iterations, and its summary")
print(summary(mcmc).describe().loc[["min", "max"]].to_string())
"""
NUTS = """
import arviz, jax
import jax.numpy as jnp
from numpyro.infer import NUTS
began = seconds()
mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=300, num_chains=4, chain_method="vectorized", progress_bar=False)
mcmc.run(random.key(0), *map(jnp.asarray, (x, group, y)), extra_fields=("num_steps",))
jax.block_until_ready(mcmc.get_samples())
report("NUTS, 4 chains, 300 + 300 iterations")
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
    ours = CLOCK + model + "began = seconds()\nmcmc = " + run + OURS
    theirs = CLOCK + model.replace(", subsample_size=200", "").replace("[i]", "") + NUTS
    for name, program, limit in (("SGLD", ours, resource.RLIM_INFINITY), ("NUTS", theirs, LIMIT)):
        limited = partial(resource.setrlimit, resource.RLIMIT_CPU, (limit, limit))
        if subprocess.run([sys.executable, "-c", program], preexec_fn=limited).returncode:
            print(f"{name} failed, or did not end within {LIMIT} s of the processor.")


if __name__ == "__main__":
    main()
