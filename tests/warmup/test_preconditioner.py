"""Scales from moments, against known covariances."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
from models import PRECISION, numbers
import numpy as np
import pytest

from numpyro_repulsion.warmup import Moments, Preconditioner
from numpyro_repulsion.warmup.preconditioner import first_scale


def changes(center):
    """Changes of variables of each kind around a center, with their matrices."""
    diagonal, dense = np.array([2.0, 0.5, 3.0]), np.linalg.cholesky(PRECISION + np.eye(3))
    vectors, stretch = np.linalg.qr(numbers(0, (3, 2)))[0], np.array([4.0, -0.8])
    yield "diagonal", Preconditioner(None, center), np.eye(3)
    yield "diagonal", Preconditioner(diagonal, center), np.diag(diagonal)
    yield "dense", Preconditioner(dense, center), dense
    low_rank = diagonal[:, None] * (np.eye(3) + (vectors * stretch) @ vectors.T)
    yield "low_rank", Preconditioner(diagonal, center, vectors, stretch), low_rank


@pytest.mark.parametrize("center", [None, np.array([1.0, -2.0, 30.0])])
def test_preconditioner_is_a_linear_change_of_variables(center):
    z, gradient = numbers(1, (2, 4, 3)), numbers(2, (2, 4, 3))
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for kind, change, matrix in changes(center):
        change, unit = jax.tree.map(jnp.float32, change), np.linalg.norm(matrix, axis=1)
        assert change.kind == kind
        u, slope = change.whiten(z), change.whiten_gradient(gradient)
        offset = 0.0 if center is None else center
        close(u @ matrix.T, z - offset)
        close(change.to_positions(u), z)
        close(slope, gradient @ matrix)
        close(change.unwhiten_gradient(slope), gradient)
        close(change.lengths(), unit)
        if kind != "diagonal":
            positions, slopes = change.by_coordinate(u, slope)
            close(positions, (z - offset) / unit)
            close(slopes, gradient * unit)


@pytest.mark.parametrize("dense", [False, True])
def test_changes_of_variables_follow_each_other(dense):
    scales = (jnp.array([2.0, 0.5, 3.0]), jnp.array([0.1, 7.0, 1.0]))
    if dense:
        scales = tuple(jnp.linalg.cholesky(PRECISION + jnp.diag(s)) for s in scales)
    first = Preconditioner(scales[0], jnp.array([1.0, -2.0, 30.0]))
    second = Preconditioner(scales[1], jnp.array([0.5, 0.0, -1.0]))
    z = random.normal(random.key(0), (4, 3))
    both = first.compose(second)
    np.testing.assert_allclose(both.whiten(z), second.whiten(first.whiten(z)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        both.whiten_gradient(z), second.whiten_gradient(first.whiten_gradient(z)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dense", [False, True])
def test_moments_are_those_of_all_clouds(dense):
    u = 1000.0 + random.normal(random.key(0), (50, 8, 3))
    gradient = random.normal(random.key(1), (50, 8, 3)) @ PRECISION
    moments = Moments.empty(3, u.dtype, dense)
    for x, g in zip(u, gradient, strict=True):
        moments = moments.add(x, g)
    moments = jax.device_get(moments)
    assert moments.number == 400
    u, gradient = np.asarray(u, float).reshape(-1, 3), np.asarray(gradient, float).reshape(-1, 3)
    for mean, scatter, x in (
        (moments.position, moments.position_scatter, u),
        (moments.gradient, moments.gradient_scatter, gradient),
    ):
        np.testing.assert_allclose(mean, x.mean(0), rtol=1e-5, atol=1e-4)
        covariance = np.cov(x.T, bias=True) if dense else x.var(0)
        np.testing.assert_allclose(scatter / 400, covariance, rtol=1e-3, atol=1e-3)
    largest = np.linalg.eigvalsh(np.cov(u.T, bias=True))[-1] if dense else u.var(0).max()
    assert float(moments.largest_variance()) == pytest.approx(largest, rel=1e-3)


def moments_of(covariance, gradient_covariance, count=1e8, dense=True):
    pick = np.asarray if dense else np.diag
    zero = np.zeros(len(covariance))
    return Moments(np.asarray(count), zero, zero, count * pick(covariance), count * pick(gradient_covariance))


@pytest.mark.parametrize("width", [0.25, 1.0, 4.0])
def test_shape_whitens_a_gaussian_even_if_the_cloud_is_too_wide_or_narrow(width):
    covariance = jnp.linalg.inv(PRECISION + jnp.eye(3))
    scale = moments_of(width * covariance, width * jnp.linalg.inv(covariance)).to_preconditioner(True).scale
    np.testing.assert_allclose(scale @ scale.T, covariance, rtol=2e-3, atol=2e-4)
    diagonal = (
        moments_of(width * covariance, width * jnp.linalg.inv(covariance), dense=False).to_preconditioner(True).scale
    )
    expected = (np.diag(covariance) / np.diag(np.linalg.inv(covariance))) ** 0.25
    np.testing.assert_allclose(diagonal, expected, rtol=1e-4)


def test_shape_makes_covariances_of_positions_and_gradients_equal():
    a, b = PRECISION + jnp.eye(3), jnp.array([[2.0, -1.0, 0.3], [-1.0, 3.0, 0.0], [0.3, 0.0, 0.5]])
    scale = np.asarray(moments_of(a, b).to_preconditioner(True).scale, float)
    inverse = np.linalg.inv(scale)
    np.testing.assert_allclose(
        inverse @ np.asarray(a) @ inverse.T, scale.T @ np.asarray(b) @ scale, rtol=1e-3, atol=1e-3
    )
    assert (np.triu(scale, 1) == 0).all()


def test_few_draws_or_an_early_window_keep_to_the_diagonal():
    covariance = jnp.linalg.inv(PRECISION + jnp.eye(3))
    moments = moments_of(covariance, jnp.linalg.inv(covariance))
    early = np.asarray(moments.to_preconditioner(False).scale)
    np.testing.assert_allclose(early, np.diag(np.diag(early)), atol=1e-6)
    few = np.asarray(moments_of(covariance, jnp.linalg.inv(covariance), count=10.0).to_preconditioner(True).scale)
    many = np.asarray(moments.to_preconditioner(True).scale)
    assert 0 < abs(few[1, 0]) < 0.5 * abs(many[1, 0])


@np.errstate(invalid="ignore", divide="ignore")
def test_shape_of_what_does_not_move_is_left_as_it_was():
    nothing = np.zeros((4, 3), np.float32)
    still = jax.device_get(Moments.empty(3, jnp.float32, True).add(nothing, nothing)).to_preconditioner(True)
    np.testing.assert_array_equal(still.scale, jnp.eye(3))
    flat = jax.device_get(Moments.empty(3, jnp.float32, False).add(numbers(0, (4, 3)), nothing))
    flat = flat.to_preconditioner(True)
    np.testing.assert_array_equal(flat.scale, jnp.ones(3))


def test_first_scales_are_those_of_a_gaussian():
    sd = jnp.array([1e-3, 1.0, 30.0])
    z = sd * random.normal(random.key(0), (2000, 3))
    gradient = z / sd**2
    np.testing.assert_allclose(first_scale(z, gradient, "diagonal").scale, sd, rtol=0.1)
    np.testing.assert_allclose(first_scale(z, gradient.at[:900].set(jnp.inf), "dense").scale, jnp.diag(sd), rtol=0.1)
    one = first_scale(z[:1], jnp.array([[1e3, 0.0, jnp.nan]]), False)
    np.testing.assert_allclose(one.scale, [1e-3, 1.0, 1.0])
    np.testing.assert_array_equal(one.center, z[0])
