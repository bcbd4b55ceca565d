"""Every schedule, with context, expert and tensor parallelism: folded and unfolded steps, both engines and the
validator agree to the nanosecond."""

import numpy as np
import pytest

from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh
from simdev.parallel.orders import SCHEDULES
from simdev.parallel.plan import prepare, simulate_program
from simdev.sim import validate

pytest.importorskip("torch")
COMMON = "width=64,layers=4,heads=4,kv_heads=2,vocabulary=256,length=64"
LLAMA, MIXTRAL = f"llama3-8b[{COMMON},hidden=128]", f"mixtral-8x7b[{COMMON},hidden=32,experts=8,active=2]"
ONE = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1)]
TWO = [("interleaved", 2), ("looped-bfs", 2), ("zero-bubble", 2), ("zbv", 2), ("dualpipe-v", 2)]
MESHES = [(LLAMA, "dp_shard=2,cp=2,pp=2"), (MIXTRAL, "dp_shard=2,ep=2,pp=2"), (MIXTRAL, "ep=2,tp=2,pp=2")]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Captured stages, shared by the schedules of a model; kept for this file alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield {}


def test_no_schedule_is_left_out():
    assert {name for name, _ in (*ONE, *TWO)} == set(SCHEDULES)


@pytest.mark.parametrize("entry, mesh", MESHES, ids=["cp", "ep", "ep-tp"])
@pytest.mark.parametrize("schedule, stages", (*ONE, *TWO))
def test_all_ways_to_simulate_agree(known, entry, mesh, schedule, stages):
    spec, parameters = find_model(entry)
    host = Host(3000, 2000, 1000, 9000, 4000)
    plan = Plan(spec, parameters, load_cluster("dgx-h100"), parse_mesh(mesh), 4, schedule, stages, host)
    program = prepare(plan, known=known.setdefault(entry, {}))
    folded, unfolded = simulate_program(program), simulate_program(program, unfolded=True)
    reference = simulate_program(program, unfolded=True, engine="reference")
    assert folded.step_ns == unfolded.step_ns == reference.step_ns
    assert np.array_equal(unfolded.schedule.op_start, reference.schedule.op_start)
    assert np.array_equal(folded.compute_ns, unfolded.compute_ns)
    validate(unfolded.unrolled.problem, unfolded.unrolled.placement, unfolded.schedule)
