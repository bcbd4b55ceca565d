"""The Typer application: what every command is registered with."""

from __future__ import annotations

import functools
import sys
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  simdev bench --placer all
  simdev capture my_model.py:make_step -o my_model.npz
  simdev place my_model.npz my_machine.toml -p local-search -o found.json
  simdev explain found.json

\b
Exit codes: 0 done, 1 a check found differences, 2 wrong input, 3 runs were lost, 130 interrupted.
"""

app = typer.Typer(
    help="Simulate and benchmark the placement of neural networks on devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from simdev import __version__

        print(f"simdev {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def command(name: str, **settings):
    """Register a subcommand that exits with 130 on Ctrl-C."""

    def register(function):
        @app.command(name, **settings)
        @functools.wraps(function)
        def run(*args, **kwargs):
            try:
                function(*args, **kwargs)
            except KeyboardInterrupt:
                print("simdev: interrupted", file=sys.stderr)
                raise typer.Exit(130) from None

        return run

    return register
