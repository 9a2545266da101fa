"""The closed forms against the mpmath tables of `reference/`, and the tables against the script that made them."""

from collections import defaultdict

import numpy as np
import pytest
from helpers import KernelCase, assert_accurate, load_cases, network_covered, uses_quadrature

import ntk_ln as nl
from reference import make

FLOAT64, FLOAT32 = ("kernels", "extra"), ("kernels_float32",)


def grouped(*tables: str) -> dict[str, list[KernelCase]]:
    """The covered cases by table and network: one kernel call serves all pairs of a network."""
    groups = defaultdict(list)
    for table in tables:
        for case in load_cases(table):
            groups[f"{table}: {case.id.partition(' | ')[0]} (d = {len(case.x1)})"].append(case)
    return {name: cases for name, cases in groups.items() if network_covered(cases[0].network)}


def check(cases: list[KernelCase], dtype: type, tol: float) -> None:
    ids = [case.id for case in cases]
    x1, x2 = (np.array([getattr(case, side) for case in cases], dtype) for side in ("x1", "x2"))
    kernel = nl.NTK(nl.network_from_config(cases[0].network))
    for order, left, right in (("", x1, x2), (", x and x' swapped", x2, x1)):
        pair = kernel.pair(left, right)
        for name in ("nngp", "ntk"):
            got = getattr(pair, name)
            assert got.dtype == dtype
            want, scale = ([getattr(case, field) for case in cases] for field in (name, f"{name}_scale"))
            what = [f"{name} of {id}{order}" for id in ids]
            assert_accurate(np.diagonal(got), want, scale=scale, tol=tol, what=what)


class TestKernels:
    @pytest.mark.parametrize("cases", [pytest.param(c, id=name) for name, c in grouped(*FLOAT64).items()])
    def test_float64(self, cases):
        check(cases, np.float64, 1e-10 if uses_quadrature(cases[0].network) else 1e-13)

    @pytest.mark.parametrize("cases", [pytest.param(c, id=name) for name, c in grouped(*FLOAT32).items()])
    def test_float32(self, cases):
        check(cases, np.float32, 2e-6)

    @pytest.mark.parametrize(("table", "covered"), [("kernels", 0), ("extra", 0), ("kernels_float32", 0)])
    def test_no_case_is_lost(self, table, covered):
        assert sum(map(len, grouped(table).values())) == covered
