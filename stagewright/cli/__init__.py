"""The command line. Heavy libraries are imported by the commands that need them, when they run."""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stagewright.cli.pages import ROOT_EXAMPLES, Commands, with_plain_flags
from stagewright.graphs.documents.errors import InputError

# Everything that typer raises for a wrong command line; typer has no public name for it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_PYDANTIC = (
    ("Value error, ", ""),
    ("Input should be a valid integer, unable to parse string as an integer", "no whole number"),
    ("Input should be a valid number, unable to parse string as a number", "no number"),
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
_STDERR = 2
_STOPPING = b"stagewright: stopping; a second signal ends it immediately\n"


class CommandLine(TyperGroup):
    """The commands; bad input ends each of them with one line on stderr and exit code 2."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.lazy = Commands()
        self.lazy.update(self.commands)
        self.commands = self.lazy

    def format_help(self, *page: Any) -> None:
        """Write the page that lists the commands."""
        with self._listed():
            super().format_help(*page)

    def shell_complete(self, *asked: Any) -> Any:
        """Complete the names of commands."""
        with self._listed():
            return super().shell_complete(*asked)

    @contextlib.contextmanager
    def _listed(self) -> Iterator[None]:
        """Replace the commands by their names and summaries while the body runs."""
        self.commands = self.lazy.listed()
        try:
            yield
        finally:
            self.commands = self.lazy

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters with ``--help``."""
        return with_plain_flags(super().get_params(ctx))

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit with the code that it returns: 0 answered, 1 the answer is no."""
        _print_any_name()
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except InputError as error:
            message = str(error)
        except UsageError as error:
            message = _plain(error.format_message())  # type: ignore[attr-defined]
        except BrokenPipeError:
            _drop_output()
            sys.exit(1)
        except OSError as error:
            if error.errno not in FULL or error.filename is not None:
                raise
            _drop_output()
            message = f"standard output cannot be written: {error.strerror}"
        else:
            sys.exit(code or 0)
        print(f"stagewright: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)


def _plain(message: str) -> str:
    """A message of typer about a wrong value, without the words of pydantic."""
    for words, plain in _PYDANTIC:
        message = message.replace(words, plain)
    return message


def _print_any_name() -> None:
    """Escape characters that the terminal cannot show, instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Discard the buffer of stdout, which can no longer be written."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="stagewright",
    cls=CommandLine,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=ROOT_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def stagewright(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> int:
    """Plan distributed training, with a certified bound on the plan's cost."""
    if version:
        from importlib.metadata import version as installed_version

        print(f"stagewright {installed_version('stagewright')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def main() -> None:
    """Run the command line of this process."""
    interrupt_once()
    app()


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """A stop token that the first signal sets while the body runs; the second ends the process."""
    stop = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        _let_the_next_end()
        with contextlib.suppress(OSError):
            # On a terminal, the progress line says it; the next signal leaves no time for the rest.
            os.write(_STDERR, _SHOW_CURSOR if sys.stderr.isatty() else _STOPPING)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def interrupt_once() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt, as Python does, and the second end at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        _let_the_next_end()
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


def _let_the_next_end() -> None:
    """Let the kernel end this process at the next signal.

    A handler of Python would wait for a library that computes.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
