"""The report of a small check: its JSON, its page, its figures, and how it gets into its folder."""

import base64
import json
import os
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln import check as check_module
from ntk_ln import plots, report
from ntk_ln.check import STEPS, check, counterparts, fit, make_ray
from ntk_ln.data import Dataset, sine

FILES = {"report.json", "report.html", *(f"{name}.png" for name in plots.FIGURES)}
NASTY = '<script>alert("x")</script>'


@pytest.fixture(scope="module", autouse=True)
def small_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_module, "WIDTHS", (16, 64))
        patch.setattr(check_module, "SEEDS", 3)
        patch.setattr(check_module, "PEER_ROWS", 5)
        yield


@pytest.fixture(scope="module")
def steps():
    return []


@pytest.fixture(scope="module")
def result(small_sizes, steps):
    data = sine(12)
    return check(data, fit(data, nl.mlp(2)), on_step=steps.append)


@pytest.fixture(scope="module")
def table_result(small_sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(15, 3))
    data = Dataset(x, np.sin(x[:, 0]) + 3, ("a", NASTY, "c"), "t & u", "odd <name>.csv", 40, True)
    return check(data, fit(data, nl.mlp(1, layer_norm="first"), noise=0.1), noise=0.1)


@pytest.fixture
def quick_figures(monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda name, result, path: path.write_bytes(name.encode()))


def test_counterparts():
    plain, normed = counterparts(nl.mlp(2))
    assert plain.to_config() == nl.mlp(2).to_config()
    assert normed.to_config() == nl.mlp(2, layer_norm="first").to_config()
    plain, normed = counterparts(nl.mlp(3, layer_norm="every", eps=0.1))
    assert plain.to_config() == nl.mlp(3).to_config()
    assert normed.to_config() == nl.mlp(3, layer_norm="every", eps=0.1).to_config()
    with pytest.raises(ValueError, match=r"Got no activation; add one"):
        counterparts(nl.Network(nl.Dense(), nl.Dense()))


def test_ray_goes_through_the_farthest_row():
    x = np.random.default_rng(1).normal(size=(20, 4)) + 5
    ray = make_ray(x)
    far = np.linalg.norm(x - x.mean(axis=0), axis=1).argmax()
    np.testing.assert_allclose(ray.points(ray.rows[[far]])[0], x[far], rtol=1e-12)
    assert ray.far[0] == -ray.far[-1]
    assert ray.far[-1] >= 1e3 * ray.extent
    assert np.all(np.diff(ray.far) > 0)
    assert np.all(make_ray(sine().x).grid != 0)


@pytest.mark.parametrize("x", [np.zeros((1, 1)), np.ones((1, 3)), np.zeros((2, 2)), np.full((3, 1), 1e200)])
def test_ray_of_degenerate_data(x):
    ray = make_ray(x)
    for field in (ray.direction, ray.near, ray.far, ray.grid, ray.radii):
        assert np.all(np.isfinite(field))
    np.testing.assert_allclose(np.linalg.norm(ray.direction), 1)


@pytest.mark.slow
def test_steps_are_announced(result, steps):
    assert len(steps) == STEPS
    assert len(set(steps)) == STEPS


@pytest.mark.slow
def test_numbers_agree_with_the_library(result):
    plain, normed = result.networks
    p = nl.posterior(nl.NTK(nl.mlp(2, layer_norm="first")), result.data.x, result.data.y)
    assert normed.bounds == nl.sup_norm_bound(p)
    np.testing.assert_array_equal(normed.curves.far, p.mean(result.ray.points(result.ray.far)))
    assert plain.far_field[0].power == 1
    assert normed.far_field[0].power == 0
    slope = plain.curves.far[-1] / result.ray.far[-1]
    np.testing.assert_allclose(slope, plain.far_field[0].coefficient, rtol=0.05)
    np.testing.assert_allclose(normed.curves.far[-1], normed.far_field[0].coefficient, rtol=1e-3)
    assert np.max(np.abs(normed.curves.far)) <= normed.bounds.rkhs
    assert normed.neural_tangents < 1e-6
    assert plain.neural_tangents < 1e-6
    assert normed.empirical[1].relative_error < normed.empirical[0].relative_error


@pytest.mark.slow
def test_far_field_directions(table_result):
    far = table_result.networks[1].far_field
    assert len(far) == 2 + check_module.TRAINING_DIRECTIONS
    np.testing.assert_array_equal(far[0].direction, -far[1].direction)
    x = table_result.data.x
    for line in far[2:]:
        cosines = x @ line.direction / np.linalg.norm(x, axis=1)
        np.testing.assert_allclose(cosines.max(), 1)


