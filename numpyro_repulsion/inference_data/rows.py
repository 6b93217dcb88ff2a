"""What a model says of all its rows: observed values, log likelihoods, deterministic sites, replicates, prior draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
import math
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.distributions import Distribution, ExpandedDistribution, Independent, MaskedDistribution
from numpyro.handlers import substitute
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from numpyro_repulsion.gradients import ModelTarget, Target, compiled, influenced
from numpyro_repulsion.gradients.structure import any_number_of_rows

#: Results of more bytes raise `ValueError`.
MAX_BYTES = 2**31
#: Most draws computed at once.
CHUNK_SIZE = 100


class all_rows(Messenger):
    """Make the subsampled plates of a model take all their rows, in order.

    From a model that subsamples, NumPyro computes results for the few rows that it happens to draw, or scales them up.
    With this handler ``Predictive`` and ``log_likelihood`` see every row once; together with
    ``numpyro.handlers.uncondition`` they draw the observed sites, although the model gets its data. Subsampled plates
    whose rows are already fixed, for example by ``substitute``, do not change.

    :param fn: a model.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import uncondition
        >>> from numpyro.infer import Predictive
        >>> from numpyro_repulsion import all_rows

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", 100, subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jnp.zeros(100)
        >>> Predictive(uncondition(model), num_samples=5)(random.key(0), y)["y"].shape
        (5, 10)
        >>> Predictive(uncondition(all_rows(model)), num_samples=5)(random.key(0), y)["y"].shape
        (5, 100)
    """

    def process_message(self, msg):
        # NumPyro numbers the rows of other plates itself, in a compiled program by unknown numbers.
        if msg["type"] == "plate" and (msg["value"] is None or msg["args"][1] in (None, msg["args"][0])):
            size = msg["args"][0]
            # Known rows let models index NumPy arrays in compiled programs.
            with jax.ensure_compile_time_eval():
                msg["value"] = jnp.arange(size)
            msg["args"] = (size, size)


def in_chunks(
    fn: Callable[[Any, Any], dict], target: Target, draws: Any, what: str, remedy: str, kept: str | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yield what ``fn(target, draw)`` returns, arrays by name, for chunks of draws that fit into memory.

    :param draws: a pytree of arrays with a leading axis.
    :param what: what is computed, and ``remedy`` what to do instead, for the error if what is kept exceeds 2 GiB.
    :param kept: the result that the caller keeps of all draws; ``None`` if it keeps all.
    """
    total = len(jax.tree.leaves(draws)[0])
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), draws)
    program, results = jax.make_jaxpr(partial(fn, target), return_shape=True)(one)
    size = total * sum(_bytes(x) for name, x in results.items() if kept in (None, name))
    if size > MAX_BYTES:
        raise ValueError(f"{what} over all rows would take {size / 2**30:.1f} GiB for {total} draws. {remedy}.")
    # The largest intermediate array of a chunk has at most about 128 MiB, unless a single draw has more.
    chunk = max(1, min(CHUNK_SIZE, 2**27 // _largest(program.jaxpr), total))
    of_chunk = compiled(lambda target, draws: jax.vmap(partial(fn, target))(draws), target)
    for start in range(0, total, chunk):
        # The last chunk ends at the last draw, and the draws that it repeats are dropped, so that one program does all.
        first = min(start, total - chunk)
        found = of_chunk(jax.tree.map(lambda x, first=first: x[first : first + chunk], draws))
        yield {name: np.asarray(value)[start - first :] for name, value in found.items()}


def map_draws(
    fn: Callable[[Any, Any], dict], target: Target, draws: Any, what: str, remedy: str
) -> dict[str, np.ndarray]:
    """Return what ``fn(target, draw)`` returns, arrays by name, for draws ``(chain, draw, ...)``, in the same shape."""
    shape = jax.tree.leaves(draws)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(math.prod(shape), *x.shape[2:]), draws)
    remedy = f"{remedy}, or keep fewer draws (MCMC(..., thinning=...))"
    parts = list(in_chunks(fn, target, flat, what, remedy))
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {name: x.reshape(*shape, *x.shape[1:]) for name, x in found.items()}


def _largest(jaxpr):
    """Return the size in bytes of the largest intermediate array of a program."""
    own = [_bytes(x.aval) for equation in jaxpr.eqns for x in equation.outvars if hasattr(x.aval, "shape")]
    inner = (getattr(value, "jaxpr", value) for equation in jaxpr.eqns for value in equation.params.values())
    return max([1, *own, *(_largest(program) for program in inner if hasattr(program, "eqns"))])


def _bytes(array):
    return int(np.prod(array.shape)) * getattr(array.dtype, "itemsize", 0)


def counting(entries: Mapping, group: dict, lead: int) -> dict:
    """Return a group without hidden entries, the others on one flat axis after ``lead`` leading ones."""
    found = dict(group)
    for name in group.keys() & entries.keys():
        (shape, seen), value = entries[name], np.asarray(group[name])
        end = lead + len(shape)
        if value.shape[lead:end] == shape:
            found[name] = value.reshape(*value.shape[:lead], -1, *value.shape[end:]).take(seen, lead)
    return found


def observe(target: ModelTarget | None) -> tuple[dict, dict, str]:
    """Run the model over all rows; warn of observed sites that are not data.

    :return: what it observes, arrays by name; for sites that a mask hides in part, the shape of the batch and the
        positions in the flattened batch that the mask does not hide; and, if the model cannot run over all rows, why.
    """
    if target is None or not target.observed:
        return {}, {}, ""
    try:
        values, masks = compiled(lambda target: _observed(target.sites({}), target.observed), target)()
        moved = _moved(target)
    except (TypeError, ValueError) as error:
        if not target.plates:
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return {}, {}, f"the model fails when it is given all rows of {sorted(target.plates)} ({why})."
    moved_values, moved_masks = moved
    if transformed := [name for name in values if name in moved_values]:
        warnings.warn(
            f"The values of the observed sites {transformed} depend on latent sites, so they are not data and are left "
            "out of observed_data.",
            stacklevel=3,
        )
    kept = {name: np.asarray(value) for name, value in values.items() if name not in moved_values}
    # A mask that depends on latent sites is part of the model and hides other entries for each draw.
    fixed = {name: mask for name, mask in masks.items() if name in kept and name not in moved_masks}
    return kept, {name: (np.shape(x), np.flatnonzero(x)) for name, x in fixed.items() if not np.all(x)}, ""


def _observed(sites, names):
    """Return the values of observed sites, and the masks of those that have one."""
    values = {name: sites[name]["value"] for name in names}
    masks = {}
    for name in names:
        fn = sites[name]["fn"]
        if (seen := visible(fn, values[name])) is not None:
            events = jnp.shape(values[name])[jnp.ndim(values[name]) - fn.event_dim :]
            masks[name], values[name] = seen, jnp.broadcast_to(values[name], (*seen.shape, *events))
    return values, masks


def visible(fn: Distribution, value: jax.Array | np.ndarray, in_events: bool = False) -> jax.Array | None:
    """Return which entries of an observed site's batch are not hidden by a mask; ``None`` without a mask.

    :param in_events: whether to tell the numbers of an event apart. Otherwise one that is hidden in part counts whole.
    """
    if (mask := _mask(fn)) is None:
        return None
    split, own = jnp.ndim(value) - fn.event_dim, len(fn.batch_shape)
    batch, events = jnp.broadcast_shapes(fn.batch_shape, jnp.shape(value)[:split]), jnp.shape(value)[split:]
    if not in_events:
        return jnp.broadcast_to(mask.any(tuple(range(own, mask.ndim))), batch)
    return jnp.broadcast_to(jnp.expand_dims(mask, range(mask.ndim, own + len(events))), (*batch, *events))


def _mask(fn):
    """Return which entries of a distribution have a density: of its batch, and of the event axes that masks tell apart;
    ``None`` if all have."""
    if not isinstance(fn, MaskedDistribution | ExpandedDistribution | Independent):
        return None
    inner, own = _mask(fn.base_dist), len(fn.base_dist.batch_shape)
    if isinstance(fn, MaskedDistribution):
        mask = jnp.broadcast_to(jnp.asarray(fn._mask), fn.batch_shape)
        return mask if inner is None else jnp.expand_dims(mask, range(own, inner.ndim)) & inner
    if isinstance(fn, ExpandedDistribution) and inner is not None:
        return jnp.broadcast_to(inner, (*fn.batch_shape, *inner.shape[own:]))
    return inner


def _moved(target):
    """Return the observed sites whose values, and those whose masks, depend on latent sites."""
    latent = jax.eval_shape(lambda: {name: target.sites({})[name]["value"] for name in target.latent})
    names: list[list[str]] = []

    def parts(latent):
        values, masks = _observed(target.sites(latent), target.observed)
        names[:] = [list(values), list(masks)]
        return [*values.values(), *masks.values()]

    depends = iter(influenced(parts, latent))
    return [{name for name in group if next(depends)} for group in names]


def pointwise(target: ModelTarget, draws: dict, which: bool | Sequence[str]) -> dict[str, np.ndarray]:
    """Return the log likelihood of every entry of the observed sites over all rows, without subsampling or scaling."""
    if isinstance(which, str) or not (isinstance(which, bool) or all(isinstance(name, str) for name in which)):
        raise TypeError(f"`log_likelihood` must be True, False or a list of names of observed sites; got {which!r}.")
    names = list(target.observed if isinstance(which, bool) else which)
    if unknown := [name for name in names if name not in (*target.observed, *target.factors)]:
        raise ValueError(
            f"`log_likelihood` names {unknown}, which the model does not observe. It observes {target.observed}"
            f"{f', and has the factors {target.factors}' if target.factors else ''}."
        )
    if not names:
        raise ValueError(
            "There is no log likelihood, because the model observes nothing"
            f"{f' but the factors {target.factors}; name those that are likelihoods' if target.factors else ''}."
        )
    if target.discrete:
        raise ValueError(
            f"The discrete latent sites {target.discrete} are summed over, so the draws do not determine the "
            "likelihood of single observations. Leave log_likelihood=False, or marginalize by hand "
            "(numpyro.distributions.MixtureSameFamily)."
        )
    if outside := [name for name in names if name in target.factors and name in target.rows_outside]:
        raise ValueError(
            f"The factors {outside} use rows of subsampled plates outside of these plates, scaled by hand for "
            "minibatches of `subsample_size` rows: over all rows they are not a log likelihood. Put them into the "
            "plates, or leave them out of log_likelihood."
        )
    if (left := [name for name in target.factors if name not in names]) and which is True:
        warnings.warn(
            f"The factors {left} are left out of log_likelihood. Name those that are likelihoods: "
            f"log_likelihood={[*names, *left]}.",
            stacklevel=3,
        )
    scaled: list[str] = []

    def likelihoods(target, values, key=None):
        sites = target.sites(values, key)
        scaled[:] = [name for name in names if _is_weighted(target, name, sites[name]["scale"])]
        return {name: sites[name]["fn"].log_prob(sites[name]["value"]) for name in names}

    # Modules ask for a key too, for initial values that the draws replace.
    first = {name: x[0, 0] for name, x in draws.items()}
    if target.is_random and any(influenced(lambda key: likelihoods(target, first, key), random.key(0))):
        raise ValueError(
            "The likelihood is random (numpyro.prng_key): the log likelihood of a draw is only an estimate, and "
            "importance weights from estimates are wrong. Leave log_likelihood=False."
        )
    what, remedy = f"The log likelihood of {sorted(names)}", "Pass log_likelihood=False or fewer names"
    found = map_draws(likelihoods, target, draws, what, remedy)
    if scaled:
        warnings.warn(
            f"A handler weights the sites {scaled} in the posterior but not in "
            "log_likelihood, so leave-one-out estimates from it are for another posterior.",
            stacklevel=3,
        )
    return found


def _is_weighted(target, name, scale):
    """Return whether a site has a scale beside the factor that makes up for rows left out of a minibatch."""
    if scale is None or isinstance(scale, jax.core.Tracer):
        return scale is not None
    sizes = [target.plates[plate] for plate in target.rows_outside.get(name, ())]
    return not np.allclose(np.asarray(scale) / math.prod(size / batch for size, batch in sizes), 1)


def is_key(name: str, given: Any) -> bool:
    """Return whether the user passed a PRNG key, or else draws by name."""
    if isinstance(given, Mapping):
        return False
    if not isinstance(given, bool) and hasattr(given, "dtype") and is_prng_key(given):
        return True
    raise TypeError(
        f"`{name}` must be a PRNG key such as random.key(1), or draws by name as numpyro.infer.Predictive returns "
        f"them; got {given!r}."
    )


def from_posterior(target: ModelTarget, key: jax.Array, draws: dict) -> dict[str, np.ndarray]:
    """Return one replicate per draw of the observed sites over all rows, and of deterministic sites made from them."""
    _require_drawable(target, "posterior_predictive")
    if target.discrete:
        raise ValueError(
            f"The discrete latent sites {target.discrete} are summed over, and replicates need their values. Pass the "
            "draws of numpyro.infer.Predictive(model, samples, infer_discrete=True) as `posterior_predictive`."
        )
    shape = next(iter(draws.values())).shape[:2]
    numbers = jnp.arange(math.prod(shape)).reshape(shape)
    if target.integrated:
        rows = {name: jnp.arange(size) for name, (size, _) in target.plates.items()}
        key, own_key = random.split(key)

        def latents(target, draw):
            number, values = draw
            return row_latents_of(target, random.fold_in(own_key, number), values, rows)

        what = f"posterior_predictive, with the latent sites {target.integrated} of rows,"
        draws = draws | map_draws(latents, target, (numbers, draws), what, "Leave posterior_predictive=None")
        target = whole(target)
    names = [*target.observed, *_statistics(target)]

    def replicate(target, draw):
        number, values = draw
        sites = target.sites(values, random.fold_in(key, number), observed=False)
        return {name: sites[name]["value"] for name in names}

    what = f"posterior_predictive for {sorted(names)}"
    return map_draws(replicate, target, (numbers, draws), what, "Leave posterior_predictive=None")


def from_prior(target: ModelTarget, key: jax.Array, deterministic: bool) -> tuple[dict, dict]:
    """Return ``(prior, prior_predictive)`` over all rows, of shape ``(1, draw, ...)``."""
    _require_drawable(target, "prior")
    if target.factors:
        warnings.warn(f"Draws from the prior ignore the factors {target.factors}.", stacklevel=3)
    statistics = _statistics(target)
    names = [*target.latent, *target.discrete, *target.deterministic, *(target.minibatched if deterministic else ())]
    predicted = [*target.observed, *statistics]
    both = {*names, *predicted}

    def draw(target, number):
        sites = target.sites({}, random.fold_in(key, number), observed=False)
        return {name: sites[name]["value"] for name in both}

    try:
        what = f"Draws from the prior of {sorted(both)}"
        found = map_draws(draw, target, jnp.arange(1000)[None], what, "Leave prior=None")
    except NotImplementedError as error:
        reason = str(error) or "a site has no sampler"
        raise ValueError(f"The prior of this model cannot be drawn from: {reason}. Leave prior=None.") from error
    return ({name: found[name] for name in names if name not in statistics}, {name: found[name] for name in predicted})


def by_draw(name: str, given: Mapping, shape: tuple[int, ...], is_sampler: bool = True) -> dict[str, np.ndarray]:
    """Return draws that the user passed in, with the leading axes chain and draw; of an optimizer the last ones."""
    found, total = {}, math.prod(shape)
    for site, value in given.items():
        value = np.asarray(value)
        if value.shape[:2] != shape:
            if value.shape[:1] != (total,):
                raise ValueError(
                    f"`{name}` needs one value of '{site}' for each of the {shape[0]} × {shape[1]} draws, of shape "
                    f"({total}, ...) or ({shape[0]}, {shape[1]}, ...); got {value.shape}."
                )
            value = value.reshape(*shape, *value.shape[1:])
        found[site] = value if is_sampler else value[:, -1:]
    return found


def whole(target: ModelTarget) -> ModelTarget:
    """Return a posterior with latent sites in place of what is integrated out, and with all rows."""
    if not target.integrated:
        return target
    found = ModelTarget(all_rows(substitute(target.model.model, data=target.params)), target.args, target.kwargs)
    found.dims, found.events = target.dims | found.dims, target.events | found.events
    return found


def row_latents_of(target: ModelTarget, key: jax.Array, draw: dict, rows: dict) -> dict[str, jax.Array]:
    """Return a draw of the latent sites that are integrated out, for these rows, given the others."""
    other = copy(target)
    other.model = partial(target.model.draw, key)
    with any_number_of_rows():
        return substitute(other.bind(rows, random.key(0)), data=draw)(*target.args, **target.kwargs)


def _require_drawable(target, name):
    sites: dict = {}
    jax.eval_shape(lambda: sites.update(target.sites({})) or 0)
    if inside := [site for site in target.observed if sites[site].get("_control_flow_done")]:
        raise ValueError(
            f"The sites {inside} are observed inside a `scan` or `cond`, where observations cannot be removed. Run "
            f"numpyro.infer.Predictive on the model without observations, and pass its draws as `{name}`."
        )


def _statistics(target):
    """Return the deterministic sites that depend on observed values."""
    names = [*target.deterministic, *target.minibatched]
    if not names or not target.observed:
        return []
    values = jax.eval_shape(lambda: {name: target.sites({})[name]["value"] for name in target.observed})

    def deterministic(values):
        sites = target.sites(values)
        return [sites[name]["value"] for name in names]

    return [name for name, yes in zip(names, influenced(deterministic, values), strict=True) if yes]
