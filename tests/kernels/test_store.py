"""Gram matrices on disk: right, resumed after a kill, and never mixed up."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln import _memory
from ntk_ln.kernels import gram, store

X = np.random.default_rng(0).normal(size=(50, 3))
KERNEL = nl.NTK(nl.mlp(1))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "gram"


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_it_is_the_matrix(folder, dtype):
    x = X.astype(dtype)
    stored, whole = nl.stream_gram(KERNEL, x, folder, tile=16), KERNEL(x)
    assert stored.complete
    assert stored.dtype == dtype
    assert stored.shape == (50, 50)
    got = nl.open_gram(folder)
    tol = float(8 * np.finfo(dtype).eps * whole.max())
    np.testing.assert_allclose(got[:], whole, rtol=0, atol=tol)
    np.testing.assert_array_equal(got[:], got[:].T)
    np.testing.assert_array_equal(got[3:40, 17], got[:][3:40, 17])
    np.testing.assert_allclose(got.diag(), KERNEL.diag(x), rtol=8 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(got.diag(), np.diag(got[:]))
    np.testing.assert_array_equal(got.x, x)
    assert got.kernel == KERNEL
    v = np.random.default_rng(1).normal(size=(50, 2))
    np.testing.assert_allclose(got @ v, got[:].astype(np.float64) @ v, rtol=1e-12)
    np.testing.assert_allclose(got @ v[:, 0], (got @ v)[:, 0], rtol=1e-12)
    assert nl.min_eigenvalue(got.operator()).value == pytest.approx(nl.min_eigenvalue(got[:]).value, rel=1e-6, abs=50 * tol)


def test_it_goes_on_where_it_stopped(folder, monkeypatch):
    asked = []
    compute = gram.compute

    def stops(select, network, x1, x2, starts, size):
        for tile, start in zip(compute(select, network, x1, x2, starts, size), starts, strict=True):
            if len(asked) == 4:
                raise KeyboardInterrupt("enough")
            asked.append(start)
            yield tile

    monkeypatch.setattr(gram, "compute", stops)
    with pytest.raises(KeyboardInterrupt, match="enough"):
        nl.stream_gram(KERNEL, X, folder, tile=16)
    begun = nl.open_gram(folder)
    assert not begun.complete
    with pytest.raises(ValueError, match=r"lacks 6 of its 10 tiles\. Call `stream_gram` with the same kernel"):
        begun[:3]
    first, asked[:] = list(asked), []
    monkeypatch.setattr(gram, "compute", lambda *a: (asked.append(s) or t for t, s in zip(compute(*a), a[4], strict=True)))
    stored = nl.stream_gram(KERNEL, X, folder, tile=16)
    assert not set(first) & set(asked)
    assert len(first) + len(asked) == 10
    np.testing.assert_allclose(stored[:], KERNEL(X), rtol=1e-13)
    asked.clear()
    nl.stream_gram(KERNEL, X, folder, tile=16)
    assert not asked


@pytest.mark.slow
def test_killed_at_any_moment(folder):
    program = (
        "import numpy as np, ntk_ln as nl, sys\n"
        "x = np.random.default_rng(0).normal(size=(600, 3))\n"
        "nl.stream_gram(nl.NTK(nl.mlp(1)), x, sys.argv[1], tile=20)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(folder.glob("gram/c/*/*"))) < 40:
        assert process.poll() is None or process.returncode == 0
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    x = np.random.default_rng(0).normal(size=(600, 3))
    there = {path: path.stat().st_mtime_ns for path in folder.glob("gram/c/*/*") if path.suffix != ".partial"}
    stored = nl.stream_gram(KERNEL, x, folder, tile=20)
    np.testing.assert_allclose(stored[:], KERNEL(x), rtol=1e-12)
    rewritten = [path for path, written in there.items() if path.stat().st_mtime_ns != written]
    assert len(rewritten) <= 1  # a mirror whose tile was not there yet


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": X[::-1]}, "has other inputs"),
        ({"x": X.astype(np.float32)}, "has other inputs"),
        ({"kernel": nl.NNGP(nl.mlp(1))}, "has other kernel"),
        ({"kernel": nl.NTK(nl.mlp(1, b_std=0.2))}, "has other network"),
        ({"tile": 17}, "has other tile"),
    ],
)
def test_another_job_is_refused(folder, change, says):
    job = {"kernel": KERNEL, "x": X, "tile": 16}
    nl.stream_gram(**job, store=folder)
    with pytest.raises(ValueError, match=says):
        nl.stream_gram(**(job | change), store=folder)


@pytest.mark.slow
def test_functions_of_your_own_are_told_apart_by_their_values(folder):
    def net(c):
        return nl.NTK(nl.Network(nl.Dense(), nl.Activation(lambda x: np.float64(c) * x), nl.Dense()))

    x = X[:4]
    stored = nl.stream_gram(net(1.0), x, folder)
    assert nl.open_gram(folder).kernel is None
    with pytest.raises(ValueError, match="has other sample"):
        nl.stream_gram(net(2.0), x, folder)
    np.testing.assert_allclose(stored[:], 2 * x @ x.T / 3, rtol=1e-9, atol=1e-9)


def test_a_damaged_tile_is_seen(folder):
    nl.stream_gram(KERNEL, X, folder, tile=16)
    path = folder / "gram/c/0/1"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    for read in (lambda g: g[:], lambda g: g @ np.ones(50)):
        with pytest.raises(ValueError, match=r"has damaged tiles \(.*checksum.*\)\. Delete .*gram/c/0/1 and call `stream_gram`"):
            read(nl.open_gram(folder))
    path.unlink()
    np.testing.assert_allclose(nl.stream_gram(KERNEL, X, folder, tile=16)[:], KERNEL(X), rtol=1e-13)


@pytest.mark.parametrize("rest", [0, 100])
def test_a_tile_that_is_not_whole_is_computed_again(folder, rest):
    nl.stream_gram(KERNEL, X, folder, tile=16)
    path = folder / "gram/c/2/1"
    path.write_bytes(path.read_bytes()[:rest])
    assert not nl.open_gram(folder).complete
    np.testing.assert_allclose(nl.stream_gram(KERNEL, X, folder, tile=16)[:], KERNEL(X), rtol=1e-13)


def test_what_a_process_killed_at_the_start_left_is_no_obstacle(folder):
    folder.mkdir()
    for name in ("zarr.0123.partial", ".lock"):
        (folder / name).touch()
    assert nl.stream_gram(KERNEL, X, folder).complete
    assert not (folder / ".lock").exists()


def test_processes_that_begin_at_once(folder):
    with ThreadPoolExecutor(4) as pool:
        grams = list(pool.map(lambda _: nl.stream_gram(KERNEL, X, folder, tile=16)[:], range(4)))
    for found in grams:
        np.testing.assert_allclose(found, KERNEL(X), rtol=1e-13)


def test_tiles_are_no_larger_than_the_matrix_and_fit_in_memory(folder, monkeypatch):
    assert nl.stream_gram(KERNEL, X, folder, tile=6000).tile == 50
    monkeypatch.setattr(_memory, "available", lambda: 1e3)
    with pytest.raises(MemoryError, match=r"`stream_gram.* are free\. Give a smaller tile\."):
        nl.stream_gram(KERNEL, X, folder, tile=6000)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda f: nl.stream_gram(nl.mlp(1), X, f), TypeError, r"needs a kernel such as `NTK\(net\)`\. Got Network"),
        (lambda f: nl.stream_gram(KERNEL, X[:0], f), ValueError, r"needs at least one row"),
        (lambda f: nl.stream_gram(KERNEL, X[0], f), ValueError, r"of shape \(n, d\)"),
        (lambda f: nl.stream_gram(KERNEL, X, f, tile=0), ValueError, r"needs a whole number tile >= 1\. Got 0"),
        (lambda f: nl.stream_gram(KERNEL, X, f, tile=2.5), ValueError, r"needs a whole number tile >= 1\. Got 2\.5"),
        (lambda f: nl.open_gram(f), ValueError, r"`open_gram\(store\)` needs a folder of `stream_gram`"),
    ],
)
def test_errors(folder, call, error, says):
    with pytest.raises(error, match=says):
        call(folder)
    assert not folder.exists()


def test_a_folder_of_something_else_is_left_alone(folder, monkeypatch):
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="needs a new folder, an empty one or an earlier store"):
        nl.stream_gram(KERNEL, X, folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**4, 0, 10**4))
    with pytest.raises(ValueError, match=r"needs 4e-05 GB on disk"):
        nl.stream_gram(KERNEL, X, folder.parent / "new")


def test_without_zarr(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r'pip install "ntk_ln\[store\]"'):
        store.stream_gram(KERNEL, X, folder)
