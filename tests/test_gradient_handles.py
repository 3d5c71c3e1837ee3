"""A gradient, or an input, tells the same by its handle as by its Python object, whatever becomes of it."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import pyscan
from pyscan import _C, torch_access

# Of two layers, one is read at once and one at the end of the backward.
LARGE, SMALL = 300, 20


@pytest.fixture(autouse=True, params=["by handle", "by object"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    wanted = request.param == "by handle"
    assert torch_access.use_handles(is_native=wanted) == wanted
    yield
    torch_access.use_handles()


def another_torch(x: Tensor) -> object:
    raise TypeError("handles are made otherwise")


def of_another_tensor(x: Tensor) -> object:
    return torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(torch.ones(1))


@pytest.mark.parametrize("make_handle", [another_torch, of_another_tensor, lambda x: None])
def test_a_torch_whose_handles_are_not_as_thought_is_asked_for_objects(make_handle: Callable[[Tensor], object]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    assert not _C.use_handles(parameter, make_handle)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LARGE, LARGE, bias=False), nn.Linear(LARGE, SMALL, bias=False))


def norms(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.to_dense().double().norm().item() for p in model.parameters()]


def recorded(scan: pyscan.Scanner) -> list[float | None]:
    return [one["grad_norm"] for one in scan.latest()["param_stats"].values()]


def check(scan: pyscan.Scanner, want: list[float | None]) -> None:
    scan.step()
    assert recorded(scan) == [None if norm is None else pytest.approx(norm, rel=1e-5) for norm in want]


def backward(model: nn.Module, step: int = 1) -> None:
    model(torch.full((4, LARGE), float(step))).square().sum().backward()


def test_new_gradients_and_gradients_that_are_added_to() -> None:
    model = make_model()
    with pyscan.attach(model) as scan:
        for step in range(1, 7):
            backward(model, step)
            want = norms(model)
            check(scan, want)
            if step % 2:
                model.zero_grad()


def changed_in_place(parameter: Tensor) -> None:
    parameter.grad.mul_(3.0)


def replaced(parameter: Tensor) -> None:
    parameter.grad = parameter.grad * 3.0


def uncounted(parameter: Tensor) -> None:
    """By one that counts no writes."""
    with torch.inference_mode():
        parameter.grad = parameter.grad * 3.0


@pytest.mark.parametrize("change", [changed_in_place, replaced, uncounted])
def test_a_gradient_that_changes_after_it_was_read_is_read_again(change: Callable[[Tensor], None]) -> None:
    model = make_model()
    with pyscan.attach(model) as scan:
        for step in range(1, 4):
            if step == 3:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(change)  # type: ignore[no-untyped-call]
            backward(model, step)
            check(scan, norms(model))
            model.zero_grad()


def no_neighbours(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t()


def every_other(grad: Tensor) -> Tensor:
    return grad.repeat_interleave(2, dim=1)[:, ::2]


def of_rows(grad: Tensor) -> Tensor:
    return grad.to_sparse(1)


@pytest.mark.parametrize("other", [no_neighbours, every_other, of_rows, torch.clone])
def test_a_gradient_that_is_laid_out_otherwise_than_in_the_step_before(other: Callable[[Tensor], Tensor]) -> None:
    model = make_model()
    with pyscan.attach(model) as scan:
        for step in range(1, 5):
            backward(model, step)
            want = norms(model)
            model.zero_grad()
            if step == 3:  # it comes by the hand of a hook, in the place of what autograd would have kept
                put = functools.partial(_put, other)
                handles = [p.register_post_accumulate_grad_hook(put) for p in model.parameters()]
            backward(model, step)
            check(scan, want)
            model.zero_grad()
            if step == 3:
                for handle in handles:
                    handle.remove()


def _put(other: Callable[[Tensor], Tensor], parameter: Tensor) -> None:
    parameter.grad = other(parameter.grad)


def test_a_gradient_that_is_missing_in_some_steps() -> None:
    model = make_model()
    with pyscan.attach(model) as scan:
        for step in range(1, 6):
            if step % 2:
                backward(model, step)
            else:
                model[1](model[0](torch.ones(4, LARGE)).detach()).square().sum().backward()
            want = norms(model)
            assert (want[0] is None) == (step % 2 == 0)
            check(scan, want)
            model.zero_grad()


def test_a_model_that_is_cast_between_steps() -> None:
    model = make_model()
    with pyscan.attach(model) as scan:
        for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64):
            model.to(dtype)
            model(torch.ones(4, LARGE, dtype=dtype)).square().sum().backward()
            check(scan, norms(model))
            model.zero_grad()


def test_no_gradient_is_kept() -> None:
    model = make_model()
    backward(model)
    want = [p.grad._use_count() for p in model.parameters()]
    with pyscan.attach(model) as scan:
        for step in range(1, 4):
            model.zero_grad()
            backward(model, step)
            assert [p.grad._use_count() for p in model.parameters()] == want
            scan.step()
            assert [p.grad._use_count() for p in model.parameters()] == want


class TwoReaders(nn.Module):
    """Two weights that meet one input; something may happen to it in between."""

    def __init__(self, between: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(LARGE, SMALL).requires_grad_(False) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        self.between(x)
        return y + self.second(x)


def left_alone(x: Tensor) -> None:
    pass


def written_to(x: Tensor) -> None:
    with torch.inference_mode(x.is_inference()):
        x.mul_(3.0)


def written_to_through_a_view(x: Tensor) -> None:
    with torch.inference_mode(x.is_inference()):
        x[:, 1:].zero_()


@pytest.mark.parametrize("between", [left_alone, written_to, written_to_through_a_view])
@pytest.mark.parametrize("counts_writes", [True, False])
def test_an_input_is_read_again_where_it_was_written_to(between: Callable[[Tensor], None], counts_writes: bool) -> None:
    model = TwoReaders(between)
    with torch.inference_mode(not counts_writes):
        x = torch.randn(4, LARGE)
    want = [x.norm().item()]
    with pyscan.attach(model) as scan:
        model(x)
        scan.step()
        stats = scan.latest()["param_stats"]
    want.append(x.norm().item())
    assert [one["activation_norm"] for one in stats.values()] == pytest.approx(want, rel=1e-5)
