"""A progress bar for work that turns out to be long."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
AFTER = 5.0  # seconds of silence


def announced(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """The items, with a progress bar on a terminal once they have taken longer than `AFTER`."""
    if not sys.stderr.isatty():
        yield from items
        return
    start, bar, task = time.monotonic(), None, None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - start > AFTER:
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                task = bar.add_task(label, total=total)
            if bar is not None and task is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()
