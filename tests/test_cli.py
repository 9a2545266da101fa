"""The command line: what it prints and writes, its exit status, and one line for each kind of bad input."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln import _memory, cli, plots
from ntk_ln import check as check_module
from ntk_ln.data import load_table

RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr(check_module, "WIDTHS", (16, 32))
    monkeypatch.setattr(check_module, "SEEDS", 2)
    monkeypatch.setattr(check_module, "PEER_ROWS", 4)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table():
    x = RNG.normal(size=(30, 2))
    lines = ["a,b,label", *(f"{a},{1e4 * b},{np.sin(a) + b}" for a, b in x)]
    with open("table.csv", "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return "table.csv"


@pytest.fixture
def run(capsys):
    def run_command(*arguments):
        with pytest.raises(SystemExit, match=r"^\d+$") as stopped:
            cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return stopped.value.code, output.out, output.err

    return run_command


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


@pytest.fixture
def quick_figures(monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda name, result, path: path.write_bytes(b""))


def bad(run, *arguments, command="check"):
    """Run with bad input: status 2, one line on stderr, nothing on stdout, nothing written. Returns the line."""
    before = sorted(os.listdir())
    status, out, err = run(command, *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("ntk-ln: ")
    assert sorted(os.listdir()) == before
    return err


@pytest.mark.slow
def test_default_run(run):
    status, out, err = run("check")
    assert status == 0
    assert err == ""
    assert "\x1b" not in out
    for text in ("Plain", "With LayerNorm", "unbounded", "Theorem 3.1", "Theorem 3.3", "holds", "report.html"):
        assert text in out
    report = read("ntk-ln-report/report.json")
    assert report["data"]["rows"] == 100
    assert report["data"]["standardized"] is False
    assert report["networks"][0]["config"] == nl.mlp(2).to_config()
    assert os.path.getsize("ntk-ln-report/report.html") > 100_000


@pytest.mark.slow
def test_table_network_and_noise(run, table, quick_figures):
    network = nl.mlp(1, layer_norm="first", eps=0.01)
    with open("net.json", "w", encoding="utf-8") as file:
        json.dump(network.to_config(), file)
    options = ("--data", table, "--target", "label", "--rows", 12, "--network", "net.json", "--noise", 0.1, "--out", "o")
    status, _, _ = run("check", *options)
    assert status == 0
    report = read("o/report.json")
    expected = {"source": "table.csv", "rows": 12, "rows_in_file": 30, "features": ["a", "b"], "target": "label"}
    assert expected.items() <= report["data"].items()
    assert report["data"]["standardized"] is True
    assert report["data"]["noise"] == 0.1
    plain, normed = report["networks"]
    assert normed["config"] == network.to_config()
    assert plain["config"] == nl.mlp(1).to_config()
    assert len(normed["far_field"][0]["direction"]) == 2


@pytest.mark.parametrize(("option", "standardized"), [("--standardize", True), ("--no-standardize", False)])
def test_raw_features(run, table, monkeypatch, option, standardized):
    seen = []

    def fit(dataset, *_):
        seen.append(dataset)
        raise ValueError("enough seen")

    monkeypatch.setattr(check_module, "fit", fit)
    bad(run, "--data", table, "--target", "label", option)
    assert seen[0].standardized is standardized
    assert bool(np.std(seen[0].x[:, 1]) > 1000) is not standardized


@pytest.mark.slow
def test_a_theorem_that_fails_is_status_1(run, monkeypatch, quick_figures):
    failed = nl.check_theorem_3_2(nl.mlp(1, layer_norm="first"))._replace(holds=False)
    monkeypatch.setattr(nl, "check_theorem_3_2", lambda network: failed)
    status, out, _ = run("check")
    assert status == 1
    assert "FAILS" in out
    assert False in [theorem["holds"] for theorem in read("ntk-ln-report/report.json")["theorems"]]


@pytest.mark.slow
def test_single_row(run, quick_figures):
    with open("t.csv", "w", encoding="utf-8") as file:
        file.write("a,y\n1,5")
    status, _, _ = run("check", "--data", "t.csv", "--target", "y", "--no-standardize")
    assert status == 0


def test_bad_data(run, table):
    assert "does not exist" in bad(run, "--data", "none.csv", "--target", "y")
    assert "Pass --target with one of: a, b, label" in bad(run, "--data", table)
    assert "no column 'labels'. Did you mean 'label'?" in bad(run, "--data", table, "--target", "labels")
    assert "`rows` must be at least 1. Got 0." in bad(run, "--data", table, "--target", "label", "--rows", 0)
    assert "--rows needs --data FILE" in bad(run, "--rows", 5)
    assert "--target needs --data FILE" in bad(run, "--target", "y")
    with open("nan.csv", "w", encoding="utf-8") as file:
        file.write("a,y\n1,2\nnan,3")
    assert "Column 'a' of 'nan.csv' needs finite numbers. Got 'nan' in row 2." in bad(run, "--data", "nan.csv", "--target", "y")


@pytest.mark.slow
def test_rows_that_contradict_each_other(run, quick_figures):
    with open("t.csv", "w", encoding="utf-8") as file:
        file.write("a,y\n1,2\n1,3\n4,5")
    message = bad(run, "--data", "t.csv", "--target", "y")
    assert "noise" in message
    assert run("check", "--data", "t.csv", "--target", "y", "--noise", 0.1)[0] == 0


def test_too_many_rows_for_the_machine(run, table, monkeypatch):
    monkeypatch.setattr(_memory, "available", lambda: 1e4)
    assert "Pass --rows with at most 14." in bad(run, "--data", table, "--target", "label")


@pytest.mark.parametrize("noise", ["-1", "nan", "inf", "much"])
def test_bad_noise(run, noise):
    assert "--noise" in bad(run, "--noise", noise)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("{}", "must be a list of layers"),
        ("[1]", "must be a list of layers"),
        ("[]", "net.json"),
        ('[{"layer": "conv"}]', "net.json"),
        ('[{"layer": "dense"}, {"layer": "activation", "name": "rleu"}, {"layer": "dense"}]', "net.json"),
        ('[{"layer": "dense"}, {"layer": "dense"}]', "no activation"),
    ],
)
def test_bad_network(run, content, says):
    with open("net.json", "w", encoding="utf-8") as file:
        file.write(content)
    assert says in bad(run, "--network", "net.json")


def test_missing_network(run):
    assert "cannot be read" in bad(run, "--network", "none.json")


def test_bad_out(run):
    os.mkdir("mine")
    with open("mine/thesis.tex", "w", encoding="utf-8") as file:
        file.write("work")
    assert "holds 'thesis.tex'" in bad(run, "--out", "mine")
    assert "is a file" in bad(run, "--out", "mine/thesis.tex")
    assert os.listdir("mine") == ["thesis.tex"]


@pytest.mark.parametrize("arguments", [("--rows", "few"), ("--nosie", "1"), ("stray",)])
def test_usage_errors_are_one_line(run, arguments):
    assert "See ntk-ln check --help." in bad(run, *arguments)


def test_a_fault_of_ours_is_not_called_bad_input(run, monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(check_module, "check", broken)
    status, _, err = run("check")
    assert status == 3
    assert "Traceback" in err


def test_interrupted(run, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check_module, "check", stop)
    status, _, err = run("check")
    assert status == 130
    assert "nothing was written" in err
    assert os.listdir() == []


RUNNING = """
import sys, time
from ntk_ln import cli, plots, report
def draw(name, result, path):
    path.write_bytes(b"half a report")
    print("drawing", flush=True)
    time.sleep(60)
