"""``python -m simdev``: the same as the ``simdev`` command."""

from simdev.cli.main import main

if __name__ == "__main__":
    main()
