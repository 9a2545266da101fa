"""The command line: `ntk-ln check`, `ntk-ln gram`, `ntk-ln reproduce`."""

import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ntk_ln import _memory
from ntk_ln.data import Dataset, load_features, load_table, sine

if TYPE_CHECKING:
    from ntk_ln.check import CheckResult

# JAX and matplotlib are imported inside the command, so that --help and bad input answer at once.

SEED = 0


class Kernel(StrEnum):
    """Choices of --kernel."""

    ntk = "ntk"
    nngp = "nngp"


class Precision(StrEnum):
    """Choices of --dtype."""

    float32 = "float32"
    float64 = "float64"


_stopped = ["stopped, nothing was written"]
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def _commands() -> None:
    """Infinitely wide networks with and without LayerNorm: what they predict far from the data."""


@app.command()
def check(
    data: Annotated[
        Path | None,
        typer.Option(help="CSV (.csv, .csv.gz, .csv.xz), Parquet or NPZ. Default: 100 points of y = sin x on [-pi, pi]."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target column of --data; every other column is a feature.")] = None,
    rows: Annotated[
        int | None, typer.Option(help=f"Use this many rows of --data, drawn at random (seed {SEED}) and kept in file order.")
    ] = None,
    network: Annotated[Path | None, typer.Option(help="JSON list of layers. Default: mlp(2).")] = None,
    noise: Annotated[float, typer.Option(help="Variance of the observation noise, added to the diagonal of K.")] = 0.0,
    standardize: Annotated[
        bool, typer.Option(help="Centre each feature of --data and divide it by its standard deviation. The target stays raw.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder of the report: new, empty, or an earlier report.")] = Path("ntk-ln-report"),
) -> None:
    """Compare a network with its LayerNorm counterpart: bounds, far field, theorems, report and plots.

    Exit status: 0 if every theorem that applies holds, 1 if one fails, 2 on bad input.
    """
    with _as_bad_input():
        dataset = _dataset(data, target, rows, standardize)
        if not 0 <= noise < float("inf"):
            raise ValueError(f"--noise must be a finite variance >= 0. Got {noise:g}.")
        config = None if network is None else _json(network)
        from ntk_ln import report

        report.check_folder(out)

    import ntk_ln as nl
    from ntk_ln.check import STEPS, check, fit

    with warnings.catch_warnings(record=True) as notes, _progress() as progress:
        task = progress.add_task("posterior", total=STEPS + len(report.plots.FIGURES) + 1)

        def step(label: str) -> None:
            progress.update(task, advance=1, description=label)

        with _as_bad_input("" if network is None else f"{network}: "):
            try:
                net = nl.mlp(2) if config is None else nl.network_from_config(config)
            except RecursionError:
                raise ValueError("residuals are nested too deeply.") from None
        with _as_bad_input():
            fitted = fit(dataset, net, noise)
        result = check(dataset, fitted, noise, step)
        with _as_bad_input():
            report.write(result, out, lambda name: step(f"figure {name}"))
    _print(result, out, sorted({str(note.message) for note in notes}))
    raise typer.Exit(0 if result.holds else 1)


@app.command()
def gram(
    data: Annotated[Path, typer.Option(help="CSV (.csv, .csv.gz, .csv.xz), Parquet or NPZ.")],
    store: Annotated[Path, typer.Option(help="Folder of the Zarr store: new, empty, or of an earlier run with the same input.")],
    target: Annotated[str | None, typer.Option(help="Column of --data that is not a feature.")] = None,
    rows: Annotated[
        int | None, typer.Option(help=f"Use this many rows of --data, drawn at random (seed {SEED}) and kept in file order.")
    ] = None,
    network: Annotated[Path | None, typer.Option(help="JSON list of layers. Default: mlp(2).")] = None,
    kernel: Annotated[Kernel, typer.Option(help="Which kernel.")] = Kernel.ntk,
    dtype: Annotated[Precision, typer.Option(help="Of the store; float32 takes half of the disk.")] = Precision.float64,
    tile: Annotated[int | None, typer.Option(help="Rows and columns of a tile. Default: 1008.")] = None,
    standardize: Annotated[bool, typer.Option(help="Centre each feature and divide it by its standard deviation.")] = True,
) -> None:
    """Write the Gram matrix of a table's rows to disk, tile by tile; a run that was stopped goes on where it was.

    Exit status: 0 when the store is complete, 2 on bad input.
    """
    with _as_bad_input():
        x = load_features(data, target, rows, SEED, standardize).astype(dtype.value)
        config = None if network is None else _json(network)
        import ntk_ln as nl

    with _as_bad_input("" if network is None else f"{network}: "):
        net = nl.mlp(2) if config is None else nl.network_from_config(config)
    _stopped.append("stopped; the same command goes on from here")
    with _as_bad_input():
        stored = nl.stream_gram({Kernel.ntk: nl.NTK, Kernel.nngp: nl.NNGP}[kernel](net), x, store, tile=tile)
    n, size = len(stored), stored.array.nbytes / 1e9
    Console().print(f"{n} x {n}, {dtype.value}, {size:.3g} GB: {store}", highlight=False, soft_wrap=True)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help='An experiment of the paper, "all", or "list".')],
    data: Annotated[
        Path | None, typer.Option(help="The data of experiments that need some: a file, or a folder of images.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds and a tenth of the steps: minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="At most so many seeds, instead of the paper's number.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results; a run that was stopped goes on from what it holds.")] = Path(
        "ntk-ln-reproduce"
    ),
) -> None:
    """Repeat the paper's experiments, each finite network beside its infinite-width counterpart.

    Exit status: 0 if everything that has a published statement agrees with it, 1 if something does not, 2 on bad input.
    """
    from ntk_ln import experiments

    console = Console(highlight=False, markup=False)
    with _as_bad_input():
        if name not in ("all", "list", *experiments.NAMES):
            raise ValueError(f"ntk-ln reproduce knows {', '.join(experiments.NAMES)}, all and list. Got {name!r}.")
        if data is not None and not (data.is_file() or (name == "utkface" and data.is_dir())):
            raise ValueError(f"The data file {str(data)!r} does not exist.")
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out needs a folder. Got the file {str(out)!r}.")
    if name == "list":
        for each in experiments.NAMES:
            console.print(f"{each:<12} {experiments.module(each).TITLE}")
        return
    from ntk_ln.experiments._run import Settings

    settings = Settings(out, quick, data, seeds, lambda line: print(line, file=sys.stderr, flush=True))
    _stopped.append("stopped; the same command goes on from here")
    agree = True
    every = [each for each in experiments.NAMES if each not in experiments.ALONE]
    if name == "all":
        console.print(f"Not in this run, for data of your own: {', '.join(experiments.ALONE)}.")
    for each in every if name == "all" else (name,):
        with _as_bad_input():
            report = experiments.module(each).run(settings)
            folder = report.write(settings)
        agree &= report.agrees
        _print_experiment(console, report, quick, seeds)
        console.print(f"{folder}\n", soft_wrap=True)
    raise typer.Exit(0 if agree else 1)


