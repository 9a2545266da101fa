"""Tables in every format, the rows drawn from them, and what is said about a bad one."""

import gzip
import lzma
import sys

import numpy as np
import pytest

from ntk_ln.data import Dataset, load_table, sine

HEADER = "a,b,label"
BODY = ["1,2,3", "4,5.5,6", "-7e1,8,9", "0,1,2"]
X = np.array([[1, 2], [4, 5.5], [-70, 8], [0, 1]])
Y = np.array([3.0, 6, 9, 2])


def text(*body, header=HEADER):
    return "\n".join([header, *body]) + "\n"


@pytest.fixture
def csv_file(tmp_path):
    def make(content, name="table.csv"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return make


def test_sine_set():
    data = sine()
    assert data.x.shape == (100, 1)
    assert data.x[0, 0] == -np.pi
    assert data.x[-1, 0] == np.pi
    np.testing.assert_array_equal(data.y, np.sin(data.x[:, 0]))
    np.testing.assert_allclose(np.diff(data.x[:, 0]), 2 * np.pi / 99, rtol=1e-13)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.xz", ".npz", ".parquet"])
def test_formats_agree(tmp_path, suffix):
    path = tmp_path / f"table{suffix}"
    if suffix == ".npz":
        np.savez(path, a=X[:, 0], b=X[:, 1], label=Y)
    elif suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"a": X[:, 0], "b": X[:, 1], "label": Y.astype(int)}), path)
    else:
        opener = {".csv": open, ".csv.gz": gzip.open, ".csv.xz": lzma.open}[suffix]
        with opener(path, "wt", encoding="utf-8") as file:
            file.write(text(*BODY))
    data = load_table(path, "label")
    np.testing.assert_array_equal(data.x, X)
    np.testing.assert_array_equal(data.y, Y)
    assert data.features == ("a", "b")
    assert data.target == "label"
    assert data.rows_in_file == 4
    assert data.x.dtype == data.y.dtype == np.float64


def test_target_may_be_any_column(csv_file):
    data = load_table(csv_file(text(*BODY)), "a")
    np.testing.assert_array_equal(data.y, X[:, 0])
    np.testing.assert_array_equal(data.x, np.stack([X[:, 1], Y], axis=1))


def test_csv_from_a_spreadsheet(csv_file):
    """Byte order mark, quotes, spaces, Windows line ends, blank last line."""
    content = '\ufeff"a", "b","label"\r\n1, 2,"3"\r\n4,5.5,6\r\n\r\n'
    data = load_table(csv_file(content), "label")
    np.testing.assert_array_equal(data.x, X[:2])
    assert data.features == ("a", "b")


def test_npz_of_matrix_and_target(tmp_path):
    path = tmp_path / "m.npz"
    np.savez(path, x=X.astype(np.float32), y=Y[:, None])
    data = load_table(path)
    np.testing.assert_array_equal(data.x, X)
    np.testing.assert_array_equal(data.y, Y)
    assert data.features == ("x0", "x1")
    assert data.target == "y"


def test_npz_columns_named_x_and_y(tmp_path):
    path = tmp_path / "m.npz"
    np.savez(path, x=X[:, 0], y=Y)
    np.testing.assert_array_equal(load_table(path, "y").x, X[:, :1])


def test_rows_are_a_fixed_draw_in_file_order(csv_file):
    path = csv_file(text(*(f"{i},{-i},{i * i}" for i in range(50))))
    data = load_table(path, "label", rows=20)
    drawn = data.x[:, 0]
    assert len(set(drawn)) == 20
    assert np.all(np.diff(drawn) > 0)
    assert drawn.max() > 30
    np.testing.assert_array_equal(data.y, drawn**2)
    np.testing.assert_array_equal(load_table(path, "label", rows=20).x, data.x)
    assert not np.array_equal(load_table(path, "label", rows=20, seed=1).x, data.x)
    assert data.rows_in_file == 50
    for more in (50, 1000):
        assert len(load_table(path, "label", rows=more).y) == 50