report.plots.draw = draw
report.report_dict = lambda result: {}
import typer
app = typer.Typer()
@app.callback()
def _(): pass
@app.command(name="check")
def run(): report.write(None, "report")
cli.app = app
cli.main(["check"])
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_it_at_once_and_leaves_nothing(number):
    process = subprocess.Popen([sys.executable, "-c", RUNNING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "drawing\n"
    assert len(os.listdir()) == 1  # the folder that is being built
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert err == "ntk-ln: stopped, nothing was written\n"
    assert os.listdir() == []


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, json.dumps([{"layer": "dense", "w_std": 10**400}])])
def test_networks_beyond_reason_are_one_line(run, text):
    with open("net.json", "w", encoding="utf-8") as file:
        file.write(text)
    bad(run, "--network", "net.json")


def test_help(run):
    status, out, _ = run("check", "--help")
    assert status == 0
    for option in ("--data", "--target", "--rows", "--network", "--noise", "--standardize", "--out"):
        assert option in out


def test_matplotlib_is_imported_only_by_the_command():
    code = "import sys, ntk_ln.cli; print([m for m in ('matplotlib', 'neural_tangents', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_gram(run, table, tmp_path):
    job = ("--data", table, "--target", "label", "--store", "store")
    status, out, _ = run("gram", *job, "--tile", 16)
    assert status == 0
    assert out == "30 x 30, float64, 7.2e-06 GB: store\n"
    x = load_table(table, "label").standardize().x
    np.testing.assert_allclose(nl.open_gram("store")[:], nl.NTK(nl.mlp(2))(x), rtol=1e-10, atol=1e-12)
    assert run("gram", *job, "--tile", 16)[0] == 0  # nothing left to do
    assert "has other tile" in bad(run, *job, command="gram")
    assert run("gram", "--data", table, "--store", "all", "--dtype", "float32", "--kernel", "nngp")[0] == 0
    assert nl.open_gram("all").x.shape == (30, 3)  # without a target every column is a feature
    assert "does not exist" in bad(run, "--data", "missing.csv", "--store", "none", command="gram")
