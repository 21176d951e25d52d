"""The command that brings parts of a store to this host."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from hoploom.cli.command import Arguments, Command, add_json, add_option, for_people
from hoploom.config.values import parse_count

EVERY = 30.0  # seconds between lines where no bar can be drawn


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the store: a path, s3://BUCKET/PATH or gs://BUCKET/PATH")
    text = "the folder of the store on this host; what is there already is not transferred again"
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help=text)
    text = "a part to fetch; give it again for more (default: all)"
    add_option(parser, "--part", parse_count, appends=True, metavar="K", help=text)
    add_json(parser)


def _fetch(arguments: Arguments) -> int:
    from hoploom.store.fetch import fetch
    from hoploom.store.storage_path import StoragePath

    try:
        with _bytes_shown() as show:
            fetched = fetch(StoragePath(arguments.url), arguments.to, arguments.part, show)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("run the same command again: it goes on where this one stopped") from interrupt
    parts, seconds = ",".join(map(str, fetched.parts)), max(fetched.seconds, 1e-3)
    came = f"{_size(fetched.transferred)} in {seconds:.1f} s, {_size(int(fetched.transferred / seconds))}/s"
    here = f"parts {parts} of {arguments.url} are in {arguments.to}"
    what = (
        f"{came}; {_size(fetched.bytes - fetched.transferred)} were there" if fetched.transferred else "they were there"
    )
    print(f"{here}: {fetched.num_files} files, {_size(fetched.bytes)}; {what}", file=for_people(arguments), flush=True)
    if arguments.json:
        print(json.dumps({"to": str(arguments.to), **asdict(fetched)}))
    return 0


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


@contextmanager
def _bytes_shown() -> Iterator[Callable[[str, int, int], None]]:
    """Bandwidth and time left: a bar on a terminal, and now and then a line elsewhere, such as in a launch."""
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        begun = said = time.monotonic()
        doing = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal doing, begun, said
            now = time.monotonic()
            if what != doing:
                doing, begun = what, now
                if not bar.disable:
                    bar.reset(total)
                    bar.set_description_str(what)
            if not bar.disable:
                bar.update(done - bar.n)
            elif now - said >= EVERY:
                said, rate = now, done / max(now - begun, 1e-3)
                left = (total - done) / max(rate, 1.0) / 60
                line = f"{what}: {_size(done)} of {_size(total)}, {_size(int(rate))}/s, {left:.0f} min left"
                print(line, file=sys.stderr, flush=True)

        yield show


COMMANDS = {"fetch": Command(_fetch_arguments, _fetch, lambda a: f"reading {a.url}", "hoploom.store.fetch")}
