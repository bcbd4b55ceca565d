"""Files of rank programs: what is read, and what is refused in one sentence."""

import gzip
import json

import pytest

from simdev.cli.main import main
from simdev.errors import InvalidInput
from simdev.parallel import load_cluster, parse_mesh
from simdev.parallel.program import Call, Segment
from simdev.parallel.rank_program import Piece, RankProgram, is_rank_program, load_rank_program, save_rank_program
from simdev.parallel.replay import ProgramPlan, simulate_rank_program

KERNEL = Call("compute", "mm", "mm", 1 << 30, 1 << 20, 1 << 20, live_bytes=64)
REDUCE = Call("tp", "all_reduce", "all_reduce(2)", waits=(("compute", 0),), axes=("tp",), payload_bytes=1 << 20)


@pytest.fixture
def program():
    segment = Segment("step", (KERNEL, REDUCE, KERNEL), 32)
    return RankProgram("p", parse_mesh("tp=2"), (segment,), ((Piece(("S", 0, 0), 0),),), (1000,), 4, 128)


@pytest.fixture
def document(program, tmp_path):
    save_rank_program(program, tmp_path / "whole.rank.json.gz")
    return json.loads(gzip.decompress((tmp_path / "whole.rank.json.gz").read_bytes()))


def read(tmp_path, document):
    path = tmp_path / "changed.rank.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return load_rank_program(path)


def test_a_whole_step_is_simulated(program):
    report = simulate_rank_program(ProgramPlan(program, load_cluster("dgx-h100")))
    assert report.peak_bytes.tolist() == [1064]
    assert report.plan.flops == 2 * 2 * (1 << 30) and report.plan.tokens == 4 * 128
    assert report.exposed_ns[0] == 0 or report.exposed_ns[0] < report.step_ns
    assert sum(report.kernel_ns[0].values()) == report.compute_ns[0]
    summary = report.summary()
    assert (summary["model"], summary["mesh"], summary["schedule"]) == ("p", "tp=2", "as captured")


def test_simulate_plan_prints_a_captured_program(program, tmp_path, monkeypatch, capsys):
    save_rank_program(program, tmp_path / "whole.rank.json.gz")
    monkeypatch.setattr("sys.argv", ["simdev", "simulate-plan", str(tmp_path / "whole.rank.json.gz"), "dgx-h100"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None) and capsys.readouterr().out.startswith("p on 2 x dgx-h100, tp=2, as captured")


@pytest.mark.parametrize("name", ["config.json", "step.npz", "my_model.py:make_step"])
def test_files_of_models_are_no_rank_programs(name, tmp_path):
    """A configuration without brackets names a model, as with them."""
    path = tmp_path / name
    path.write_text("{}")
    assert not is_rank_program(str(path))


@pytest.mark.parametrize("name", ["p.rank.json.gz", "p.rank.json", "p.gz"])
def test_files_of_rank_programs(name, tmp_path):
    (tmp_path / name).write_text("{}")
    assert is_rank_program(str(tmp_path / name))


@pytest.mark.parametrize("text", ["", "dgx-h100\n[nodes=2]", "dgx-h100[nodes=0]"])
def test_malformed_clusters_are_refused(text):
    with pytest.raises(InvalidInput):
        load_cluster(text)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "other"}, "expected a rank program"),
        ({"mesh": {"tp": 0}}, "mesh: expected a whole number"),
        ({"mesh": {"colour": 2}}, "mesh: unknown mesh axis"),
        ({"mesh": {"tp": 2, "pp": 2}}, "pieces: expected those of 2 pipeline ranks"),
        ({"mesh": {"cp": 2}}, "a collective along tp, not of cp=2"),
        ({"name": 3}, "name: expected a name"),
        ({"batch": -1}, "batch: expected a whole number"),
        ({"resident_bytes": [1.5]}, "resident_bytes: expected a whole number"),
        ({"segments": []}, "segments: expected a list"),
        ({"segments": [["step", 0, []]]}, "segment 0 has no calls"),
        ({"segments": [["step", 0, [["compute"]]]]}, "call 0 of segment 0 is malformed"),
        ({"pieces": [[["X", 0, 0, 0, 0]]]}, "no such action or segment"),
        ({"pieces": [[["S", 0, 0, 9, 0]]]}, "no such action or segment"),
        ({"pieces": [[["S", 0, 0]]]}, "expected action, stage, microbatch"),
    ],
)
def test_malformed_files_are_refused(tmp_path, document, change, message):
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, {**document, **change})


