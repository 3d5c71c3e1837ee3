import pytest

from pyscan.batching import batches


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([], []),
        ([4], [[4]]),
        ([1, 2, 3, 4], [[1, 2], [3], [4]]),
        ([9, 1, 9], [[9], [1], [9]]),
        ([0, 0, 3, 0], [[0, 0, 3, 0]]),
    ],
)
def test_batches_keep_order_and_stay_below_the_limit(cells, expected):
    assert list(batches(cells, lambda item: item, 3)) == expected
