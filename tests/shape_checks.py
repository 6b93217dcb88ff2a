"""Checks of annotated shapes while the package runs: what `test_shapes.py` installs before it is imported.

jaxtyping and beartype check the arguments and results of functions with annotations. This adds what they leave out:
the fields of named tuples; methods without annotations, which take those of the method that they override; and
functions that are handed over, such as ``energy_and_grad``, or are fields of what a method returns.
"""

import collections.abc
import functools
import inspect
import types
import typing

from beartype import BeartypeConf, beartype
from beartype.door import is_bearable
import jax
import jaxtyping
import numpy as np

PACKAGE = "numpyro_repulsion"
#: An integer is a float, as for other type checkers.
RULES = BeartypeConf(is_pep484_tower=True)
#: The functions with arrays in their annotations that were called, by their modules and names.
CHECKED = set()


def install():
    """Check all modules of the package that are imported from now on."""
    jaxtyping.install_import_hook(PACKAGE, f"{__name__}.typechecker")


def typechecker(function):
    """Return the function with checks by beartype, and of the fields of named tuples in its arguments and result."""
    for hint in function.__annotations__.values():
        make_checkable(hint)
    mentions_arrays = any("jaxtyping." in repr(expand(hint)) for hint in function.__annotations__.values())
    checked = beartype(function, conf=RULES)
    signature = inspect.signature(function)
    annotated = {
        name for name, hint in function.__annotations__.items() if hint not in (typing.Any, inspect.Parameter.empty)
    }

    @functools.wraps(function)
    def check(*args, **kwargs):
        result = checked(*args, **kwargs)
        if mentions_arrays:
            CHECKED.add(f"{function.__module__}.{function.__qualname__}")
        for name, value in (*signature.bind(*args, **kwargs).arguments.items(), ("return", result)):
            if name in annotated:
                check_fields(value)
        return result

    return check


def expand(hint):
    """Return the types of the fields of a named tuple, or any other annotation as it is."""
    return hints_of(hint) if inspect.isclass(hint) and hasattr(hint, "_fields") else hint


def make_checkable(hint):
    """Let beartype look whether a value has the methods of a protocol."""
    for part in (hint, getattr(hint, "__bound__", None), *typing.get_args(hint)):
        if inspect.isclass(part) and getattr(part, "_is_protocol", False):
            typing.runtime_checkable(part)
        elif part is not hint:
            make_checkable(part)


def is_ours(value):
    return hasattr(value, "_fields") and type(value).__module__.startswith(PACKAGE)


@functools.cache
def hints_of(owner):
    return typing.get_type_hints(owner, include_extras=True)


def check_fields(value):
    """Compare the fields of named tuples, and of named tuples in them, with their annotations."""
    if not isinstance(value, tuple):
        return
    # Copies on the host are of NumPy arrays.
    if is_ours(value) and not all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(value)):
        for name, hint in hints_of(type(value)).items():
            check_value(getattr(value, name), hint, f"{type(value).__name__}.{name}")
    for item in value:
        check_fields(item)


def check_value(value, hint, what):
    if not is_bearable(value, hint, conf=RULES):
        shape = getattr(value, "shape", None)
        raise TypeError(f"{what} is {type(value).__name__} of shape {shape}, which is not {hint}.")


def inherit(cls):
    """Check the methods of a class by the annotations of those that they override."""
    for name, member in list(vars(cls).items()):
        method = inspect.unwrap(member) if inspect.isfunction(member) else None
        if method is None or name.startswith("_"):
            continue
        for base in cls.__mro__:
            inherited = vars(base).get(name)
            if inspect.isfunction(inherited) and inherited.__annotations__:
                known = hints_of(inspect.unwrap(inherited))
                names = {*inspect.signature(method).parameters, "return"}
                method.__annotations__ = {key: hint for key, hint in known.items() if key in names}
                checked = jaxtyping.jaxtyped(method, typechecker=typechecker)
                setattr(cls, name, guarding(checked, method.__annotations__))
                break


def inherit_all(*bases):
    """The same for these classes and all that derive from them."""
    for base in bases:
        inherit(base)
        inherit_all(*base.__subclasses__())


def guarding(function, hints):
    """Return the function with checks of the functions that it is given and returns."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def guard(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        known = [(value, hints[name]) for name, value in bound.arguments.items() if name in hints]
        for name, value in bound.arguments.items():
            bound.arguments[name] = guarded(value, hints.get(name), known)
        return guarded(function(*bound.args, **bound.kwargs), hints.get("return"), known)

    return guard


def guarded(value, hint, known):
    """Return a function with checks, a named tuple whose functions have them, or the value as it is."""
    if is_ours(value):
        return value._replace(
            **{name: guarded(getattr(value, name), of, known) for name, of in hints_of(type(value)).items()}
        )
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for choice in typing.get_args(hint):
            value = guarded(value, choice, known)
        return value
    if typing.get_origin(hint) is not collections.abc.Callable or not callable(value):
        return value
    parameters, returned = typing.get_args(hint)
    if parameters is ...:
        return value

    def checked(*args):
        # In the same context, because axes have the lengths of those in the call that hands the function over.
        with jaxtyping.jaxtyped("context"):
            for other, of in known:
                if not isinstance(of, type) or not issubclass(of, jaxtyping.AbstractArray):
                    check_fields(other)
                else:
                    check_value(other, of, "an argument")
            for arg, of in zip(args, parameters, strict=True):
                check_value(arg, of, "an argument of a function")
        result = value(*args)
        with jaxtyping.jaxtyped("context"):
            for other, of in (*known, *zip(args, parameters, strict=True)):
                # Only to bind the lengths of axes in this context; the values were checked above.
                is_bearable(other, of, conf=RULES)
                check_fields(other)
            check_value(result, returned, "the result of a function")
            check_fields(result)
        return guarded(result, returned, known)

    return checked
