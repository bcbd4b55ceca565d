"""The ``simdev`` command, also as ``python -m simdev``. All else is imported inside, so that Ctrl-C is one sentence
during the imports, too."""

import sys


def main() -> None:
    """Entry point: exits with 130 on Ctrl-C, otherwise as :func:`simdev.cli.main.main` does."""
    try:
        from simdev.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("simdev: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
