"""The comparison of two groups: p-values are right far into the tail, false discoveries no oftener than stated."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from pyscan.permutation import PermutationTest, adjusted


def compare(a, b, pieces=1, **options):
    test = PermutationTest(len(a), len(b), **options)
    for left, right in zip(np.array_split(a, pieces, axis=1), np.array_split(b, pieces, axis=1), strict=True):
        test.add(left, right)
    return test.finish()


def noise(rng, samples, cells, kind):
    """Samples of equal groups: normal, heavy-tailed, skewed, or strongly dependent between cells."""
    if kind == "dependent":
        factors = rng.normal(size=(samples, 5)) @ rng.normal(size=(5, cells))
        return factors + 0.3 * rng.normal(size=(samples, cells))
    draw = {
        "normal": rng.normal,
        "heavy": lambda size: rng.standard_t(3, size),
        "skewed": lambda size: rng.exponential(1, size),
    }
    return draw[kind](size=(samples, cells))


def test_difference_and_effect_are_those_of_the_textbook():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(20, 7)), rng.normal(1.0, 2.0, size=(30, 7))
    found = compare(a, b)
    pooled = np.sqrt((19 * a.var(0, ddof=1) + 29 * b.var(0, ddof=1)) / 48)
    assert np.allclose(found.difference, b.mean(0) - a.mean(0))
    assert np.allclose(found.effect, (b.mean(0) - a.mean(0)) / pooled)


def test_p_is_that_of_all_relabellings():
    """8 against 8 can be relabelled in 12,870 ways: the exact test, against a random part of them."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(8, 3)), rng.normal([0.0, 0.9, 1.2], size=(8, 3))
    both = np.concatenate([a, b])
    splits = np.array(list(combinations(range(16), 8)))
    sums = both[splits].sum(axis=1)
    gap = np.abs(2 * sums - both.sum(0))  # as |t|: the groups are of one size
    exact = (gap >= np.abs(2 * b.sum(0) - both.sum(0)) - 1e-9).mean(0)
    found = compare(a, b, num_permutations=20_000)
    assert np.allclose(found.p, exact, rtol=0, atol=4 * np.sqrt(exact.max() / 20_000))


@pytest.mark.parametrize("kind", ["normal", "heavy", "skewed", "dependent"])
def test_equal_groups_have_uniform_p_values_and_differ_no_oftener_than_the_rate_says(kind):
    """Down to levels that the 300 relabellings of one cell could not resolve."""
    rng = np.random.default_rng(2)
    draws = [compare(*np.split(noise(rng, 50, 500, kind), 2), num_permutations=300, seed=i).p for i in range(40)]
    p = np.concatenate(draws)
    # 20,000 cells; those of one draw depend on each other where the kind says so, hence the generous bound.
    slack = 3.0 if kind == "dependent" else 1.5
    for level in (0.5, 0.1, 0.01, 0.001, 0.0001):
        expected = level * len(p)
        assert (p <= level).sum() <= slack * expected + 3 * np.sqrt(slack * expected), (level, (p <= level).sum())
    assert (p <= 0.1).sum() >= 0.05 * len(p), "nor are they too careful"
    hits = sum(bool((adjusted(found) <= 0.05).any()) for found in draws)
    assert hits <= 6, "of 40 draws 2 are expected; more than 6 has a chance of 0.3 %"


def test_a_single_cell_among_thousands_is_found_with_few_relabellings():
    """Its own 1,000 relabellings resolve 0.001, which is no discovery among 5,000 cells: 0.05 / 5,000 is needed."""
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(40, 5000)), rng.normal(size=(40, 5000))
    b[:, 1234] += 2.0
    found = compare(a, b, num_permutations=1000)
    assert np.flatnonzero(adjusted(found.p) <= 0.05).tolist() == [1234]
    assert found.p[1234] < 1e-5


def test_true_differences_are_found_and_the_rate_of_false_ones_holds():
    rng = np.random.default_rng(5)
    shares, powers = [], []
    for _ in range(10):
        a, b = rng.normal(size=(30, 1000)), rng.normal(size=(30, 1000))
        b[:, :200] += 1.5
        hits = adjusted(compare(a, b, num_permutations=300).p) <= 0.1
        shares.append(hits[200:].sum() / max(hits.sum(), 1))
        powers.append(hits[:200].mean())
    assert np.mean(shares) <= 0.1
    assert np.mean(powers) > 0.95


def test_pieces_and_missing_values_change_nothing_else():
    rng = np.random.default_rng(6)
    a, b = rng.normal(size=(30, 40)), rng.normal(0.5, size=(25, 40))
    whole, parts = compare(a, b), compare(a, b, pieces=7)
    for one, other in zip(whole, parts, strict=True):
        assert np.allclose(one, other, rtol=1e-12)
    a[:10, 3] = np.nan
    b[:20, 4] = np.nan  # 5 are left: too few
    b[:, 5], a[:, 5] = 2.0, 2.0
    found = compare(a, b)
    assert np.isnan(found.p[4])
    assert np.isnan(found.effect[4])
    assert np.isclose(found.difference[3], b[:, 3].mean() - a[10:, 3].mean())
    assert (found.p[5], found.effect[5]) == (1.0, 0.0), "cells that never change do not differ"
    assert np.isclose(found.effect[6], whole.effect[6])


def test_groups_that_do_not_overlap_have_the_smallest_p():
    a, b = np.zeros((10, 2)), np.ones((10, 2))
    a[:, 1], b[:, 1] = np.arange(10), np.arange(10)
    found = compare(a, b, num_permutations=1000)
    assert found.p[0] < 0.002
    assert found.p[1] == 1.0


def test_adjusted_rates_are_those_of_benjamini_and_hochberg():
    p = np.array([0.01, 0.04, np.nan, 0.03, 0.005])
    assert np.allclose(adjusted(p), [0.02, 0.04, np.nan, 0.04, 0.02], equal_nan=True)
    assert np.allclose(adjusted([0.9, 0.8]), [0.9, 0.9])
    assert adjusted([]).shape == (0,)


def test_groups_too_small_for_a_test_are_refused():
    with pytest.raises(ValueError, match="at least 8 samples in each group, b has 7"):
        PermutationTest(8, 7)
    with pytest.raises(ValueError, match="num_permutations must be >= 100, got 10"):
        PermutationTest(8, 8, num_permutations=10)
