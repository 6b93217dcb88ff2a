"""Names of array shapes for annotations. Only the tests need jaxtyping, which checks them.

Within one call, an axis of the same name has the same length wherever it occurs, and ``*particles`` stands for the
axes of a cloud: ``(G, L)`` in the kernels, ``(L,)`` or any others where a part is called by itself. Numbers are of
single or double precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

__all__ = [
    "Columns",
    "Count",
    "Counts",
    "Directions",
    "Flag",
    "Flags",
    "Group",
    "List",
    "Matrix",
    "Memory",
    "Number",
    "Numbers",
    "OtherVector",
    "Pair",
    "Pairs",
    "ReferenceNumbers",
    "ReferenceVectors",
    "RowNumbers",
    "Scale",
    "Scalar",
    "Table",
    "Vector",
    "Vectors",
    "Words",
]

if TYPE_CHECKING:
    from typing import Annotated as Bool, Annotated as Float, Annotated as Integer, Annotated as Shaped
else:
    try:
        from jaxtyping import Bool, Float, Integer, Shaped
    except ImportError:

        class Unchecked:
            """Any array, where nothing can check shapes."""

            def __class_getitem__(cls, item):
                return jax.Array

        Bool = Float = Integer = Shaped = Unchecked

#: A vector for each particle: positions, gradients, momenta, noise.
Vectors = Float[jax.Array, "*particles d"]
#: The same with any number of entries.
Columns = Float[jax.Array, "*particles k"]
#: A number for each particle: energies, step sizes.
Numbers = Float[jax.Array, "*particles"]
#: A yes or no for each particle.
Flags = Bool[jax.Array, "*particles"]
#: The memory of each particle: any number of values of any type.
Memory = Shaped[jax.Array, "*particles _"]
#: The vectors of all particles in one list.
List = Float[jax.Array, "n d"]
#: A vector for each particle of one group, ...
Group = Float[jax.Array, "L d"]
#: ... and a number for each pair of them.
Pairs = Float[jax.Array, "L L"]
#: One vector: a position, a direction, something for each coordinate.
Vector = Float[jax.Array, "d"]
#: A number for each pair of coordinates.
Matrix = Float[jax.Array, "d d"]
#: A number for each coordinate, or each pair of them.
Scale = Vector | Matrix
#: The same as `Vectors` and `Numbers` for reference points, of which there may be one for all particles.
ReferenceVectors = Float[jax.Array, "*references d"]
ReferenceNumbers = Float[jax.Array, "*references"]
#: The numbers of rows in minibatches; plates differ in the number of rows.
RowNumbers = Integer[jax.Array, "... _"]
#: Some directions, one in each column.
Directions = Float[jax.Array, "d k"]
#: One number per item that is neither a coordinate nor a particle, ...
OtherVector = Float[jax.Array, "_"]
#: ... or for each of two cases.
Pair = Float[jax.Array, "2"]
#: Numbers in two axes that occur nowhere else.
Table = Float[jax.Array, "_ _"]
Scalar = Float[jax.Array, ""]
#: A scalar that need not be an array.
Number = Scalar | float
Count = Integer[jax.Array, ""]
#: Counts or indices, in any axes.
Counts = Integer[jax.Array, "..."]
Flag = Bool[jax.Array, ""]
#: A digest.
Words = Integer[jax.Array, "4"]
