"""The Typer application: what every command is registered with."""

from __future__ import annotations

import functools
import sys
from typing import Annotated, Any

import typer
import typer.core

from simdev.errors import InvalidInput, UnknownName

EXAMPLES = """\b
Examples:
  simdev bench --placer all
  simdev capture my_model.py:make_step -o my_model.npz
  simdev place my_model.npz my_machine.toml -p local-search -o found.json
  simdev explain found.json

\b
Exit codes: 0 done, 1 a check found differences, 2 wrong input, 3 runs were lost, 130 interrupted.
"""

# What commands are for, in the order in which help shows it. A command without a topic stands under the first.
TOPICS = PLACE, OWN, BENCHMARK, JOBS, REAL, ABOUT = (
    "Place and simulate",
    "Bring your own",
    "Benchmark",
    "Parallel training jobs",
    "Costs and real devices",
    "About simdev",
)
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # wrong arguments, of the click that Typer brings
STUDY = "study"  # the topic of commands that stand under ``simdev study``


# What to type, by command: the end of its help, and of a message about wrong arguments.
EXAMPLE_OF = {
    "bench": "simdev bench -w nmt -t p100x4 -p heft -p expert -o my-results",
    "bound": "simdev bound nmt p100x4",
    "calibrate": "simdev calibrate my-trace.json --kind v100-sxm2-16gb -o my-devices.toml",
    "capture": "simdev capture torchvision:resnet50 -o resnet50.npz",
    "compare": "simdev compare leaderboard/standard my-results",
    "costs": "simdev costs nmt p100x4",
    "curve": "simdev curve leaderboard/standard -w nmt -t p100x4",
    "doctor": "simdev doctor",
    "execute": "simdev execute nmt my_machine.toml --placer expert",
    "explain": "simdev explain leaderboard/standard -w nmt -t p100x4",
    "gaps": "simdev gaps leaderboard/standard",
    "import": "simdev import model.onnx -o model.npz",
    "leaderboard": "simdev leaderboard leaderboard/standard --html board.html",
    "list": "simdev list placers",
    "place": "simdev place nmt p100x4 -p local-search -o found.json",
    "plan": "simdev plan llama3-8b 'dgx-h100[nodes=2]' --batch 64",
    "profile": "simdev profile nmt -o my_machine",
    "show": "simdev show nmt",
    "simulate": "simdev simulate nmt p100x4 --placer heft",
    "simulate-plan": "simdev simulate-plan llama3-8b dgx-h100 --mesh dp_shard=8",
    "submit": "simdev submit my-results -o my-results.zip",
    "train": "simdev train -p gdp -w nmt -t p100x4 --evaluations 2000 -o my-policy",
    "verify": "simdev verify leaderboard/standard",
    "view": "simdev view leaderboard/standard -w nmt -t p100x4 -o nmt.svg",
}


class Example(typer.core.TyperCommand):
    """A command whose messages about wrong arguments end with one that works."""

    def parse_args(self, ctx, args):
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            example = EXAMPLE_OF.get(self.name or "")
            if example is None:
                raise
            message = error.format_message().rstrip(".").replace("Value error, ", "")
            raise USAGE_ERROR(f"{message}. For example: {example}", ctx=ctx) from None


class CommandGroup(typer.core.TyperGroup):
    """A group whose message about an unknown command suggests one."""

    def resolve_command(self, ctx, args):
        """The command that ``args`` names. Raises :class:`UnknownName` if there is none."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownName("command", args[0], [*self.list_commands(ctx), "--help"], source=ctx.command_path)
        return super().resolve_command(ctx, args)


class Topics(CommandGroup):
    """A group whose help lists the commands by topic, and which says where a command that has moved stands."""

    def resolve_command(self, ctx, args):
        """The command that ``args`` names. Raises :class:`InvalidInput` if it stands under ``simdev study``."""
        moved = {entry.name for entry in study.registered_commands}
        if args and args[0] in moved and not ctx.resilient_parsing:
            raise InvalidInput(f"simdev {args[0]} is now simdev {STUDY} {args[0]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx, formatter) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        commands = {name: entry for name, entry in found.items() if entry is not None}
        width = max(map(len, commands))
        for topic in TOPICS:
            mine = [
                (f"{name:{width}}", entry.get_short_help_str(100))
                for name, entry in sorted(commands.items())
                if (getattr(entry, "rich_help_panel", None) or PLACE) == topic
            ]
            if mine:
                with formatter.section(topic):
                    formatter.write_dl(mine)


app = typer.Typer(
    cls=Topics,
    help="Simulate and benchmark the placement of neural networks on devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


study = typer.Typer(
    cls=CommandGroup,
    help="Compare simdev with measurements, papers and other simulators.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(study, name=STUDY, rich_help_panel=ABOUT)


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


def command(name: str, topic: str = PLACE):
    """Register a subcommand, which exits with 130 on Ctrl-C; under ``simdev study`` if that is the topic."""
    group, panel = (study, None) if topic == STUDY else (app, topic)
    example = EXAMPLE_OF.get(name) if group is app else None

    def register(function):
        @group.command(
            name, rich_help_panel=panel, cls=Example, epilog=f"\b\nExample:\n  {example}" if example else None
        )
        @functools.wraps(function)
        def run(*args, **kwargs):
            try:
                function(*args, **kwargs)
            except KeyboardInterrupt:
                print("simdev: interrupted", file=sys.stderr)
                raise typer.Exit(130) from None

        return run

    return register
