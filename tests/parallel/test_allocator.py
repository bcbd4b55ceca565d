"""The model of PyTorch's caching allocator: sizes of segments, splits, merges, streams."""

import pytest

from simdev.parallel.costs.allocator import CachingAllocator

MIB = 1 << 20


def reserved(*events):
    allocator = CachingAllocator()
    allocator.replay(events)
    return allocator.peak_reserved_bytes


@pytest.mark.parametrize(
    "size, segment",
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (30 * MIB + 1, 32 * MIB)],
)  # fmt: skip
def test_a_segment_has_the_size_that_the_request_asks_for(size, segment):
    assert reserved((0, size, 0)) == segment


def test_small_requests_share_a_segment_and_a_released_block_serves_again():
    assert reserved(*((n, MIB // 2, 0) for n in range(4))) == 2 * MIB
    assert reserved((0, 64 * MIB, 0), (0, 0, 0), (1, 64 * MIB, 0)) == 64 * MIB


def test_the_rest_of_a_block_serves_if_it_is_larger_than_one_mib():
    assert reserved((0, 64 * MIB, 0), (0, 0, 0), (1, 40 * MIB, 0), (2, 24 * MIB, 0)) == 64 * MIB
    assert reserved((0, 64 * MIB, 0), (0, 0, 0), (1, 63 * MIB + 512, 0), (2, MIB // 2, 0)) == 66 * MIB


def test_released_neighbours_are_merged():
    one = [(0, 64 * MIB, 0), (0, 0, 0), (1, 32 * MIB, 0), (2, 32 * MIB, 0)]
    assert reserved(*one, (2, 0, 0), (1, 0, 0), (3, 64 * MIB, 0)) == 64 * MIB
    assert reserved(*one, (1, 0, 0), (2, 0, 0), (3, 64 * MIB, 0)) == 64 * MIB
    assert reserved(*one, (1, 0, 0), (3, 64 * MIB, 0)) == 128 * MIB


def test_a_block_serves_its_own_stream_alone():
    assert reserved((0, 64 * MIB, 0), (0, 0, 0), (1, 64 * MIB, 1)) == 128 * MIB


def test_the_smallest_block_that_fits_is_taken():
    big_and_fit = [(0, 64 * MIB, 0), (1, 32 * MIB, 0), (0, 0, 0), (1, 0, 0)]
    assert reserved(*big_and_fit, (2, 32 * MIB, 0), (3, 64 * MIB, 0)) == 96 * MIB


def test_totals_return_to_nothing_and_reserved_memory_stays():
    allocator = CachingAllocator()
    events = [(n, (n % 7 + 1) * 700_001, n % 2) for n in range(200)]
    allocator.replay(events)
    held = allocator.allocated_bytes
    assert held == allocator.peak_allocated_bytes <= allocator.reserved_bytes and held % 512 == 0
    allocator.replay((n, 0, 0) for n in range(200))
    assert allocator.allocated_bytes == 0 and allocator.reserved_bytes == allocator.peak_reserved_bytes
    allocator.replay(events)
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes  # a second round reserves nothing


def test_a_rest_of_one_mebibyte_stays_with_its_block():
    allocator = CachingAllocator()
    allocator.replay([("a", 11 << 20, 0)])
    assert allocator.reserved_bytes == allocator.allocated_bytes == 12 << 20


def test_segments_are_given_back_only_if_the_limit_would_be_exceeded():
    for limit, reserved in ((14 << 20, 14 << 20), ((14 << 20) - 1, 12 << 20)):
        allocator = CachingAllocator(limit)
        allocator.replay([("small", 1024, 0), ("small", 0, 0), ("large", 12 << 20, 0)])
        assert allocator.reserved_bytes == reserved


def test_a_segment_of_which_a_part_is_held_is_not_given_back():
    allocator = CachingAllocator(30 * MIB)
    allocator.replay([("a", 5 * MIB, 0), ("b", 5 * MIB, 0), ("a", 0, 0), ("c", 16 * MIB, 0)])
    assert allocator.reserved_bytes == 36 * MIB
