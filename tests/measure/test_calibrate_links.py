"""Link tables and their fits; links whose figures depend on the size."""

import gzip

import numpy as np
import pytest

from simdev.calibrate.links import LinkFit, fit, fit_table, ranges_toml, read_links
from simdev.errors import InvalidInput
from simdev.problem.costs import transfer_durations
from simdev.problem.topology import load_topology, parse_topology

TWO = {
    "name": "two",
    "kind": {"g": {"memory_gib": 1, "peak_tflops": {"f32": 1}, "memory_gb_per_s": 1}},
    "switches": ["s"],
    "device": [{"names": ["a", "b"], "kind": "g"}],
}
RANGES = [
    {"from_bytes": 0, "latency_us": 2, "gb_per_s": 1},
    {"from_bytes": 1000, "latency_us": -0.5, "gb_per_s": 2},
]


def test_one_line_is_found_exactly():
    size = np.arange(1, 101) * 1000
    assert fit(size, 5000 + size / 2) == ((0, pytest.approx(5000), pytest.approx(2e9)),)


def test_a_change_of_protocol_is_found():
    size = np.arange(1, 201) * 1000
    ns = np.where(size <= 60_000, 3000 + size, 20_000 + size / 10) * (1 + 0.001 * np.sin(size))
    ranges = fit(size, ns)
    assert [begin for begin, _, _ in ranges] == [0, 60_500]
    assert [rate for _, _, rate in ranges] == pytest.approx([1e9, 1e10], rel=0.02)
    link = LinkFit("x", ranges)
    assert np.abs(link.ns(size) / ns - 1).max() < 0.01


def test_times_in_whole_microseconds_may_look_flat():
    size = np.arange(1, 101) * 100
    ((_, latency, rate),) = fit(size, np.full(100, 7000.0))
    assert latency == pytest.approx(7000, rel=1e-3) and rate > 1e12


def test_three_kinds_of_files(tmp_path):
    sizes = [2**k for k in range(10, 24)]
    head = "time_stats.send_recv.median,size,num_workers,devices_per_node,collective\n"
    rows = "".join(f"{0.01 + size / 1e8},{size},2,{per},send_recv\n" for size in sizes for per in (1, 2))
    (tmp_path / "v.csv.gz").write_bytes(gzip.compress((head + rows + "x,1,2,1,send_recv\n").encode()))
    one, two = read_links(tmp_path / "v.csv.gz")
    assert (one.per_node, two.per_node, one.skipped, two.operation) == (1, 2, 1, "send_recv")
    assert one.ns[0] == pytest.approx(1e4 + 1024 / 1e2)
    rows = "".join(f"{size},1,float,{size * 2},1,{size},1\n" for size in sizes)
    (tmp_path / "x_8gpu.txt").write_text("size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n" + rows)
    (table,) = read_links(tmp_path / "x_8gpu.txt")
    assert (table.workers, table.operation, table.ns[0]) == (8, "all_reduce", 2048)
    rows = "".join(f"{size} {size // 4} float sum -1 {size / 1e3:.2f} 1.0 1.0 0\n" for size in sizes)
    text = "#  Rank  0\n#  Rank  1\n#       size         count      type   redop\n" + rows
    (tmp_path / "n.txt").write_text(text)
    (table,) = read_links(tmp_path / "n.txt")
    assert table.workers == 2 and table.ns[-1] == pytest.approx(sizes[-1], rel=1e-3)


@pytest.mark.parametrize("text", ["", "hello", "size(B),count\n5,5\n"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(InvalidInput):
        read_links(tmp_path / "t.txt")


def test_a_link_with_ranges_times_each_size_by_its_own():
    links = [
        {"ends": ["a", "s"], "gb_per_s": 1, "latency_us": 1, "ranges": RANGES},
        {"ends": ["s", "b"], "gb_per_s": 1.5, "latency_us": 1},
    ]
    topology = parse_topology(TWO | {"link": links}, source="t")
    ns, pair = transfer_durations(np.array([0, 500, 3000]), topology)
    # 2 + 1 us at 1 GB/s; from 1000 bytes -0.5 + 1 us at the smaller of 2 and 1.5 GB/s
    assert ns[pair[0, 1]].tolist() == [3000, 3500, 2500]
    assert ns[pair[1, 0]].tolist() == [3000, 3500, 2500]


def test_equal_routes_share_a_class():
    topology = load_topology("h100x8-nvswitch")
    _, pair = transfer_durations(np.array([1]), topology)
    gpus = pair[1:, 1:][~np.eye(8, dtype=bool)]
    assert len(set(gpus.tolist())) == 1


@pytest.mark.parametrize(
    "ranges, words",
    [
        ([RANGES[1]], "begin at 0"),
        ([RANGES[0], RANGES[0]], "rise"),
        ([RANGES[0] | {"gb_per_s": 0}], "positive"),
        ([RANGES[0] | {"x": 0}], "unknown key"),
    ],
)
def test_wrong_ranges_are_refused(ranges, words):
    link = {"ends": ["a", "b"], "gb_per_s": 1, "latency_us": 1, "ranges": ranges}
    with pytest.raises(InvalidInput, match=words):
        parse_topology(TWO | {"switches": [], "link": [link]}, source="t")


def test_ranges_are_written_as_a_topology_reads_them():
    import tomllib

    text = ranges_toml(LinkFit("x", ((0, 4000.0, 1e9), (100, -200.0, 2e9))), hops=2)
    rows = tomllib.loads(text)["ranges"]
    assert rows[1] == {"from_bytes": 100, "latency_us": -0.1, "gb_per_s": 2.0} and rows[0]["latency_us"] == 2.0


def test_the_public_tables_are_predicted_on_sizes_not_fitted_to(data_dir):
    """Send/recv tables and nccl-tests tables; vidur's all-reduce tables step between algorithms and are missed."""
    for path in sorted((data_dir / "links").glob("*/*_dgx.send_recv*")) + sorted(
        (data_dir / "links").glob("*/*gpu.txt")
    ):
        for table in read_links(path):
            assert fit_table(table).error < max(0.03, 1.3 * table.noise), table.name
