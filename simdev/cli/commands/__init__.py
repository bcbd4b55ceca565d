"""The subcommands of ``simdev``: one file per command, named like it and found by its presence."""
