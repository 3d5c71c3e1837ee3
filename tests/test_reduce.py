"""One suite over every implementation of the reduction: definition, baseline and AVX2, with one and two threads.

In a process started with TRITON_INTERPRET=1 the same cases run on the Triton kernels instead (see
tests/test_gpu_interpreter.py).
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

import pyscan
from pyscan import _C, engine

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
if IN_INTERPRETER:
    from tests.gpu.engine import triton_reduce

TOLERANCE = 1e-6  # relative, of a sum of squares: the numerics contract of csrc/reduce.h
NATIVE = [] if IN_INTERPRETER else list(_C.isas)
ISAS = ["triton"] if IN_INTERPRETER else NATIVE
DTYPES = list(engine.DTYPES)
Reducer = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def native(
    x: torch.Tensor,
    *,
    isa: str,
    num_threads: int = 1,
    block: int = 64,
    first: int = 0,
    by_rows: bool = False,
    row_sumsq: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The compiled reduction of a matrix, with every argument it has."""
    if isa == "triton":
        return triton_reduce(x, block=block, first=first, by_rows=by_rows, row_sumsq=row_sumsq)
    rows, cols = x.shape
    length = rows if by_rows else cols
    stats = np.zeros((3, (length - 1 + first) // block + 1 if length else 0))
    _C.reduce_into(
        x.data_ptr(), engine.DTYPES[x.dtype], rows, cols, *x.stride(), *stats,
        block=block, first=first, by_rows=by_rows, row_sumsq=row_sumsq, num_threads=num_threads, isa=isa,
    )  # fmt: skip
    sumsq, absmax, bad = torch.from_numpy(stats)
    return sumsq, absmax, bad


def truth(x: torch.Tensor, *, block: int = 64, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block by block in float64 with numpy: shares no code with any implementation."""
    values = x.double().numpy().reshape(-1, x.shape[-1])
    cuts = [0, *range(block - first, values.shape[1], block), values.shape[1]]
    blocks = [values[:, a:b] for a, b in itertools.pairwise(cuts)] if values.shape[1] else []
    finite = [b[np.isfinite(b)] for b in blocks]
    sumsq = [float(np.sum(f * f)) for f in finite]
    absmax = [float(np.abs(f).max()) if f.size else 0.0 for f in finite]
    bad = [float(b.size - f.size) for b, f in zip(blocks, finite, strict=True)]
    return tuple(torch.tensor(values, dtype=torch.float64) for values in (sumsq, absmax, bad))


def check(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    assert got[0].shape == want[0].shape
    torch.testing.assert_close(got[0].double(), want[0].double(), rtol=TOLERANCE, atol=0)
    assert torch.equal(got[1].double(), want[1].double()), "maxima are exact"
    assert torch.equal(got[2].double(), want[2].double()), "counts are exact"


ENGINES = ["triton-1"] if IN_INTERPRETER else ["definition", *[f"{isa}-{n}" for isa in NATIVE for n in (1, 2)]]


@pytest.fixture(params=ENGINES)
def reducer(request: pytest.FixtureRequest) -> Reducer:
    if request.param == "definition":
        return engine.definition
    isa, threads = request.param.split("-")
    return lambda x, block=64: native(x, isa=isa, num_threads=int(threads), block=block or max(x.shape[1], 1))


SHAPES = [
    (1, 1), (1, 63), (1, 64), (1, 65), (7, 15), (8, 16), (8, 64), (9, 17), (63, 1000), (64, 48), (65, 128),
    (100, 176), (340, 512), (1000, 63), (3, 5000), (1, 40000), (2100, 130), (17, 20000),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64_for_every_shape(reducer: Reducer, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(reducer(x), truth(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 3, 16, 63, 64, 100, 128, 1000, 5000])
def test_agrees_with_float64_for_every_block_width(reducer: Reducer, block: int, dtype: torch.dtype) -> None:
    x = torch.randn(37, 1000, generator=torch.Generator().manual_seed(2)).to(dtype)
    check(reducer(x, block=block), truth(x, block=block))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(0, 100), (0, 0), (5, 0)])
def test_nothing_gives_zeros(reducer: Reducer, rows: int, cols: int, dtype: torch.dtype) -> None:
    sumsq, absmax, bad = reducer(torch.empty(rows, cols, dtype=dtype))
    assert sumsq.tolist() == absmax.tolist() == bad.tolist() == [0] * -(-cols // 64)


def strided_views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = torch.randn(300, 400, generator=torch.Generator().manual_seed(3)).to(dtype)
    return {
        "transposed": base.T,
        "every second column": base[:, ::2],
        "every third row": base[::3],
        "a window": base[5:205, 3:203],
        "expanded row": base[:1].expand(50, -1),
        "expanded column": base[:, :1].expand(-1, 70),
        "one column": base[:, 7:8],
        "address not aligned to a vector": base.flatten()[1:].narrow(0, 0, 256 * 390).view(256, 390),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", strided_views(torch.float32))
def test_agrees_with_float64_for_every_stride(reducer: Reducer, view: str, dtype: torch.dtype) -> None:
    x = strided_views(dtype)[view]
    check(reducer(x), truth(x))


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_strides_and_addresses_off_by_one_byte(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(40, 100).to(dtype)
    size = x.element_size()
    raw = np.zeros(x.numel() * size + 1, np.uint8)
    raw[1:] = x.view(torch.uint8).numpy().reshape(-1)
    stats = np.zeros((3, 2))
    _C.reduce_into(raw.ctypes.data + 1, engine.DTYPES[dtype], 40, 100, 100, 1, *stats, block=64, isa=isa)
    check(tuple(torch.from_numpy(stats)), truth(x))
    stats = np.zeros((3, 2))
    last = x.data_ptr() + (x.numel() - 1) * size
    _C.reduce_into(last, engine.DTYPES[dtype], 40, 100, -100, -1, *stats, block=64, isa=isa)
    check(tuple(torch.from_numpy(stats)), truth(x.flip(0, 1)))


EXTREMES = {
    "float32 denormals": (torch.float32, 1e-40),
    "float32 smallest": (torch.float32, 2.0**-149),
    "float32 where squares are denormal": (torch.float32, 1e-20),
    "float32 where squares overflow": (torch.float32, 1e20),
    "float32 large": (torch.float32, 1e38),
    "bfloat16 large": (torch.bfloat16, 1e38),
    "bfloat16 denormals": (torch.bfloat16, 1e-39),
    "float16 largest": (torch.float16, 65504.0),
    "float16 smallest": (torch.float16, 2.0**-24),
    "float16 denormals": (torch.float16, 3e-6),
    "float64 large": (torch.float64, 1e150),
    "float64 small": (torch.float64, 1e-150),
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("spread", ["constant", "one outlier", "mixed with ones"])
def test_right_over_the_whole_range_of_each_dtype(reducer: Reducer, case: str, spread: str) -> None:
    dtype, value = EXTREMES[case]
    x = torch.full((50, 200), value, dtype=torch.float64).to(dtype)
    if spread == "one outlier":
        x = torch.zeros_like(x)
        x[49, 199] = value
    elif spread == "mixed with ones":
        x[::2] = 1.0
    x[1::3] *= -1
    check(reducer(x), truth(x))


@pytest.mark.parametrize("isa", NATIVE)
def test_denormals_count_even_where_the_host_flushes_them(isa: str) -> None:
    x = torch.full((64, 64), 1e-40)
    want = truth(x)
    torch.set_flush_denormal(True)
    try:
        got = native(x, isa=isa, num_threads=2)
    finally:
        torch.set_flush_denormal(False)
    check(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (8, 63), (99, 64), (99, 129), (50, 128)])
def test_one_bad_value_is_counted_and_left_out(
    reducer: Reducer, dtype: torch.dtype, value: float, place: tuple[int, int]
) -> None:
    x = torch.randn(100, 130, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[place] = value
    got = reducer(x)
    check(got, truth(x))
    assert got[2].sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_but_bad_values(reducer: Reducer, dtype: torch.dtype, value: float) -> None:
    x = torch.full((33, 100), value, dtype=dtype)
    sumsq, absmax, bad = reducer(x)
    assert sumsq.tolist() == [0, 0]
    assert absmax.tolist() == [0, 0]
    assert bad.tolist() == [33 * 64, 33 * 36]


@pytest.mark.parametrize("dtype", DTYPES)
def test_maximum_may_be_negative_and_anywhere(reducer: Reducer, dtype: torch.dtype) -> None:
    for row, col in [(0, 0), (24, 99), (7, 63), (8, 64), (15, 80)]:
        x = torch.randn(25, 100, generator=torch.Generator().manual_seed(5)).clamp(-3, 3).to(dtype)
        x[row, col] = -100.0
        got = reducer(x)
        check(got, truth(x))
        assert got[1].max() == 100


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_identical_for_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    for shape in [(5000, 700), (3, 300_000), (200_000, 5)]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
        one = native(x, isa=isa, num_threads=1)
        for num_threads in (2, 3, 8):
            many = native(x, isa=isa, num_threads=num_threads)
            assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1] if IN_INTERPRETER else [1, 2])
def test_every_row_and_column_counts_once(isa: str, num_threads: int) -> None:
    """A matrix of powers of two: a value lost or doubled at any seam between chunks, bands or threads shows."""
    num_rows = 300 if IN_INTERPRETER else 4099
    x = torch.ones(num_rows, 130)
    x[:, 1] = torch.arange(num_rows) % 2 + 1
    sumsq, _, _ = native(x, isa=isa, num_threads=num_threads, block=1)
    assert sumsq.tolist() == x.double().square().sum(0).tolist()
    sumsq, _, _ = native(x, isa=isa, num_threads=num_threads, block=1, by_rows=True)
    assert sumsq.tolist() == x.double().square().sum(1).tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 10, 64, 100, 5000])
def test_row_strips(isa: str, dtype: torch.dtype, block: int) -> None:
    num_rows = 203 if IN_INTERPRETER else 1003
    x = torch.randn(num_rows, 77, generator=torch.Generator().manual_seed(7)).to(dtype)
    x[num_rows - 1, 76] = float("nan")
    check(native(x, isa=isa, num_threads=2, block=block, by_rows=True), truth(x.T.contiguous(), block=block))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("first", [0, 1, 17, 63])
def test_blocks_may_begin_inside_a_whole_one(isa: str, first: int) -> None:
    x = torch.randn(90, 200, generator=torch.Generator().manual_seed(8))
    check(native(x, isa=isa, first=first), truth(x, first=first))
    check(native(x, isa=isa, first=first, by_rows=True), truth(x.T.contiguous(), first=first))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (1000, 176), (33, 20000), (340, 512)])
@pytest.mark.parametrize("bad", [False, True])
def test_row_sums_come_from_the_same_read(isa: str, dtype: torch.dtype, shape: tuple[int, int], bad: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    if bad:
        x[-1, -1] = float("inf")
    clean = torch.where(torch.isfinite(x), x, 0).double()
    rows = np.zeros(shape[0])
    check(native(x, isa=isa, num_threads=2, row_sumsq=rows), truth(x))
    np.testing.assert_allclose(rows, clean.square().sum(1), rtol=TOLERANCE)
    if isa == "triton":
        return
    num_blocks = -(-shape[1] // 64)
    by_block = np.zeros((shape[0], num_blocks))
    check(native(x, isa=isa, num_threads=2, row_sumsq=by_block), truth(x))
    padded = torch.nn.functional.pad(clean, (0, num_blocks * 64 - shape[1])).view(shape[0], num_blocks, 64)
    np.testing.assert_allclose(by_block, padded.square().sum(2), rtol=TOLERANCE)


@pytest.mark.parametrize("isa", NATIVE)
def test_results_are_added_to_what_is_there(isa: str) -> None:
    x = torch.randn(20, 100)
    want = truth(x)
    stats = np.stack([np.full(2, 1.0), np.array([0.5, 1e9]), np.full(2, 3.0)])
    _C.reduce_into(x.data_ptr(), 0, 20, 100, 100, 1, *stats, block=64, isa=isa)
    np.testing.assert_allclose(stats[0], want[0].numpy() + 1, rtol=TOLERANCE)
    assert stats[1].tolist() == [want[1][0].item(), 1e9]
    assert stats[2].tolist() == [3, 3]


@pytest.mark.parametrize("isa", NATIVE)
def test_maximum_and_count_may_be_folded_into_one(isa: str) -> None:
    x = torch.randn(20, 200)
    x[3, 150] = float("nan")
    sumsq, absmax, bad = np.zeros(4), np.zeros(1), np.zeros(1)
    _C.reduce_into(x.data_ptr(), 0, 20, 200, 200, 1, sumsq, absmax, bad, block=64, isa=isa)
    want = truth(x)
    np.testing.assert_allclose(sumsq, want[0], rtol=TOLERANCE)
    assert (absmax[0], bad[0]) == (want[1].max(), 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [1.0, 0.1, 1.0 + 2**-23])
def test_error_bound_holds_for_constant_data(isa: str, value: float) -> None:
    """Constant data is the worst case of float32 accumulation: every rounding errs the same way."""
    num_rows = 1000 if IN_INTERPRETER else 100_000
    x = torch.full((1, 64), value).expand(num_rows, 64)
    sumsq, _, _ = native(x, isa=isa)
    exact = num_rows * 64 * x[0, 0].double() ** 2
    assert abs(sumsq.item() / exact.item() - 1) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_bound_holds_at_1e8_elements(dtype: torch.dtype) -> None:
    x = torch.rand(12500, 8000, generator=torch.Generator().manual_seed(10)).to(dtype)
    want = torch.stack([part.double().square().sum(0) for part in x.split(500)]).sum(0).view(-1, 64).sum(1)
    got = pyscan.reduce(x)[0]
    torch.testing.assert_close(got[:125], want[:125], rtol=TOLERANCE, atol=0)


def test_public_reduce_takes_any_dimension() -> None:
    x = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(11))
    for dim in range(-3, 3):
        for block in (0, 2, 64, 1000):
            got, want = pyscan.reduce(x, block=block, dim=dim), engine.definition(x, block=block, dim=dim)
            check(got, want)
            assert [a.dtype for a in got] == [torch.float64, torch.float64, torch.int64]


def test_public_reduce_takes_five_dimensions_scalars_and_gradients() -> None:
    x = torch.randn(2, 3, 4, 5, 65, requires_grad=True)
    check(pyscan.reduce(x), truth(x.detach()))
    assert pyscan.reduce(torch.tensor(3.0))[0].tolist() == [9.0]
    assert not pyscan.reduce(x)[0].requires_grad


@pytest.mark.parametrize(
    ("x", "kwargs", "error", "text"),
    [
        (torch.ones(3, dtype=torch.int64), {}, TypeError, r"got int64: reduce x\.float\(\)"),
        (torch.ones(3, dtype=torch.bool), {}, TypeError, "got bool"),
        (torch.ones(3, dtype=torch.complex64), {}, TypeError, "got complex64"),
        (torch.ones(3).to(torch.float8_e4m3fn), {}, TypeError, "got float8_e4m3fn"),
        (torch.eye(3).to_sparse(), {}, TypeError, "sparse_coo.*to_dense"),
        (torch.empty(3, device="meta"), {}, ValueError, "meta device"),
        (torch.ones(3), {"block": -1}, ValueError, "block must be >= 0.*got -1"),
        (torch.ones(3), {"block": 1.5}, TypeError, "block must be an int, got float"),
        (torch.ones(3), {"dim": 1}, IndexError, r"dim must lie in \[-1, 1\), got 1"),
        ([1.0], {}, TypeError, "must be a torch.Tensor, got list"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(x: object, kwargs: dict, error: type[Exception], text: str) -> None:
    for call in (pyscan.reduce, engine.definition):
        with pytest.raises(error, match=text):
            call(x, **kwargs)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*deprecated")
def test_a_quantised_tensor_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"quantised.*dequantize"):
        pyscan.reduce(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


def test_a_device_without_an_engine_is_named() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("xpu")

    with pytest.raises(ValueError, match=r"no engine for device 'xpu'.*x\.cpu\(\)"):
        pyscan.reduce(torch.ones(3).as_subclass(Elsewhere))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block": 0}, "block must be >= 1"),
        ({"block": 64, "first": 64}, r"first must lie in \[0, block\)"),
        ({"block": 64, "address": 0}, "address is null"),
        ({"block": 64, "dtype": 9}, "dtype must be 0 to 3"),
        ({"block": 64, "rows": -1}, "rows and cols must be >= 0"),
        ({"block": 32}, "sumsq must have 4 values, got 2"),
        ({"block": 64, "row_sumsq": np.zeros(3)}, "row_sumsq must have 10 values, got 3"),
        ({"block": 64, "isa": "sse9"}, "instruction set must be baseline, avx2 or avx512, got sse9"),
    ],
)
def test_the_border_to_native_code_checks_its_arguments(change: dict, text: str) -> None:
    x = torch.ones(10, 100)
    call = {"address": x.data_ptr(), "dtype": 0, "rows": 10, "cols": 100, "row_stride": 100, "col_stride": 1}
    call |= dict(zip(("sumsq", "absmax", "bad"), np.zeros((3, 2)), strict=True))
    with pytest.raises(ValueError, match=text):
        _C.reduce_into(**(call | change))


@pytest.mark.parametrize("isa", ["baseline", "avx2", "sse9"])
def test_the_instruction_set_can_be_forced(isa: str) -> None:
    code = "import pyscan._C as c; print(c.isa)"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYSCAN_ISA": isa}, capture_output=True, text=True
    )
    if isa in ISAS:
        assert run.stdout.strip() == isa
    else:
        assert run.returncode != 0
        assert isa in run.stderr


FORK = """
import os, signal, torch, pyscan
torch.set_num_threads(2)
x = torch.ones(4000, 512)
ok = lambda: pyscan.reduce(x)[0].sum() == x.numel()
assert ok()                                        # the pool has a thread now
pid = os.fork()
if pid == 0:
    signal.alarm(30)                               # nobody else ends a child that waits for ever
    alone = len(os.listdir("/proc/self/task")) == 1
    right = ok()                                   # a pool of the child's own, with a thread of its own
    os._exit(0 if alone and right and len(os.listdir("/proc/self/task")) == 2 else 1)
assert os.waitpid(pid, 0)[1] == 0
assert ok()
"""


def test_the_thread_pool_survives_fork() -> None:
    run = subprocess.run([sys.executable, "-c", FORK], timeout=60, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_gil_is_released_and_callers_in_several_threads_agree() -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = torch.randn(3000, 512)
    want = pyscan.reduce(x)[0]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: pyscan.reduce(x)[0], range(40)))
    assert all(torch.equal(got, want) for got in results)