def _print_experiment(console: Console, report: Any, quick: bool, seeds: int | None) -> None:
    less = " (quick: fewer seeds and steps)" if quick else "" if seeds is None else f" (at most {seeds} seeds)"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=report.title + less)
    table.title_justify = "left"
    table.add_column("", min_width=24)
    for heading in ("mean", "95% interval"):
        table.add_column(heading, justify="right")
    table.add_column("published", min_width=12)
    table.add_column("agrees", no_wrap=True)
    for row in report.rows:
        if row.published or row.agrees is not None:
            interval = f"+- {row.high - row.mean:.2g}" if row.seeds > 1 else ""
            verdict = {True: Text("yes", "green"), False: Text("NO", "bold red"), None: Text("")}[row.agrees]
            table.add_row(row.what, f"{row.mean:.4g}", interval, row.published, verdict)
    console.print(table)
    console.print(f"All {len(report.rows)} numbers, seeds and notes: results.csv, results.json.")


class BadInput(Exception):
    """What the user can mend: one line and status 2."""


@contextmanager
def _as_bad_input(prefix: str = "") -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, ImportError, OSError, MemoryError) as error:
        raise BadInput(f"{prefix}{error}") from error


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; bad input is one line on stderr and status 2, a fault of ours a traceback and status 3."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
    try:
        status = app(arguments, standalone_mode=False)
    except BadInput as error:
        status = _fail(error)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:  # the reader of a pipe has seen enough; the report is there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        usage = getattr(error, "format_message", None)  # an error of the parser, whose classes typer does not export
        if usage is not None:
            status = _fail(f"{usage().rstrip('.')}. See ntk-ln check --help.")
        else:
            traceback.print_exc()
            status = 3
    if status == 130:  # Ctrl-C, which typer may have turned into a status itself
        _fail(_stopped[-1])
    sys.exit(status or 0)


