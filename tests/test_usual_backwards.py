"""Once all backwards are alike two hooks are enough; what is recorded stays what autograd has added up."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import pyscan
from pyscan import _C, hook_cost

NUM_LAYERS = 5


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C.GradientWatch, "num_alike", 2)


class Training:
    """Layers one after the other, an optimizer that changes nothing, and what the gradients were after each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(NUM_LAYERS)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.scan = pyscan.attach(self.model, optimizer=self.optimizer)
        self.num_steps = 0

    @property
    def num_hooks(self) -> int:
        return self.scan._gradients.num_hooks

    def loss(self, *, begin: int = 0, end: int = NUM_LAYERS) -> Tensor:
        self.num_steps += 1
        x = torch.full((3, 6), 1.0 + 0.1 * self.num_steps, requires_grad=True)
        return self.model[begin:end](x).square().sum()

    def norms(self) -> list[float | None]:
        return [None if p.grad is None else p.grad.norm().item() for p in self.model.parameters()]

    def step(self, *losses: Tensor, clip: bool = False) -> list[float | None]:
        """A step with a backward of each loss; returns the norms that are to be recorded."""
        for loss in losses:
            loss.backward()
        want = self.norms()
        self.end(clip=clip)
        return want

    def end(self, *, clip: bool = False) -> None:
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recorded(self) -> list[float | None]:
        stats = self.scan.latest()["param_stats"]
        return [stats[f"{layer}.weight"]["grad_norm"] for layer in range(NUM_LAYERS)]

    def notes(self) -> list[str]:
        texts = [event["text"] for event in self.scan.events if event["kind"] == "note"]
        return [text for text in texts if "another way" in text]

    def settle(self) -> None:
        """Steps until two hooks are enough."""
        for _ in range(NUM_LAYERS + 3):
            self.check(self.step(self.loss()))
        assert self.num_hooks == 2

    def check(self, want: list[float | None]) -> None:
        assert self.recorded() == [None if norm is None else pytest.approx(norm, rel=1e-5) for norm in want]


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    with made.scan:
        yield made


def test_two_hooks_record_what_all_would(training: Training) -> None:
    training.settle()
    for _ in range(3):
        training.check(training.step(training.loss(), clip=True))
    assert training.num_hooks == 2
    assert training.notes() == []


def test_the_order_of_arrival_is_the_usual_one(training: Training) -> None:
    training.settle()
    training.loss().backward()
    assert training.scan._gradients.order() == list(reversed(range(NUM_LAYERS)))


def test_hooks_stay_while_backwards_differ(training: Training) -> None:
    for number in range(4 * NUM_LAYERS):
        training.check(training.step(training.loss(end=NUM_LAYERS - number % 2)))
    assert training.num_hooks == NUM_LAYERS


def test_hooks_stay_where_something_else_writes_to_some_gradients(training: Training) -> None:
    for _ in range(4 * NUM_LAYERS):
        training.loss().backward()
        want = training.norms()
        training.model[2].weight.grad.mul_(0.5)
        training.end()
        training.check(want)
    assert training.num_hooks == NUM_LAYERS
    assert training.notes() == []


def test_several_backwards_in_a_step(training: Training) -> None:
    for _ in range(2 * NUM_LAYERS):
        training.check(training.step(training.loss(), training.loss(), clip=True))
    assert training.num_hooks == 2
    training.check(training.step(training.loss(), training.loss(), training.loss(), clip=True))
    assert training.notes() == []


def test_gradients_that_are_kept_and_added_to(training: Training) -> None:
    training.settle()
    training.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    for _ in range(3):
        training.check(training.step(training.loss()))
    assert training.num_hooks == 2


def test_gradients_that_are_replaced_in_the_backward(training: Training) -> None:
    training.settle()
    training.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    for _ in range(3):
        training.loss().backward(create_graph=True)
        want = training.norms()
        training.end()
        training.check(want)
    assert training.num_hooks == 2


def test_a_weight_that_a_backward_does_not_reach_has_no_gradient(training: Training) -> None:
    """Also where the one of the step before is still there."""
    training.settle()
    training.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    training.step(training.loss())
    training.loss(begin=2).backward()
    want = [None, None, *training.norms()[2:]]
    training.end()
    training.check(want)
    assert training.num_hooks == NUM_LAYERS
    assert training.notes() == []


def below(training: Training) -> Tensor:
    return training.loss(end=2)


def inside(training: Training) -> Tensor:
    return training.loss(begin=1, end=4)


@pytest.mark.parametrize("other", [below, inside])
def test_a_backward_that_goes_past_the_first_weight_is_noticed(
    training: Training, other: Callable[[Training], Tensor]
) -> None:
    training.settle()
    num_steps = 0
    while not training.notes() and num_steps < NUM_LAYERS:  # of those inside one is looked at in every step
        training.step(training.loss(), other(training))
        num_steps += 1
    assert len(training.notes()) == 1
    assert training.num_hooks == NUM_LAYERS
    for _ in range(2):
        want = training.step(training.loss(), other(training))
    training.check(want)


@pytest.mark.parametrize("other", [below, inside])
def test_a_backward_that_comes_before_the_usual_one_is_in_what_is_read(
    training: Training, other: Callable[[Training], Tensor]
) -> None:
    training.settle()
    for _ in range(3):
        training.check(training.step(other(training), training.loss()))


def test_a_step_whose_only_backward_nobody_saw_is_noticed(training: Training) -> None:
    training.settle()
    training.step(inside(training))
    assert training.recorded() == [None] * NUM_LAYERS
    assert len(training.notes()) == 1
    training.check(training.step(inside(training)))


def test_a_step_without_a_backward_is_nothing_unusual(training: Training) -> None:
    training.settle()
    training.end()
    training.check(training.step(training.loss()))
    assert training.num_hooks == 2
    assert training.notes() == []


def test_a_backward_that_raises_after_another_is_noticed(training: Training) -> None:
    training.settle()

    def fail(grad: Tensor) -> None:
        raise MemoryError("out of memory")

    training.loss().backward()
    handle = training.model[2].weight.register_hook(fail)
    with pytest.raises(MemoryError):
        training.loss().backward()
    handle.remove()
    training.end()
    assert training.num_hooks == NUM_LAYERS
    assert len(training.notes()) == 1
    training.check(training.step(training.loss()))


@pytest.mark.parametrize("whole", [True, False])
def test_a_backward_that_is_not_scanned_is_nothing_unusual(training: Training, whole: bool) -> None:
    training.settle()
    with training.scan.paused():
        training.loss().backward()
        if whole:
            training.end()
    if not whole:
        training.end()
    training.check(training.step(training.loss()))
    assert training.num_hooks == 2
    assert training.notes() == []


def test_a_gradient_that_is_taken_away_inside_the_backward(training: Training) -> None:
    training.settle()
    parameters = list(training.model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
    for _ in range(3):
        loss = training.loss()
        want = [grad.norm().item() for grad in torch.autograd.grad(loss, parameters, retain_graph=True)]
        training.step(loss)
    training.check(list(want))


def test_the_figure_counts_the_hooks_that_are_there(training: Training) -> None:
    def num_calls() -> float:
        training.scan._forward.take_cost()
        training.model(torch.ones(1, 6))
        return training.scan._take_cost(1)[1] / hook_cost.seconds_per_call()

    before = num_calls()
    training.settle()
    assert before - num_calls() == pytest.approx(NUM_LAYERS - 2)
