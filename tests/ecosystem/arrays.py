"""Kernels of plain JAX: what a function of arrays may contain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

from tests.ecosystem.program import BOTH, Setup, draw, draw_key, normal, program


@program("whole", "partial")
def elementwise_chain() -> Setup:
    def run(x, scale):
        y = jnp.tanh(x) * scale + jnp.exp(-jnp.abs(x))
        return jnp.where(y > 0.5, y, jax.nn.gelu(y)), y.sum()

    return Setup(run, lambda rng: (draw(rng, 8, 5), float(rng.uniform())))


@program()
def causal_attention() -> Setup:
    def run(x):
        q, k, v = jnp.split(x @ normal(8, 24), 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / np.sqrt(8)
        mask = jnp.tril(jnp.ones((6, 6), bool))
        return jax.nn.softmax(jnp.where(mask, scores, -1e30)) @ v

    return Setup(run, lambda rng: (draw(rng, 2, 6, 8),))


@program()
def dot_product_attention() -> Setup:
    def run(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return Setup(run, lambda rng: tuple(draw(rng, 1, 5, 2, 4) for _ in range(3)))


@program()
def convolution() -> Setup:
    def run(image):
        y = lax.conv_general_dilated(
            image, normal(3, 3, 2, 4), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return lax.reduce_window(
            jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )

    return Setup(run, lambda rng: (draw(rng, 1, 6, 6, 2),))


@program()
def depthwise_convolution() -> Setup:
    def run(image):
        return lax.conv_general_dilated(
            image,
            normal(3, 3, 1, 4),
            (2, 2),
            "SAME",
            rhs_dilation=(2, 2),
            feature_group_count=4,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    return Setup(run, lambda rng: (draw(rng, 1, 6, 6, 4),))


@program("whole", "partial")
def fft_filter() -> Setup:
    def run(signal):
        spectrum = jnp.fft.rfft(signal)
        return jnp.fft.irfft(jnp.where(jnp.arange(9) < 4, spectrum, 0), 16), jnp.abs(spectrum)

    return Setup(run, lambda rng: (draw(rng, 2, 16),))


@program()
def factorizations() -> Setup:
    def run(a, b):
        spd = a @ a.T + 3 * jnp.eye(4)
        q, r = jnp.linalg.qr(a)
        values, vectors = jnp.linalg.eigh(spd)
        return (
            jnp.linalg.solve(spd, b),
            jnp.linalg.cholesky(spd),
            jnp.linalg.slogdet(spd),
            (q, r, values, vectors, jnp.linalg.svd(a)[1], jnp.linalg.inv(spd)),
        )

    return Setup(run, lambda rng: (draw(rng, 4, 4), draw(rng, 4)))


@program()
def triangular_solve() -> Setup:
    def run(a, b):
        lower = jnp.tril(a) + 2 * jnp.eye(4)
        return jax.scipy.linalg.solve_triangular(lower, b, lower=True)

    return Setup(run, lambda rng: (draw(rng, 4, 4), draw(rng, 4, 2)))


@program()
def sorting() -> Setup:
    def run(x):
        order = jnp.argsort(x, axis=-1)
        best, where = lax.top_k(x, 3)
        return jnp.sort(x), jnp.take_along_axis(x, order, -1), best, where, jnp.median(x, axis=-1)

    return Setup(run, lambda rng: (draw(rng, 3, 9),))


@program()
def cumulative_sums() -> Setup:
    def run(x):
        pairs = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, x + 1))
        return jnp.cumsum(x, axis=0), jnp.cumprod(x, axis=1), lax.cummax(x), pairs

    return Setup(run, lambda rng: (draw(rng, 7, 3),))


@program()
def random_draws() -> Setup:
    def run(key):
        keys = jax.random.split(key, 6)
        return (
            jax.random.normal(keys[0], (5,)),
            jax.random.uniform(keys[1], (5,)),
            jax.random.bernoulli(keys[2], 0.3, (5,)),
            jax.random.categorical(keys[3], jnp.arange(4.0), shape=(5,)),
            jax.random.permutation(keys[4], 6),
            jax.random.truncated_normal(keys[5], -1.0, 1.0, (5,)),
        )

    return Setup(run, lambda rng: (draw_key(rng, "threefry2x32"),))


@program()
def raw_random_keys() -> Setup:
    def run(key, x):
        key, noise = jax.random.split(key)
        return key, x + jax.random.laplace(noise, (4,))

    def make_batch(rng):
        return rng.integers(0, 1 << 32, 2, np.uint32), draw(rng, 4)

    return Setup(run, make_batch)


@program(*BOTH)
def random_gamma() -> Setup:
    def run(key, shape):
        return jax.random.gamma(key, jnp.abs(shape) + 0.5) * 2

    return Setup(run, lambda rng: (draw_key(rng), draw(rng, 3)))


@program(*BOTH)
def random_poisson() -> Setup:
    def run(key, rate):
        return jax.random.poisson(key, jnp.abs(rate) * 3), rate + 1

    return Setup(run, lambda rng: (draw_key(rng, "threefry2x32"), draw(rng, 3)))


@program(*BOTH)
def incomplete_beta() -> Setup:
    def run(a, x):
        return jax.scipy.special.betainc(jnp.abs(a) + 0.5, 1.5, jax.nn.sigmoid(x)) + 1

    return Setup(run, lambda rng: (draw(rng, 4), draw(rng, 4)))


@program()
def special_functions() -> Setup:
    def run(x):
        y = jnp.abs(x) + 0.3
        special = jax.scipy.special
        return (
            special.erf(x),
            special.gammaln(y),
            special.digamma(y),
            special.i0(x),
            special.ndtri(jax.nn.sigmoid(x)),
        )

    return Setup(run, lambda rng: (draw(rng, 6),))


@program()
def sparse_matrix() -> Setup:
    def run(data, x):
        indices = jnp.array([[0, 1], [1, 2], [3, 0], [3, 3]])
        matrix = sparse.BCOO((data, indices), shape=(4, 4))
        return matrix @ x, (matrix.T @ x).sum(), matrix.todense()

    return Setup(run, lambda rng: (draw(rng, 4), draw(rng, 4)))


@program()
def sparse_matrix_as_argument() -> Setup:
    def run(matrix, x):
        return matrix @ x, matrix * 2

    def make_batch(rng):
        indices = jnp.array([[0, 1], [1, 2], [3, 0]])
        return sparse.BCOO((jnp.asarray(draw(rng, 3)), indices), shape=(4, 4)), draw(rng, 4)

    return Setup(run, make_batch)


@program()
def gather_and_scatter() -> Setup:
    def run(x, index):
        y = x.at[index].add(1.0).at[0].set(-1.0).at[index].max(0.25)
        z = lax.dynamic_update_slice(y, jnp.ones((2, 3)), (index[0], 0))
        return jnp.take(z, index, axis=0), lax.dynamic_slice(z, (index[1], 1), (2, 2))

    return Setup(run, lambda rng: (draw(rng, 6, 3), rng.integers(0, 5, 3)))


@program()
def integers_and_bits() -> Setup:
    def run(x, y):
        mixed = (x ^ (y << 3)) | (x >> 2)
        return mixed, lax.population_count(mixed), lax.clz(y), x // (y | 1), x % (y | 1)

    def make_batch(rng):
        return tuple(rng.integers(0, 1 << 31, 5).astype(np.uint32) for _ in range(2))

    return Setup(run, make_batch)


@program()
def small_dtypes() -> Setup:
    def run(x, codes):
        half = x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T
        eighth = x.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        dot = lax.dot(codes, codes.T, preferred_element_type=jnp.int32)
        return half, eighth, dot, x.astype(jnp.float16) * 3

    return Setup(run, lambda rng: (draw(rng, 4, 4), rng.integers(-9, 9, (3, 5)).astype(np.int8)))


@program()
def complex_numbers() -> Setup:
    def run(x):
        z = lax.complex(x, 2 * x)
        return z * jnp.conj(z), jnp.exp(1j * x), jnp.angle(z), jnp.abs(z @ z)

    return Setup(run, lambda rng: (draw(rng, 5),))


@program()
def interpolation_and_histograms() -> Setup:
    def run(x):
        grid = jnp.linspace(-2, 2, 9)
        counts, _ = jnp.histogram(x, grid)
        return (
            jnp.interp(x, grid, grid**2),
            jnp.searchsorted(grid, x),
            counts,
            jnp.digitize(x, grid),
        )

    return Setup(run, lambda rng: (draw(rng, 12),))


@program()
def image_resize() -> Setup:
    def run(image):
        larger = jax.image.resize(image, (1, 8, 8, 2), "bicubic")
        return larger, jax.image.scale_and_translate(
            image, (1, 6, 6, 2), (1, 2), jnp.ones(2), jnp.zeros(2), "linear"
        )

    return Setup(run, lambda rng: (draw(rng, 1, 4, 4, 2),))


@program()
def reductions_with_nan() -> Setup:
    def run(x):
        y = jnp.where(x > 1, jnp.nan, x)
        return jnp.nanmean(y), jnp.nanmax(y, axis=0), jnp.argmax(x), y, jax.nn.logsumexp(x, axis=1)

    return Setup(run, lambda rng: (draw(rng, 4, 5),))


@program()
def unique_with_a_size() -> Setup:
    def run(x):
        values, counts = jnp.unique(x, size=6, fill_value=-1, return_counts=True)
        return values, counts, jnp.nonzero(x > 2, size=5, fill_value=-1)

    return Setup(run, lambda rng: (rng.integers(0, 5, 8),))