@pytest.mark.parametrize(
    "place, value", [(0, 3), (3, -1), (3, 1 << 60), (6, [["compute", -1]]), (7, ["colour"]), (9, "x")]
)
def test_malformed_calls_are_refused(tmp_path, document, place, value):
    document["segments"][0][2][1][place] = value
    with pytest.raises(InvalidInput, match="call 1 of segment 0 is malformed"):
        read(tmp_path, document)


@pytest.mark.parametrize(
    "data, message", [(b"", "not JSON"), (b"text", "not JSON"), (gzip.compress(b"{", mtime=0)[:-9], "ended before")]
)
def test_files_that_are_none_are_refused(tmp_path, data, message):
    path = tmp_path / "p.rank.json.gz"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        load_rank_program(path)


def test_ranks_that_wait_for_each_other_are_named(program):
    f, b = Piece(("F", 0, 0), 0), Piece(("B", 0, 0), 0)
    later = Piece(("F", 1, 0), 0), Piece(("B", 1, 0), 0)
    mesh = parse_mesh("tp=2,pp=2")
    stuck = RankProgram("p", mesh, program.segments, ((b, f), later), (0, 0))
    with pytest.raises(InvalidInput, match="rank 0 at B0.0 waits for B1.0; rank 1 at F1.0 waits for F0.0"):
        simulate_rank_program(ProgramPlan(stuck, load_cluster("dgx-h100")))


def test_a_triton_kernel_is_one_op_with_the_bytes_of_its_tensors(monkeypatch):
    import sys
    from types import ModuleType

    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.parallel.capture.record import RankRecorder

    class JITFunction:  # as triton.jit makes it: a GPU is asked for at the launch
        def __init__(self, fn):
            self.fn = fn

        def __getitem__(self, grid):
            return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

        def run(self, *args, grid, warmup, **kwargs):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    class Autotuner(JITFunction):
        pass

    for name, launcher in (("triton.runtime.jit", JITFunction), ("triton.runtime.autotuner", Autotuner)):
        module = ModuleType(name)
        setattr(module, launcher.__name__, launcher)
        monkeypatch.setitem(sys.modules, name, module)

    def scale(x, out, n, BLOCK):
        raise AssertionError

    kernel = JITFunction(scale)
    with FakeTensorMode():
        x = torch.empty(10, 8)
        recorder = RankRecorder()
        with recorder:
            out = torch.zeros(10, 8)
            kernel[(1,)](x, out, 80, BLOCK=16)
            Autotuner(kernel)[(1,)](out, out=out, n=80)
            out + 1
    kinds = [(entry.kind, entry.signature, entry.flops, entry.read + entry.written) for entry in recorder.entries]
    assert kinds[1] == ("triton", "triton.scale(f32[10,8],f32[10,8])", 0, 640)
    assert [kind for kind, *_ in kinds] == ["zeros", "triton", "triton", "add"]
    assert kinds[2] == kinds[1]  # an autotuner tries nothing
    with pytest.raises(RuntimeError, match="active drivers"):
        kernel[(1,)](x, out, 80, BLOCK=16)


def test_recorded_views_are_those_of_fake_tensors():
    """The recorder computes views itself; they have the shapes and the storage that a fake tensor's mode gives them."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.parallel.capture.record import VIEWS, RankRecorder

    aten = torch.ops.aten
    arguments = {
        aten.view.default: ([8, 3],),
        aten._unsafe_view.default: ([2, 12],),
        aten.transpose.int: (0, 1),
        aten.slice.Tensor: (0, 1, 3),
        aten.as_strided.default: ([2, 2], [6, 1], 2),
        aten.unsqueeze.default: (1,),
        aten.expand.default: ([5, 4, 6],),
        aten.squeeze.dim: (0,),
    }
    with FakeTensorMode():
        usual = torch.empty(4, 6, dtype=torch.bfloat16)
        others = {
            aten.squeeze.dim: usual[:1],
            aten.view_as_complex.default: torch.empty(4, 2),
            aten.view_as_real.default: torch.empty(4, dtype=torch.complex64),
        }
        recorder = RankRecorder()
        for view in VIEWS:
            x = others.get(view, usual)
            wanted = view(x, *arguments.get(view, ()))
            with recorder:
                found = view(x, *arguments.get(view, ()))
            for one in ("shape", "dtype", "device", "requires_grad"):
                assert getattr(found, one) == getattr(wanted, one), view
            assert (found.stride(), found.storage_offset()) == (wanted.stride(), wanted.storage_offset()), view
            assert type(found) is type(wanted) and found.untyped_storage()._cdata == x.untyped_storage()._cdata, view
    assert not recorder.entries and not recorder.live_bytes
