"""The closed forms against the mpmath tables of `reference/`, and the tables against the script that made them."""

import sys
from collections import defaultdict
from contextlib import nullcontext

import jax
import mpmath as mp
import numpy as np
import pytest
from helpers import REFERENCE, KernelCase, assert_accurate, load_cases, network_covered, uses_quadrature
from mpmath import mpf

import ntk_ln as nl

sys.path.insert(0, str(REFERENCE))
import make  # the tables' script

ROWS = 16  # op by op, equal shapes let all networks share their compiled operations
DEEP = 30  # layers past which a network takes too long for every run: op by op half a minute, compiled unrolled many


def grouped(table: str) -> dict[str, list[KernelCase]]:
    """The covered cases by network: one kernel call serves all pairs of a network."""
    groups = defaultdict(list)
    for case in load_cases(table):
        groups[f"{case.id.partition(' | ')[0].strip()} (d = {len(case.x1)})"].append(case)
    return {name: cases for name, cases in groups.items() if network_covered(cases[0].network)}


def params(groups: dict[str, list[KernelCase]]) -> list:
    def marks(cases):
        return [pytest.mark.slow] if len(cases[0].network) > DEEP else []

    return [pytest.param(cases, id=name, marks=marks(cases)) for name, cases in groups.items()]


def every(step: int, cases: list) -> list:
    """The others in the slow run alone."""
    return [
        case if i % step == 0 else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for i, case in enumerate(cases)
    ]


KERNELS, EXTRA, FLOAT32 = (grouped(table) for table in ("kernels", "extra", "kernels_float32"))


def check(cases: list[KernelCase], dtype: type, *, rows: int = 0) -> None:
    quadrature = uses_quadrature(cases[0].network)
    accuracy = 2e-6 if dtype == np.float32 else 1e-10 if quadrature else 1e-13
    # The scale is a product over layers: each rounds it once, and in float32 fifty layers alone come to 6e-6.
    accuracy = max(accuracy, len(cases[0].network) * np.finfo(dtype).eps / 2)
    spare = [cases[-1]] * (rows - len(cases))
    x1, x2 = (np.array([getattr(case, side) for case in [*cases, *spare]], dtype) for side in ("x1", "x2"))
    kernel = nl.NTK(nl.network_from_config(cases[0].network))
    for order, left, right in (("", x1, x2), (", x and x' swapped", x2, x1)):
        pair = kernel.pair(left, right)
        for name in ("nngp", "ntk"):
            got = getattr(pair, name)
            assert got.dtype == dtype
            want, scale, condition = (
                np.array([getattr(case, f"{name}{field}") for case in cases]) for field in ("", "_scale", "_condition")
            )
            assert_accurate(
                np.diagonal(got)[: len(cases)],
                want,
                scale=scale,
                tol=np.maximum(accuracy, 4 * np.finfo(dtype).eps * condition),
                what=[f"{name} of {case.id}{order}" for case in cases],
            )


def op_by_op(cases: list[KernelCase]):
    """Networks share their compiled operations; but loops over quadrature nodes are slow without a compiled body."""
    return nullcontext() if uses_quadrature(cases[0].network) else jax.disable_jit()


class TestKernels:
    @pytest.mark.parametrize("cases", every(2, params(KERNELS)))
    def test_float64(self, cases):
        check(cases, np.float64)

    @pytest.mark.parametrize("cases", every(5, params({name: FLOAT32[name] for name in KERNELS})))
    def test_float32(self, cases):
        with op_by_op(cases):
            check(cases, np.float32, rows=ROWS)

    @pytest.mark.slow
    @pytest.mark.parametrize("cases", params({name: FLOAT32[name] for name in KERNELS}))
    def test_float32_compiled(self, cases):
        check(cases, np.float32)

    @pytest.mark.parametrize("cases", every(5, params(EXTRA)))
    def test_extra_float64_op_by_op(self, cases):
        with op_by_op(cases):
            check(cases, np.float64, rows=ROWS)

    @pytest.mark.slow
    @pytest.mark.parametrize("cases", params({name: cases for name, cases in FLOAT32.items() if name not in KERNELS}))
    def test_extra_float32_op_by_op(self, cases):
        with op_by_op(cases):
            check(cases, np.float32, rows=ROWS)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    @pytest.mark.parametrize("name", [name for name, cases in EXTRA.items() if len(cases[0].network) <= DEEP])
    def test_extra_compiled(self, name, dtype):
        check((EXTRA if dtype == np.float64 else FLOAT32)[name], dtype)

    @pytest.mark.parametrize(("table", "covered"), [("kernels", 279), ("extra", 398), ("kernels_float32", 618)])
    def test_no_case_is_lost(self, table, covered):
        # A network the package no longer builds would drop out of the tests above; a new layer raises the numbers.
        assert sum(map(len, grouped(table).values())) == covered


