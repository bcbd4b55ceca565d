"""The table of disturbed commands, see ``reliability.py``: plan, capture, train and verify, killed and starved.

Each command runs in a process that is forked from this one, where everything is imported already: so a trial takes as
long as the work itself, and a hundred trials take minutes. A command's result is what it has written; it must be whole
or absent after each fault, and equal to the undisturbed one when the same command has ended by itself. Linux only.
"""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from reliability_faults import PATIENCE_S, ROOT, Line, count, in_pieces
from small_board import small_board

import simdev.__main__

MODEL = """
import torch
from simdev import TrainingStep

def step():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    labels = torch.zeros(2, dtype=torch.long)
    loss = lambda model, rows, labels: torch.nn.functional.cross_entropy(model(rows), labels)
    return TrainingStep(model, (torch.zeros(2, 8), labels), loss, torch.optim.SGD(model.parameters(), lr=0.1))
"""
TINY = "gpt-3.6b[width=256,layers=2,heads=4,length=128,vocabulary=1024]"


@dataclass
class Case:
    """A command: its words in a folder of its own, what it needs there, and the files that are its result."""

    name: str
    words: list[str]
    results: tuple[str, ...]
    prepare: Callable[[Path], object] = lambda folder: None
    resumes: bool = False  # it writes checkpoints, so that a result may appear in parts


def cases() -> list[Case]:
    plan = ["plan", TINY, "dgx-a100", "--batch", "8", "--microbatch", "1", "--recompute", "none", "--evaluations", "2"]
    return [
        Case("simdev plan", [*plan, "-j", "1", "-o", "plan.json"], ("plan.json",)),
        Case("simdev capture", ["capture", "model.py:step", "-o", "step.npz"], ("step.npz",), _model),
        Case(
            "simdev train",
            ["train", "-p", "colocrl", "-w", "transformer-xl-2", "-t", "p100x2", "--evaluations", "8", "-o", "policy"],
            ("policy/policy.safetensors", "policy/policy.json"),
            resumes=True,
        ),
        Case("simdev verify", ["verify", "board", "--engine", "fast", "-j", "1"], ("board/results.csv",), _board),
    ]


def _model(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL, encoding="utf-8")


def _board(folder: Path) -> None:
    master = folder.parent / "board"
    if not master.is_dir():
        small_board(master)
    shutil.copytree(master, folder / "board")