@pytest.mark.slow
def test_json_has_the_promised_fields(result, tmp_path, quick_figures):
    report.write(result, tmp_path / "r")
    text = (tmp_path / "r" / "report.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(found) == {"data", "networks", "theorems"}
    assert found["data"]["source"] == "sine"
    assert found["data"]["rows"] == 12
    plain, normed = found["networks"]
    for network in (plain, normed):
        assert list(network) == [
            "name",
            "config",
            "min_eigenvalue",
            "kernel_sup",
            "bounds",
            "sup_norm",
            "far_field",
            "agreement",
        ]
        assert set(network["min_eigenvalue"]) == {"value", "lower"}
        assert set(network["sup_norm"]) == {"value", "point"}
        assert {"direction", "power", "coefficient"} == set(network["far_field"][0])
        assert set(network["agreement"]) == {"neural_tangents", "empirical"}
        assert set(network["agreement"]["empirical"][0]) == {"width", "relative_error", "standard_error"}
    assert plain["name"] == "plain"
    assert normed["name"] == "layer_norm"
    assert plain["kernel_sup"] is None
    assert plain["bounds"] is None
    assert plain["sup_norm"] == {"value": None, "point": None}
    assert set(normed["bounds"]) == {"rkhs", "spectral", "dataset"}
    assert normed["sup_norm"]["value"] <= normed["bounds"]["rkhs"] <= normed["bounds"]["spectral"]
    assert nl.network_from_config(normed["config"]).to_config() == result.networks[1].network.to_config()
    assert [(t["name"], t["network"], t["holds"]) for t in found["theorems"]] == [
        ("3.1", "plain", True),
        ("3.2", "layer_norm", True),
        ("3.3", "layer_norm", True),
    ]
    assert all(t["evidence"] for t in found["theorems"])


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_page_is_whole_and_self_contained(table_result, tmp_path):
    report.write(table_result, tmp_path / "r")
    text = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    page = _Page(text)
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == len(plots.FIGURES)
    for image in images:
        kind, encoded = image["src"].split(",", 1)
        assert kind == "data:image/png;base64"
        assert image["alt"]
        assert base64.b64decode(encoded, validate=True)[:8] == b"\x89PNG\r\n\x1a\n"
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?://|url\(|@import", text)
    assert NASTY not in text
    assert "odd &lt;name&gt;.csv" in text
    assert "t &amp; u" in text
    assert "(standardised)" in text
    assert "Theorem 3.3" in text


@pytest.mark.slow
def test_figures(result, table_result, tmp_path):
    for which in (result, table_result):
        for name in plots.FIGURES:
            plots.draw(name, which, tmp_path / "f.png")
            content = (tmp_path / "f.png").read_bytes()
            assert content[:8] == b"\x89PNG\r\n\x1a\n"
            assert len(content) > 10_000
            width = int.from_bytes(content[16:20], "big")
            assert 900 < width < 1600


@pytest.mark.slow
def test_figures_leave_pyplot_alone(result, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.draw("diagonal", result, tmp_path / "f.png")
    assert dict(matplotlib.rcParams) == before


def test_number_text():
    minus = "\N{MINUS SIGN}"
    cases = {0.0: "0", -0.5: f"{minus}0.5", 1234.5: "1230", 1e4: "$10^{4}$", -3.2e-7: r"$-3.2\times10^{-7}$"}
    assert {value: plots._number(value) for value in cases} == cases


@pytest.mark.slow
def test_page_shows_a_network_file(result):
    config = json.loads(report._network_file(result.networks[1]))
    assert nl.network_from_config(config).to_config() == result.networks[1].network.to_config()


@pytest.mark.slow
def test_fate(result):
    plain, normed = result.networks
    assert report.fate(plain) == "grows without end, like |x|"
    assert report.fate(normed).startswith("never leaves ±")
    unbounded = normed.bounds._replace(rkhs=np.inf)
    assert report.fate(replace(normed, bounds=unbounded)) == "settles, but no bound is certified"


@pytest.mark.slow
def test_write_replaces_an_earlier_report(result, table_result, tmp_path, quick_figures):
    folder = tmp_path / "deep" / "r"
    report.write(result, folder)
    assert {entry.name for entry in folder.iterdir()} == FILES
    report.write(table_result, folder)
    assert json.loads((folder / "report.json").read_text())["data"]["rows_in_file"] == 40
    assert {entry.name for entry in folder.iterdir()} == FILES
    assert [entry.name for entry in folder.parent.iterdir()] == ["r"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~report._umask()


@pytest.mark.slow
def test_write_into_an_empty_folder(result, tmp_path, quick_figures):
    report.write(result, tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == FILES


@pytest.mark.slow
def test_replace_without_an_atomic_exchange(result, tmp_path, monkeypatch, quick_figures):
    report.write(result, tmp_path / "r")
    monkeypatch.setattr(report, "_exchange", lambda one, other: False)
    report.write(result, tmp_path / "r")
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]
    assert {entry.name for entry in (tmp_path / "r").iterdir()} == FILES


@pytest.mark.slow
def test_stopped_half_way_leaves_the_folder_as_it_was(result, tmp_path, monkeypatch, quick_figures):
    report.write(result, tmp_path / "old")
    before = (tmp_path / "old" / "report.json").stat().st_ino
    draw = plots.draw

    def stop(name, *args):
        if name == "kernels":
            raise KeyboardInterrupt("stop")
        draw(name, *args)

    monkeypatch.setattr(plots, "draw", stop)
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt, match="stop"):
            report.write(result, tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "report.json").stat().st_ino == before


@pytest.mark.slow
def test_folders_that_are_refused(result, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("work")
    with pytest.raises(ValueError, match=r"holds 'thesis.tex', which is not of a report. Give a new or empty folder"):
        report.write(result, tmp_path / "mine")
    with pytest.raises(ValueError, match=r"is a file. Give a new folder"):
        report.check_folder(tmp_path / "mine" / "thesis.tex")
    with pytest.raises(ValueError, match=r"cannot be made"):
        report.check_folder(tmp_path / "mine" / "thesis.tex" / "r")
    assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_counterparts_of_residual_networks():
    dense, relu = nl.Dense(b_std=0.1), nl.Activation("relu")
    inside = nl.Network(dense, nl.Residual(nl.RMSNorm(), relu, dense), nl.LayerNorm(), dense)
    plain, normed = counterparts(inside)
    assert normed is inside
    assert plain == nl.Network(dense, nl.Residual(relu, dense), dense)
    assert counterparts(plain)[1] == nl.Network(dense, nl.LayerNorm(), nl.Residual(relu, dense), dense)


def test_a_network_without_a_far_limit_is_refused():
    with pytest.raises(ValueError, match=r"`ntk-ln check`: the activation sin has no known limit far out"):
        fit(sine(12), nl.mlp(1, activation="sin"))
