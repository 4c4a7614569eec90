from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trioengine.engine_proc.uniform import uniforms

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**40)


def draw(seeds: list[int], positions: list[int]) -> list[float]:
    numbers = uniforms(np.array(seeds, np.uint64), np.array(positions, np.int64))
    assert numbers.dtype == np.float64
    return [float(number) for number in numbers]


def test_values_are_part_of_the_contract() -> None:
    # Seeded answers must stay the same from release to release.
    assert draw([0, 0, 1, 2**64 - 1], [0, 1, 0, 7]) == [
        0.28176129772258496,
        0.6524484863740322,
        0.8628561488610587,
        0.8702003993250379,
    ]


@given(SEEDS, POSITIONS)
def test_a_number_lies_in_the_unit_interval_and_repeats(seed: int, position: int) -> None:
    (number,) = draw([seed], [position])
    assert 0.0 <= number < 1.0
    assert draw([seed], [position]) == [number]


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=20))
def test_a_row_knows_nothing_of_its_neighbours(rows: list[tuple[int, int]]) -> None:
    together = draw([seed for seed, _ in rows], [position for _, position in rows])
    assert together == [draw([seed], [position])[0] for seed, position in rows]


def test_numbers_are_spread_evenly_along_positions_and_along_seeds() -> None:
    many = np.arange(100_000)
    fixed = np.zeros(100_000)
    for seeds, positions in ((many, fixed), (fixed, many)):
        numbers = uniforms(seeds.astype(np.uint64), positions.astype(np.int64))
        counts = np.histogram(numbers, bins=50, range=(0.0, 1.0))[0]
        chi_square = float(((counts - 2000.0) ** 2 / 2000.0).sum())
        assert chi_square < 100.0  # 49 degrees of freedom: mean 49, deviation 10


def test_streams_of_neighbouring_seeds_are_not_shifted_copies() -> None:
    positions = np.arange(1000)
    gamma = 0x9E3779B97F4A7C15  # with plain addition, this seed would be seed 0 one step ahead
    one = set(draw([0] * 1000, positions.tolist()))
    other = set(draw([gamma] * 1000, positions.tolist()))
    assert not one & other
