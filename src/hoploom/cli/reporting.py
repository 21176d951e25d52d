"""The commands that show what runs did: a page in a file, or live while they go on."""

import argparse
import signal
import sys
from contextlib import suppress
from pathlib import Path

from hoploom.cli.command import Arguments, Command, add_option, check_writable, read_address


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="+", help="the output folder of a run; several are compared")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: %(default)s)"
    )


def _report(arguments: Arguments) -> int:
    from hoploom.report.page import encoded
    from hoploom.report.reading import RunReader
    from hoploom.report.runs import run_page
    from hoploom.store.format import write_whole

    check_writable("--out", arguments.out)
    html = encoded(run_page([RunReader(folder) for folder in arguments.run]))
    write_whole(arguments.out, [html])
    path = str(arguments.out).encode(errors="backslashreplace").decode()  # a name may be no UTF-8
    print(f"wrote {path}, {len(html) / 1e3:,.0f} kB; open it in a browser")
    return 0


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    text = "address of the page; port 0 picks a free port (default: %(default)s)"
    add_option(parser, "--listen", read_address, default="127.0.0.1:0", metavar="HOST:PORT", help=text)
    parser.add_argument("--cert", type=Path, metavar="FILE", help="TLS: the certificate; needed beyond this host")
    parser.add_argument("--key", type=Path, metavar="FILE", help="TLS: its key")


def _watch(arguments: Arguments) -> int:
    from hoploom.report.reading import RunReader
    from hoploom.report.watch import LivePage

    runs = [RunReader(folder) for folder in arguments.run]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt, too
    try:
        with LivePage(runs, arguments.listen, arguments.cert, arguments.key) as live, suppress(KeyboardInterrupt):
            print("watching; open this page, and press Ctrl-C to stop:", file=sys.stderr, flush=True)
            print(live.url, flush=True)
            live.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


COMMANDS = {
    "report": Command(
        _report_arguments, _report, lambda a: f"reading {', '.join(map(str, a.run))}", "hoploom.report.runs"
    ),
    "watch": Command(_watch_arguments, _watch),
}
