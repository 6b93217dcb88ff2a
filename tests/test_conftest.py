"""What all tests share does what it says."""

import os

from conftest import trim
import jax


def test_the_oldest_programs_are_removed_and_what_was_not_written_to_its_end(tmp_path):
    sizes = {"new": 40, "old": 50, "older": 30, "empty": 0}
    for age, (name, size) in enumerate(sizes.items()):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(size * b"x")
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "notes").write_bytes(100 * b"x")

    def left():
        return {path.name.removesuffix("-cache") for path in tmp_path.iterdir()} - {"notes"}

    trim(tmp_path, 1000)
    assert left() == {"new", "old", "older"}
    trim(tmp_path, 100)
    assert left() == {"new", "old"}
    trim(tmp_path, 10)
    assert left() == set()
    trim(tmp_path / "nowhere", 10)


def test_programs_are_kept():
    assert jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert jax.config.jax_persistent_cache_min_compile_time_secs <= 1.0