class TestTables:
    def test_recomputed_in_part(self):
        assert make.check("kernels", only="relu 1 | ") == []

    @pytest.mark.slow
    @pytest.mark.parametrize("table", make.TABLES)
    def test_recomputed(self, table):
        assert make.check(table) == []

    def test_stored_values_that_differ_are_named(self):
        case = {"id": "a", "network": [], "x1": [1.0], "nngp": "2.0", "nngp_scale": "4.0"}
        error, place = make.difference(case, {**case, "nngp": "2.4"})
        assert place == "nngp"
        assert abs(error - 0.1) < 1e-15


MOMENTS = [("1.3", "4.1", "-0.9"), ("1", "1", "0.999999999999999999"), ("2.2", "2.2", "0.3"), ("0.02", "5", "0.3")]


class TestDualsOfTheTables:
    """The closed forms of the script against its own quadrature, which knows nothing of them."""

    @pytest.mark.slow
    @pytest.mark.parametrize("moments", MOMENTS)
    @pytest.mark.parametrize(
        ("closed", "phi", "slope", "strip"),
        [
            (make.erf(), mp.erf, lambda a: 2 / mp.sqrt(mp.pi) * mp.exp(-a * a), 1),
            (make.gelu(), lambda a: a * mp.ncdf(a), lambda a: mp.ncdf(a) + a * mp.npdf(a), 1.2),
            (make.sine(cosine=False), mp.sin, mp.cos, 3),
            (make.sine(cosine=True), mp.cos, lambda a: -mp.sin(a), 3),
        ],
        ids=["erf", "gelu", "sin", "cos"],
    )
    def test_smooth(self, closed, phi, slope, strip, moments):
        with mp.workdps(make.DIGITS):
            q1, q2, s = map(mpf, moments)
            quadrature = make.quadrature(phi, slope, mpf(strip))
            for name in ("product", "tangent", "gain"):
                assert abs(getattr(closed, name)(q1, q2, s) - getattr(quadrature, name)(q1, q2, s)) < 1e-38
            assert abs(closed.mean(q1) - quadrature.mean(q1)) < 1e-38

    @pytest.mark.parametrize(("alpha", "beta", "degree"), [(1, 0, 1), (1, -0.2, 1), (1, 1, 1), (1, 0.5, 2), (1, 0, 3), (1, 0, 1.5)])
    def test_homogeneous(self, alpha, beta, degree):
        # In polar coordinates a = sqrt(q) r cos w, b = sqrt(q') r cos(w - theta) the radius integrates out.
        q1, q2, s = map(mpf, MOMENTS[0])
        theta = mp.acos(s / mp.sqrt(q1 * q2))
        kinks = sorted([-mp.pi, -mp.pi / 2, mp.pi / 2, mp.pi, theta - mp.pi / 2, theta - 3 * mp.pi / 2])

        def average(alpha, beta, n):
            def phi(c):
                return alpha * max(c, 0) ** n if c > 0 else beta * max(-c, 0) ** n

            angular = mp.quad(lambda w: phi(mp.cos(w)) * phi(mp.cos(w - theta)), kinks) / (2 * mp.pi)
            return mp.sqrt(q1 * q2) ** n * mpf(2) ** n * mp.gamma(n + 1) * angular

        dual = make.homogeneous(alpha, beta, degree)
        assert abs(dual.product(q1, q2, s) - average(alpha, beta, degree)) < 1e-12
        slope = average(degree * alpha, -degree * beta, degree - 1)
        assert abs(dual.tangent(q1, q2, s) - slope) < 1e-12
        assert abs(dual.gain(q1, q2, s) - degree**2 * dual.product(q1, q2, s)) < 1e-12


class TestAssertAccurate:
    def test_returns_the_largest_error(self):
        assert assert_accurate([1.0, 2.5], [1.0, 2.0], scale=[1.0, 10.0], tol=0.1, what="x") == 0.05

    def test_names_the_worst_point(self):
        with pytest.raises(AssertionError, match=r"^b: worst of 2 points at \(1,\): got .*2\.5.*wanted .*2\.0.* 5 x the tolerance"):
            assert_accurate([1.0, 2.5], [1.0, 2.0], scale=1.0, tol=0.1, what=["a", "b"])

    def test_sees_errors_of_either_sign(self):
        with pytest.raises(AssertionError, match="x: worst of 1"):
            assert_accurate(1.0, 2.0, scale=1.0, tol=0.1, what="x")

    @pytest.mark.parametrize("got", [np.nan, np.inf])
    def test_refuses_what_is_not_a_number(self, got):
        with pytest.raises(AssertionError, match="error inf"):
            assert_accurate([1.0, got], [1.0, 2.0], scale=1.0, tol=0.1, what="x")

    def test_is_exact_where_the_scale_is_zero(self):
        assert assert_accurate(0.0, 0.0, scale=0.0, tol=0.1, what="x") == 0.0
        with pytest.raises(AssertionError, match="error inf"):
            assert_accurate(1e-300, 0.0, scale=0.0, tol=0.1, what="x")

    def test_refuses_another_shape(self):
        with pytest.raises(AssertionError, match="got shape"):
            assert_accurate([1.0], 1.0, scale=1.0, tol=0.1, what="x")

    def test_holds_huge_values(self):
        assert assert_accurate(1.5e200, 1e200, scale=1e201, tol=0.1, what="x") == pytest.approx(0.05)
