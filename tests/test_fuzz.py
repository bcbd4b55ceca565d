"""Whatever a file holds, every reader answers with data or one short sentence (tests/tools/fuzz.py, on a few files)."""

import os

import fuzz
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

NAMES = (
    "results", "curves", "journal", "submission", "placement", "topology", "device file",
    "device trees", "measured costs", "measured costs json", "kineto", "kineto tar", "manifest", "policy header",
    "load problem", "import npz", "import json", "import csv", "import networkx", "import pipedream",
    "import dnn-partitioning", "import piper", "import baechi", "import cost-graph", "import execution-trace",
    "import chakra", "import chakra protobuf", "import onnx",
    "links vidur", "links nccl csv", "links nccl-tests", "links gzip", "op table", "op table gzip", "label",
    "label figures", "workbook", "kernel tables openxla", "kernel tables vidur", "kernel tables llmcompass",
    "kernel tables eleutherai", "training runs llm-foundry", "training runs torchtitan", "training runs vtrain",
    "comparison", "measured profile", "op signatures", "recorder steps", "kept capture",
    "configuration",
    "placements",
    "plans",
    "release",
    "plan file",
)  # fmt: skip
# The number of files for each reader. More by hand: SIMDEV_FUZZ=10000 pytest tests/test_fuzz.py
EXAMPLES = int(os.environ.get("SIMDEV_FUZZ", "30"))


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    return {reader.name: reader for reader in fuzz.readers(tmp_path_factory.mktemp("seeds"))}


def test_every_reader_is_listed(readers):
    assert set(readers) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_mutated_file_is_read_or_refused(readers, name):
    if readers[name].missing:
        pytest.importorskip(readers[name].missing)
    fuzz.try_seed(readers[name])

    @seed(7)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(draw=st.randoms(use_true_random=False))
    def check(draw):
        fuzz.try_file(readers[name], readers[name].mutate(readers[name].seed, draw))

    check()


def test_the_fuzzer_finds_a_traceback(readers, tmp_path, capsys):
    """A control: a reader that fails on some files is reported, with the file."""

    def careless(path):
        int(path.read_bytes()[:4], 16)

    broken = fuzz.Reader("careless", "a.txt", b"12ab", fuzz.mutate_bytes, careless)
    table = fuzz.run([broken], 0.5, 0, tmp_path / "kept")
    assert table["careless"]["failed"] and table["careless"]["read"]
    assert "careless: ValueError" in capsys.readouterr().err and list((tmp_path / "kept").iterdir())


def test_long_messages_are_failures(readers):
    reader = fuzz.Reader("talkative", "a.txt", b"x", fuzz.mutate_bytes, lambda path: talk())
    with pytest.raises(AssertionError, match="600 characters"):
        fuzz.try_file(reader, b"y")


def talk():
    from simdev.errors import SimdevError

    raise SimdevError("x" * 600)
