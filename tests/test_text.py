import math

import numpy as np
import pytest

from pyscan import text
from pyscan.codecs import ABSENT


def test_a_name_cannot_steer_the_terminal():
    assert text.printable("a\x1b[31mb\n\u202e\ud800é层") == "a\\x1b[31mb\\n\\u202e\\ud800é层"


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1340000, "1.34 MB"),
        (999_600, "1 MB"),
        (2.5e9, "2.5 GB"),
        (3e15, "3e+03 TB"),
    ],
)
def test_sizes_have_three_digits(num_bytes, shown):
    assert text.size(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.41, "0.41 s"),
        (12, "12 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (18120, "5 h 02 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_use_the_two_units_that_matter(seconds, shown):
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (0.00123, "0.0012"),
        (0.0009, "9.0e-04"),
        (1.0, "1.000"),
        (12.345, "12.35"),
        (9999.4, "9999"),
        (99999.0, "99999"),
        (123456.0, "1.2e+05"),
        (2.0**-127, "5.9e-39"),
    ],
)
def test_norms_fit_into_eight_characters_and_keep_what_is_odd_visible(value, shown):
    assert text.norm(value) == shown
    assert len(shown) <= 8


def test_scores_carry_their_sign():
    assert [text.signed(v) for v in (1.236, -0.5, 0.0, math.nan, None, math.inf, -math.inf)] == [
        *("+1.24", "-0.50", "+0.00", "-", "-", "+inf", "-inf")
    ]


def test_factors_say_times_or_divided_by():
    assert [text.factor(v) for v in (1.0, -3.0, 0.0, math.nan, 20.0)] == ["x2.00", "/8.00", "x1.00", "-", "x1e+06"]


def test_long_names_lose_weight_first_and_their_beginning_next():
    names = ["model.layers.10.mlp.up_proj.weight", "lm_head.weight"]
    assert text.fit(names, 34) == names
    assert text.fit(names, 33) == ["model.layers.10.mlp.up_proj", "lm_head"]
    assert text.fit(names, 26) == ["…layers.10.mlp.up_proj", "lm_head"]
    assert text.fit(names, 20) == ["…10.mlp.up_proj", "lm_head"]
    assert text.fit(names, 4) == ["…roj", "…ead"]
    assert all(len(name) <= width for width in range(1, 40) for name in text.fit(names, width))


def test_history_is_the_mean_level_of_each_bucket():
    # log2 of 1, 4 | 8, 8 | 2, 32 -> 0, 2 | 3, 3 | 1, 5
    assert text.history(np.array([1, 4, 8, 8, 2, 32], np.float32), 3).tolist() == [1, 3, 3]


def test_history_never_has_more_buckets_than_steps():
    assert text.history(np.array([1, 2], np.float32), 24).tolist() == [0, 1]
    assert text.history(np.zeros(0, np.float32), 24).tolist() == []


def test_history_keeps_zero_bad_and_absent_apart():
    norms = np.array([0, 0, 1, math.nan, ABSENT, ABSENT, ABSENT, 4, 0, ABSENT, math.inf, 1], np.float32)
    found = text.history(norms, 6).tolist()
    assert found[:2] == [text.ZERO, text.BAD]
    assert math.isnan(found[2])
    assert found[3:] == [2, text.ZERO, text.BAD]


def test_sparkline_runs_from_the_lowest_bar_to_the_highest():
    assert text.sparkline(range(8)) == text.BARS
    assert text.sparkline([3, 3, 3]) == "▄▄▄"
    assert text.sparkline([3, 3.001, 3]) == "▄▄▄"  # below the step of a code: no mountains out of rounding
    assert text.sparkline([]) == ""


def test_sparkline_marks_what_has_no_height():
    assert text.sparkline([0, 7, text.ZERO, text.BAD, math.nan, 7]) == "▁█·! █"
    assert text.sparkline([0, 7, text.ZERO, text.BAD], text.ASCII_BARS) == "_#0!"
