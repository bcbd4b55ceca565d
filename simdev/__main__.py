"""The ``simdev`` command, also as ``python -m simdev``. All else is imported inside, so that Ctrl-C is one sentence
during the imports, too."""

import atexit
import os
import sys


def command() -> None:
    """Entry point: :func:`main`. A process that searched plans then ends without freeing its objects one by one, which
    takes seconds, unless a user's code ran in it, which may have files of its own to flush."""
    status = 1  # also of an error that Python prints

    def leave() -> None:
        if "simdev.planners" not in sys.modules:
            return
        from simdev.user_file import is_user_module

        if any(map(is_user_module, list(sys.modules))):
            return
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        except (OSError, ValueError):
            return  # Python's own end says what is wrong
        os._exit(status)

    atexit.register(leave)  # before those of what is imported next, so that it is called after them
    try:
        main()
        status = 0
    except KeyboardInterrupt:
        status = 130
        raise
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def main() -> None:
    """Exits with 130 on Ctrl-C, otherwise as :func:`simdev.cli.main.main` does."""
    try:
        _one_thread_in_little_memory()
        from simdev.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("simdev: interrupted", file=sys.stderr)
        sys.exit(130)


def _one_thread_in_little_memory() -> None:
    """Under a limit on the address space (``ulimit -v``), OpenBLAS gets one thread: where it cannot start the others,
    it sends this process the signal of Ctrl-C."""
    try:
        import resource
    except ImportError:  # Windows
        return
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


if __name__ == "__main__":
    command()
