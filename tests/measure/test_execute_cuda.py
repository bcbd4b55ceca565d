"""The GPU worker without a GPU: its streams and events are stand-ins on which copies take a while, its memory is the
host's. What is tested is order: nobody reads a tensor before its copy is done."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(not CORES, reason="needs a core")


class Stream:
    def __init__(self, device=None):
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)

    def wait_stream(self, other):
        self.waits.append(other)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class Event:
    """Done once it has been asked for three times."""

    def __init__(self, enable_timing=False):
        self.asked = 0

    def record(self, stream):
        import time

        self.at = time.perf_counter_ns()

    def query(self):
        self.asked += 1
        return self.asked > 3

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at - self.at) / 1e6


class Cuda:
    """What the worker uses of ``torch.cuda``."""

    Stream, Event = Stream, Event
    default_generators = [torch.default_generator]

    @staticmethod
    def set_device(index):
        pass

    @staticmethod
    def synchronize(device=None):
        pass

    @staticmethod
    def stream(stream):
        return stream

    @staticmethod
    def reset_peak_memory_stats(device):
        pass

    @staticmethod
    def max_memory_allocated(device):
        return 12345

    @staticmethod
    def cudart():
        return Cuda

    @staticmethod
    def cudaHostRegister(address, size, flags):
        assert address and size
        return 0


class Torch:
    """PyTorch, but every GPU is the CPU."""

    cuda = Cuda

    @staticmethod
    def device(kind, index=None):
        return torch.device("cpu")

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(scope="module")
def program():
    from test_execute import net_step

    from simdev.measure.execute.record import record

    return record(net_step, "net", {}, seed=3)


def test_cpu_and_gpu_compute_what_one_device_computes(program, monkeypatch):
    import simdev.measure.execute.cuda as cuda
    from simdev.measure.execute.host import execute

    units = f"cpu:{CORES[0]}", "cuda:0"
    alone = execute(program, np.zeros(program.graph.n_ops, np.int32), units[:1], repeats=1, warmup=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "torch", Torch())
    graph, rng = program.graph, np.random.default_rng(2)
    for _ in range(3):
        devices = rng.integers(0, 2, graph.n_units).astype(np.int32)[graph.unit_of_op]
        execution = execute(program, devices, units, repeats=2, warmup=1)
        assert execution.peak_bytes[1] == 12345
        for value, bits in alone.results.items():
            assert (execution.results[value] == bits).all()
        for key, bits in alone.homes.items():
            assert (execution.homes[key] == bits).all()
        assert (execution.op_finish >= execution.op_start).all()
        assert (execution.sent_finish >= execution.sent_start).all()


def test_kernels_of_the_cpu_alone_are_refused(program, monkeypatch):
    import simdev.measure.execute.cuda as cuda
    from simdev.errors import SimdevError
    from simdev.graphs.workload import TrainingStep
    from simdev.measure.execute.host import execute
    from simdev.measure.execute.record import record

    def step():
        model = torch.nn.Linear(8, 8)

        def loss(model, x):
            q = model(x)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q).sum()

        return TrainingStep(model, (torch.randn(1, 2, 4, 8),), loss, torch.optim.SGD(model.parameters(), lr=0.1))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "torch", Torch())
    attention = record(step, "attention", {})
    with pytest.raises(SimdevError, match="has no kernel on a GPU"):
        execute(attention, np.zeros(attention.graph.n_ops, np.int32), ("cuda:0",), repeats=1)
