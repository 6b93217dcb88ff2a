"""What tests of many rooms run: particles of a kernel, without a bar."""

from numpyro.infer import MCMC


def vectorized(
    kernel, num_warmup=0, num_samples=20, num_chains=6, chain_method="vectorized", progress_bar=False, **settings
):
    """An ``MCMC`` whose chains are particles."""
    settings |= {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    return MCMC(kernel, chain_method=chain_method, progress_bar=progress_bar, **settings)
