"""``python -m simdev``: the same as the ``simdev`` command."""

from simdev.cli import main

if __name__ == "__main__":
    main()
