"""The ``simdev`` command: one file per command, progress displays and the doctor."""