def _stop(number: int, _: object) -> None:
    """Ends the process at once: threads that compile cannot be asked to, and an exception may be lost in a callback."""
    from ntk_ln.report import discard_unfinished

    discard_unfinished()
    _fail(_stopped[-1])
    sys.stderr.flush()
    os._exit(128 + number)


def _fail(message: object) -> int:
    print("ntk-ln:", " ".join(str(message).split()), file=sys.stderr)
    return 2


def _dataset(path: Path | None, target: str | None, rows: int | None, standardize: bool) -> Dataset:
    if path is None:
        for name, value in (("--target", target), ("--rows", rows)):
            if value is not None:
                raise ValueError(f"{name} needs --data FILE. Got {value} without one.")
        return sine()
    dataset = load_table(path, target, rows, SEED)
    _check_memory(len(dataset.y))
    return dataset.standardize() if standardize else dataset


def _check_memory(n: int) -> None:
    """Two Gram matrices, their factors and some working room have to fit: six n x n arrays."""
    needed, there = 6 * 8 * n**2, _memory.available()
    if needed > there:
        most = int((there / 48) ** 0.5)
        raise ValueError(f"{n} rows need {needed / 1e9:.3g} GB, {there / 1e9:.3g} are free. Pass --rows with at most {most}.")


def _json(path: Path) -> list[dict[str, Any]]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"The network file {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ValueError(f"The network file {str(path)!r} is not JSON: {error}.") from error
    except RecursionError:
        raise ValueError(f"The network file {str(path)!r} is nested too deeply.") from None
    if not isinstance(config, list) or not all(isinstance(layer, dict) for layer in config):
        raise ValueError(f'The network file {str(path)!r} must be a list of layers such as {{"layer": "dense"}}.')
    return config


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(result: "CheckResult", out: Path, notes: list[str]) -> None:
    from ntk_ln.report import LABEL, fate, rows

    console = Console(highlight=False, markup=False)
    style = {"plain": "red", "layer_norm": "cyan"}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for network in result.networks:
        table.add_column(LABEL[network.name], justify="right", header_style=f"bold {style[network.name]}")
    for label, cells in rows(result):
        table.add_row(label, *cells)
    console.print(table)
    for network in result.networks:
        console.print(f"{LABEL[network.name]}: the mean {fate(network)}.", style=style[network.name])
    verdicts = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, found in result.theorems:
        word = Text("holds", "green") if found.holds else Text("FAILS", "bold red")
        verdicts.add_row(f"Theorem {found.name}", LABEL[name], word, found.statement)
    console.print()
    console.print(verdicts)
    for note in notes:
        console.print(f"Note: {note}", style="yellow")
    console.print(f"\nReport: {out / 'report.html'}", soft_wrap=True)


if __name__ == "__main__":
    main()