class Trials:
    """Runs the commands of :func:`cases` in folders below ``scratch``, and compares what they write."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        self.number = 0
        self._whole: dict[str, dict[str, bytes]] = {}
        self._seconds: dict[str, float] = {}
        os.environ["SIMDEV_CAPTURES"] = str(scratch / "captures")
        import torch  # noqa: F401

        import simdev.cli.main  # noqa: F401

    def folder(self, case: Case) -> Path:
        """A new folder in which nothing has run yet."""
        self.number += 1
        folder = self.scratch / f"trial{self.number}"
        folder.mkdir()
        case.prepare(folder)
        return folder

    def start(self, case: Case, folder: Path, before: Callable[[], None] = lambda: None) -> int:
        """The process of the command, in a process group of its own; ``before`` is called in it. Its messages go to
        ``folder/../messages``."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            for number, path in ((0, os.devnull), (1, os.devnull), (2, self.messages)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number == 2 else 0), 0o666), number)
            os.chdir(folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            before()
            sys.argv = ["simdev", *case.words]
            sys.modules["__main__"] = simdev.__main__  # which its worker processes import, too

            try:
                simdev.__main__.main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            multiprocessing.util._exit_function()
        finally:
            sys.stderr.flush()
            os._exit(code)

    @property
    def messages(self) -> Path:
        return self.scratch / "messages"

    def end(self, pid: int) -> tuple[int, str]:
        """Wait for the process and return its exit code (negative: the signal that ended it) and its messages."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status), self.messages.read_text(errors="replace")
            time.sleep(0.005)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 1, "Traceback: no end"

    def run(self, case: Case, folder: Path, before: Callable[[], None] = lambda: None) -> tuple[int, str]:
        return self.end(self.start(case, folder, before))

    def results(self, case: Case, folder: Path) -> dict[str, bytes]:
        """The result files that are there."""
        return {name: (folder / name).read_bytes() for name in case.results if (folder / name).is_file()}

    def whole(self, case: Case) -> dict[str, bytes]:
        """The result files of the command without a disturbance."""
        if case.name not in self._whole:
            for _ in range(2):  # the first run compiles and fills caches, the second one is timed
                folder, begun = self.folder(case), time.monotonic()
                code, text = self.run(case, folder)
                if code:
                    raise SystemExit(f"{case.name}: exit code {code}\n{text}")
                self._seconds[case.name] = time.monotonic() - begun
            self._whole[case.name] = self.results(case, folder)
        return self._whole[case.name]

    def seconds(self, case: Case) -> float:
        """How long the command takes without a disturbance."""
        self.whole(case)
        return self._seconds[case.name]

    def harmed(self, case: Case, folder: Path) -> bool:
        """Whether a result lies there that is not the undisturbed one."""
        found = self.results(case, folder)
        return not case.resumes and any(data != self.whole(case)[name] for name, data in found.items())

    def differs(self, case: Case, folder: Path) -> bool:
        return self.results(case, folder) != self.whole(case)

    def resumed(self, case: Case, folder: Path) -> bool:
        """Whether the same command, undisturbed, gives the undisturbed result without a traceback."""
        code, text = self.run(case, folder)
        return code == 0 and "Traceback" not in text and not self.differs(case, folder)


def table(scale: float) -> list[str]:
    """100 kills of each command and a tenth as many of each other fault, times ``scale``."""
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        Path(scratch).chmod(0o755)
        found = [*lines(Path(scratch), count(100, scale))]
    header = ["| what was done | times | results damaged | equal results |", "|---|---|---|---|"]
    return header + [line.text() for line in found if line.times]


def lines(scratch: Path, times: int) -> Iterator[Line]:
    """The lines, each as soon as its trials are over."""
    trials, few, very_few = Trials(scratch), max(1, times // 10), max(1, times // 50)
    plan, capture, train, verify = cases()
    for case in (plan, capture, train, verify):
        yield in_pieces(f"`SIGKILL` to `{case.name}`", times, partial(kills, trials, case))
    for case in (plan, capture, verify):
        what = f"Ctrl-C during `{case.name}`: no traceback, exit code 130 (or the best plan so far)"
        yield in_pieces(what, few, partial(interrupts, trials, case))
    for case in (plan, capture, verify):
        what = f"Ctrl-C while `{case.name}` runs in the background: it continues"
        yield in_pieces(what, few, partial(in_the_background, trials, case))
    for case in (plan, capture):
        what = f"a disk that is full for `{case.name}`: one sentence"
        yield in_pieces(what, few, partial(small_files, trials, case))
    what = "a folder that may only be read, not as root: one sentence (`verify` needs no more)"
    yield in_pieces(what, 4, partial(read_only, trials))
    for case in (plan, capture):
        what = f"a limit on the memory of `{case.name}`: the result, or one sentence"
        yield in_pieces(what, 3 * few, partial(little_memory, trials, case))
    if shutil.which("cc") is None:
        print("the clock does not jump: no C compiler", file=sys.stderr)
    else:
        for case in (plan, capture, verify):
            what = f"a clock that jumps by a day, back and forth, at every look: `{case.name}`"
            yield in_pieces(what, very_few, partial(jumping_clock, trials, case))
    if find_spec("distributed") is not None:
        for what, whole in CLUSTER_FAULTS.items():
            yield in_pieces(what, very_few, partial(cluster, trials, whole))


def kills(trials: Trials, case: Case, times: int) -> Line:
    """SIGKILL to all processes of a command at random moments; the same command then runs in the same folder."""
    line, whole = Line(""), trials.seconds(case)
    folder = trials.folder(case)
    while line.times < times:
        pid = trials.start(case, folder)
        time.sleep(random.uniform(0, whole))
        os.killpg(pid, signal.SIGKILL)
        code, _ = trials.end(pid)
        if code == -signal.SIGKILL:
            line.times += 1
            line.lost += trials.harmed(case, folder)
        else:
            line.different += trials.differs(case, folder)
            folder = trials.folder(case)
    line.different += not trials.resumed(case, folder)
    return line


def interrupts(trials: Trials, case: Case, times: int) -> Line:
    """Ctrl-C at random moments, from the first import to the last line: one sentence and exit code 130, or the end."""
    line, whole = Line("", times), trials.seconds(case)
    for _ in range(times):
        folder = trials.folder(case)
        pid = trials.start(case, folder)
        time.sleep(random.uniform(0.02, whole))
        os.killpg(pid, signal.SIGINT)
        code, text = trials.end(pid)
        wrong = code not in (130, 0) or "Traceback" in text
        line.lost += code == 130 and trials.harmed(case, folder)
        if wrong or not trials.resumed(case, folder):
            print(f"{case.name}: Ctrl-C: {code}\n{text}", file=sys.stderr)
            line.different += 1
    return line


def in_the_background(trials: Trials, case: Case, times: int) -> Line:
    """A job that a shell started with ``&`` ignores Ctrl-C in the terminal: it ends by itself."""
    line, whole = Line("", times), trials.seconds(case)
    for _ in range(times):
        folder = trials.folder(case)
        pid = trials.start(case, folder, lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None)
        time.sleep(random.uniform(0.02, whole))
        os.killpg(pid, signal.SIGINT)
        code, text = trials.end(pid)
        line.different += code != 0 or "Traceback" in text or trials.differs(case, folder)
    return line


def small_files(trials: Trials, case: Case, times: int) -> Line:
    """A limit on the size of files stands in for a full disk: one sentence, and the same command runs later."""
    line, size = Line("", times), max(map(len, trials.whole(case).values()))
    for _ in range(times):  # the limit also holds for the file of the messages, which is shorter than half of a result
        folder, most = trials.folder(case), random.randrange(size // 2, size)
        code, text = trials.run(case, folder, lambda most=most: _limit(resource.RLIMIT_FSIZE, most))
        line.lost += trials.harmed(case, folder)
        if code != 2 or "Traceback" in text or not trials.resumed(case, folder):
            print(f"{case.name}: {most} bytes: {code}\n{text}", file=sys.stderr)
            line.different += 1
    return line


def read_only(trials: Trials, times: int) -> Line:
    """A folder in which the user may not write, for each of the commands: one sentence, and nothing is written."""
    line = Line("", times)
    for case in cases()[:times]:
        folder = trials.folder(case)
        before = sorted(folder.rglob("*"))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        code, text = trials.run(case, folder, _without_rights)
        expected = 0 if case.name == "simdev verify" else 2
        if code != expected or "Traceback" in text or sorted(folder.rglob("*")) != before:
            print(f"{case.name}: read-only: {code}\n{text}", file=sys.stderr)
            line.different += 1
        folder.chmod(0o755)
    return line


def _without_rights() -> None:
    """Give up what root may do beside the owner of a file: writing where the owner may only read."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; a process that is started has them no more
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def little_memory(trials: Trials, case: Case, times: int) -> Line:
    """A limit on the address space: the result, or one sentence, within a minute of processor time."""
    line = Line("", times)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for _ in range(times):
        folder, most = trials.folder(case), used + int(random.uniform(0, 400) * 2**20)
        code, text = trials.run(case, folder, lambda most=most: _little(most))
        line.lost += trials.harmed(case, folder)
        if code not in (0, 2) or "Traceback" in text or not text and code or not trials.resumed(case, folder):
            print(f"{case.name}: {(most - used) >> 20} MiB: {code}\n{text}", file=sys.stderr)
            line.different += 1
    return line


def _little(most: int) -> None:
    """At most ``most`` bytes, and a minute of processor time: a command that retries for ever is a failure."""
    _limit(resource.RLIMIT_CPU, 60)
    _limit(resource.RLIMIT_AS, most)


def _limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += (now->tv_nsec / 1000 % 3 - 1) * 86400;
    return code;
}
"""  # yesterday, today or tomorrow, as it happens


def jumping_clock(trials: Trials, case: Case, times: int) -> Line:
    """The time of day jumps by a day at every look at the clock, in all processes of a command."""
    line = Line("", times)
    library = trials.scratch / "clock.so"
    (trials.scratch / "clock.c").write_text(CLOCK, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, trials.scratch / "clock.c", "-ldl"], check=True)
    for _ in range(times):
        folder = trials.folder(case)
        code, text = command(case.words, folder, LD_PRELOAD=str(library))
        if code or "Traceback" in text or trials.differs(case, folder):
            print(f"{case.name}: jumping clock: {code}\n{text}", file=sys.stderr)
            line.different += 1
    return line


def command(words: list[str], folder: Path, **environment: str) -> tuple[int, str]:
    """Exit code and messages of a command in a process that is started as a user starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "simdev", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stderr


