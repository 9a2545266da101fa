"""Rows sharded over devices and over processes: the same matrix, the same posterior."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

processes = int(sys.argv[1])
if processes > 1:
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", processes, int(sys.argv[3]))
import ntk_ln as nl

assert jax.device_count() == 8 and jax.process_count() == processes
x = np.random.default_rng(0).normal(size=(48, 20)).astype(np.float32)
x[5], x[40] = x[30], x[7] * np.float32(1 + 1e-5)
y = np.sin(x[:, 0])
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P("rows"))
shared = jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])
for net in (nl.mlp(1, layer_norm="first"), nl.mlp(1)):
    k = nl.NTK(net)
    gram, whole = k(shared), k(x)
    assert gram.sharding.is_equivalent_to(sharding, 2), gram.sharding
    for shard in gram.addressable_shards:
        np.testing.assert_allclose(shard.data, whole[shard.index], rtol=2e-6, atol=2e-6)
        assert shard.data.shape == (6, 48)
p = nl.posterior(k, shared, y, noise=0.01, solver="cg", tolerance=1e-5)
exact = nl.posterior(k, x.astype(np.float64), y, noise=0.01)
np.testing.assert_allclose(p.mean(x[:4] + 1), exact.mean(x[:4] + 1), rtol=1e-3, atol=1e-3)
assert 0 < p.iterations < 48
if processes == 1:  # what surrounds JAXMg, which needs GPUs; its solver is played by JAX's own
    import importlib.machinery, types
    import jax.numpy as jnp
    calls = []

    def potrs(a, b, tile, mesh):
        assert a.sharding.is_equivalent_to(sharding, 2) and mesh == sharding.mesh and tile == 6
        calls.append(a.shape)
        return jnp.linalg.solve(jnp.asarray(np.asarray(a)), b)

    sys.modules["jaxmg"] = types.ModuleType("jaxmg")
    sys.modules["jaxmg"].__spec__, sys.modules["jaxmg"].potrs = importlib.machinery.ModuleSpec("jaxmg", None), potrs
    q = nl.posterior(k, shared, y, noise=0.01, solver="jaxmg", tolerance=1e-5)
    np.testing.assert_allclose(q.mean(x[:4] + 1), exact.mean(x[:4] + 1), rtol=1e-3, atol=1e-3)
    assert q.iterations <= 2 and q.residual <= 1e-4 and calls
bad = np.where(np.arange(48)[:, None] == 31, np.nan, x)
try:
    k(jax.make_array_from_callback(x.shape, sharding, lambda at: bad[at]))
except ValueError as error:
    assert "Row 31" in str(error), error
else:
    raise AssertionError("NaN passed")
print("right")
"""


def start(processes, *arguments):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // processes}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(processes), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(*running):
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert out.endswith("right\n")


@pytest.mark.slow
def test_eight_devices():
    check(start(1))


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    check(*(start(2, port, rank) for rank in range(2)))