def test_standardize():
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(5, 3, 40), np.full(40, 0.1), rng.normal(0, 1e200, 40), rng.normal(1e8, 1, 40)], axis=1)
    data = Dataset(x, np.ones(40), tuple("abcd"), "y", "file", 40).standardize()
    assert data.standardized
    np.testing.assert_allclose(data.x.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(data.x.std(axis=0), [1, 0, 1, 1], atol=1e-12)
    np.testing.assert_array_equal(data.y, 1)


def test_constant_target_is_legal(csv_file):
    np.testing.assert_array_equal(load_table(csv_file(text("1,2,5", "2,3,5")), "label").y, [5, 5])


@pytest.mark.parametrize(
    ("content", "target", "match"),
    [
        ("", "label", r"is empty. It needs a line of column names"),
        (text(), "label", r"has no rows"),
        (text(*BODY), None, r"Pass --target with one of: a, b, label"),
        (text(*BODY), "labl", r"no column 'labl'. Did you mean 'label'\? Its columns: a, b, label"),
        (text("1,2", "3,4", header="1,2"), "a", r"starts with numbers"),
        (text("1,2,3", "4,5"), "label", r"needs 3 comma-separated cells in each row. Got 2 in row 2"),
        (text("1,2,3", "4,red,5"), "label", r"Column 'b' of 'table.csv' needs finite numbers. Got 'red' in row 2"),
        (text("1,2,3", "4,5,nan"), "label", r"Column 'label' .* Got 'nan' in row 2"),
        (text("1,2,3", "inf,5,6"), "label", r"Column 'a' .* Got 'inf' in row 2"),
        (text("1,2,3", "4,,6"), "label", r"Column 'b' .* Got an empty cell in row 2"),
        (text("1", header="label"), "label", r"has only the target column"),
        (text(*BODY, header="a,a,label"), "label", r"names the column 'a' twice"),
        ("\x00\x01\x02", "label", r"has no column|not a readable|starts with"),
    ],
)
def test_bad_csv(csv_file, content, target, match):
    with pytest.raises(ValueError, match=match):
        load_table(csv_file(content), target)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.csv.xz", "t.npz", "t.parquet"])
def test_bytes_that_are_not_the_format(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe\x80garbage" * 20)
    with pytest.raises(ValueError, match=r"'t\.[a-z.]+' is not"):
        load_table(path, "label")


@pytest.mark.parametrize("opener", [gzip.open, lzma.open])
def test_truncated_archive(tmp_path, opener):
    path = tmp_path / ("t.csv.gz" if opener is gzip.open else "t.csv.xz")
    with opener(path, "wt") as file:
        file.write(text(*(f"{i},{i},{i}" for i in range(1000))))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is not a readable"):
        load_table(path, "label")


@pytest.mark.parametrize(
    ("arrays", "target", "match"),
    [
        ({"x": X, "y": Y[:3]}, None, r"Got x.shape=\(4, 2\), y.shape=\(3,\)"),
        ({"x": X, "y": np.ones((4, 2))}, None, r"Got x.shape=\(4, 2\), y.shape=\(4, 2\)"),
        ({"x": X[:, :0], "y": Y}, None, r"has no features: x.shape=\(4, 0\)"),
        ({"x": X[:0], "y": Y[:0]}, None, r"has no rows"),
        ({"x": X[:, 0], "y": Y}, None, r"Pass --target with one of: x, y"),
        ({"a": X[:3, 0], "y": Y}, "y", r"Got a.shape=\(3,\), y.shape=\(4,\)"),
        ({"a": X[:, 0], "y": Y.astype(complex)}, "y", r"'y' .* is not numeric: complex128"),
        ({"a": np.array([{}]), "y": Y[:1]}, "y", r"not an .npz of plain arrays"),
    ],
)
def test_bad_npz(tmp_path, arrays, target, match):
    path = tmp_path / "t.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=match):
        load_table(path, target)


def test_npy_under_the_wrong_name(tmp_path):
    with open(tmp_path / "t.npz", "wb") as file:
        np.save(file, X)
    with pytest.raises(ValueError, match=r"not an .npz of plain arrays"):
        load_table(tmp_path / "t.npz", "y")


@pytest.mark.parametrize(
    ("column", "match"),
    [(["1", "x"], r"Column 'a' .* is not numeric|Got 'x'"), ([1.0, None], r"Column 'a' .* Got 'nan' in row 2")],
)
def test_bad_parquet(tmp_path, column, match):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": column, "y": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=match):
        load_table(tmp_path / "t.parquet", "y")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"pip install 'ntk_ln\[parquet\]'"):
        load_table(tmp_path / "t.parquet", "y")


def test_bad_paths_and_rows(tmp_path, csv_file):
    with pytest.raises(ValueError, match=r"does not exist"):
        load_table(tmp_path / "none.csv", "y")
    with pytest.raises(ValueError, match=r"is a folder"):
        load_table(tmp_path, "y")
    with pytest.raises(ValueError, match=r"has no known ending. Use one of .csv"):
        load_table(csv_file("x", "t.xlsx"), "y")
    with pytest.raises(ValueError, match=r"`rows` must be at least 1. Got 0"):
        load_table(csv_file(text(*BODY)), "label", rows=0)