CLUSTER = """
import sys, time
from distributed import LocalCluster
if __name__ == "__main__":
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50)
    workers = " ".join(str(worker.pid) for worker in cluster.workers.values())
    print(cluster.scheduler_address, workers, flush=True)
    time.sleep(3600)
"""


CLUSTER_FAULTS = {
    "`SIGKILL` to a Dask worker during `simdev plan` (another one takes its plans)": False,
    "`SIGKILL` to the Dask cluster during `simdev plan`: one sentence, nothing is written": True,
}


def cluster(trials: Trials, whole: bool, times: int) -> Line:
    """SIGKILL to a worker, or to the ``whole`` Dask cluster, in the middle of ``simdev plan``."""
    line, case = Line("", times), cases()[0]
    (trials.scratch / "cluster.py").write_text(CLUSTER, encoding="utf-8")
    for _ in range(times):
        server = subprocess.Popen(
            [sys.executable, str(trials.scratch / "cluster.py")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            address, *workers = server.stdout.readline().split()
            folder, begun = trials.folder(case), time.monotonic()
            words = [*case.words, "--backend", "dask", "--scheduler", address]
            plan = subprocess.Popen(
                [sys.executable, "-m", "simdev", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            messages = ""
            while "estimating" not in messages and plan.poll() is None and time.monotonic() < begun + PATIENCE_S:
                messages += plan.stderr.readline()
            if whole:
                os.killpg(server.pid, signal.SIGKILL)
            else:
                os.kill(int(workers[0]), signal.SIGKILL)
            messages += plan.communicate(timeout=PATIENCE_S)[1]
        finally:
            end_group(server)
        line.lost += trials.harmed(case, folder)
        code = plan.returncode
        right = code == 2 and "lost" in messages if whole else code == 0 and not trials.differs(case, folder)
        if not right or "Traceback" in messages:
            print(f"Dask: {code}\n{messages}", file=sys.stderr)
            line.different += 1
    return line


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.communicate()
