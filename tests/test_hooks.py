"""The shortcut around torch's handling of hooks: taken where ours is the only one, and never noticed by anyone else."""

import contextlib
import copy
import io
import pickle
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyscan
from pyscan import _C, hooks, torch_access


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def num_handled(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of the model's modules that went through torch's handling of hooks."""
    original, calls = nn.Module._call_impl, []

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "_call_impl", counted)
        model(x).sum().backward()
    return len(calls)


def test_a_watched_module_without_other_hooks_takes_the_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself, which has two, one with an output that is watched, and those with an input."""
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    ids = torch.zeros(2, dtype=torch.long)
    assert num_handled(model, ids, monkeypatch) == 4
    with pyscan.attach(model):
        assert num_handled(model, ids, monkeypatch) == 0
        for number, module in enumerate((model, *model), start=1):
            module.register_forward_hook(lambda module, args, output: None)
            assert num_handled(model, ids, monkeypatch) == number
    assert num_handled(model, ids, monkeypatch) == 4


KINDS = ("pre", "forward", "backward", "backward pre")


@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)], ids="-".join)
def test_every_other_hook_runs_once_and_in_its_place(kinds: tuple[str, ...], when: str) -> None:
    def double(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        ran.append("pre")
        return (2 * args[0],)

    def register() -> None:
        hooks_of = {
            "pre": (linear.register_forward_pre_hook, double),
            "forward": (linear.register_forward_hook, lambda *_: ran.append("forward")),
            "backward": (linear.register_full_backward_hook, lambda *_: ran.append("backward")),
            "backward pre": (linear.register_full_backward_pre_hook, lambda *_: ran.append("backward pre")),
        }
        for kind in kinds:
            registration, hook = hooks_of[kind]
            registration(hook)

    ran: list[str] = []
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    linear = model[0]
    if when == "before attach":
        register()
    with pyscan.attach(model) as scan:
        if when == "after attach":
            register()
        output = model(torch.ones(2, 8, requires_grad=True))
        output.sum().backward()
        scan.step()
        doubled = 2 if "pre" in kinds else 1
        torch.testing.assert_close(output, doubled * torch.ones(2, 8) @ linear.weight.T)
        # A hook before ours decides what the weight meets; one after it is not seen.
        seen = doubled if when == "before attach" else 1
        assert scan.latest()["param_stats"]["0.weight"]["activation_norm"] == 4.0 * seen
    assert sorted(ran) == sorted(kinds)


def test_hooks_of_every_module_run() -> None:
    ran: list[nn.Module] = []
    model = nn.Sequential(nn.Linear(8, 8))
    with pyscan.attach(model):
        everywhere = nn.modules.module.register_module_forward_pre_hook(lambda module, args: ran.append(module))
        model(torch.ones(2, 8))
        everywhere.remove()
    assert ran == [model, model[0]]


def test_errors_and_keywords_pass_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    linear = model[0]
    with pyscan.attach(model) as scan:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            linear(torch.ones(2, 7))
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            linear()
        scan.step()
        linear(input=torch.ones(2, 8)).sum().backward()
        scan.step()
        assert scan.latest()["param_stats"]["0.weight"]["activation_norm"] == 4.0


def test_copies_have_neither_hook_nor_shortcut() -> None:
    model = chain()
    with pyscan.attach(model) as scan:
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            assert not any(hooks.CALL in module.__dict__ for module in copied.modules())
            copied(torch.ones(2, 8)).sum().backward()
        scan.step()
        assert scan.latest()["param_stats"]["0.weight"]["activation_norm"] is None
    assert not any(hooks.CALL in module.__dict__ for module in model.modules())


def test_a_replica_for_data_parallel_uses_its_own_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.linear.weight)

    model, ones = Model(), torch.ones(2, 8)
    with pyscan.attach(model) as scan:
        whole, linear = model._replicate_for_data_parallel(), model.linear._replicate_for_data_parallel()
        linear.weight, linear.bias = torch.eye(8), None  # as torch gives them to a replica
        whole.linear = linear
        assert torch.equal(whole(ones), ones)
        assert torch.equal(linear(ones), ones)
        scan.step()
        assert scan.latest()["param_stats"]["linear.weight"]["activation_norm"] == 4.0
        assert all(hooks.CALL in module.__dict__ for module in model.modules())


def test_a_module_that_is_compiled_in_place_stays_so() -> None:
    model, ran = nn.Sequential(nn.Linear(8, 8)), []
    linear = model[0]

    def compiled(x: Tensor) -> Tensor:
        ran.append("compiled")
        return linear._call_impl(x)

    linear._compiled_call_impl = compiled
    with pyscan.attach(model) as scan:
        model(torch.ones(2, 8)).sum().backward()
        scan.step()
        assert scan.latest()["param_stats"]["0.weight"]["activation_norm"] == 4.0
    assert ran == ["compiled"]
    assert linear._compiled_call_impl is compiled


@pytest.mark.parametrize("kind", ["pre", "forward"])
def test_a_hook_that_comes_later_runs(kind: str) -> None:
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(8, 8))
    register = model[0].register_forward_pre_hook if kind == "pre" else model[0].register_forward_hook
    with pyscan.attach(model):
        for _ in range(2):
            model(torch.ones(2, 8))
        handle = register(lambda *_: ran.append(kind))
        model(torch.ones(2, 8))
        handle.remove()
        model(torch.ones(2, 8))
    assert ran == [kind]


def test_a_dict_of_hooks_that_is_replaced_is_noticed() -> None:
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(8, 8))
    with pyscan.attach(model):
        model(torch.ones(2, 8))
        kept = model[0]._forward_hooks
        model[0]._forward_hooks = OrderedDict({0: lambda *_: ran.append("hook")})
        model(torch.ones(2, 8))
        model[0]._forward_hooks = kept
        model(torch.ones(2, 8))
    assert ran == ["hook"]


class Registers(nn.Module):
    """Its forward adds a hook to itself the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.ran: list[str] = []

    def forward(self, ids: Tensor) -> Tensor:
        if not self._has_hook():
            self.register_forward_hook(self._run)
            self.embed.register_forward_hook(self._run)
        return self.embed(ids)

    def _has_hook(self) -> bool:
        return any(getattr(hook, "__self__", None) is self for hook in self._forward_hooks.values())

    def _run(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self.ran.append(type(module).__name__)


def test_a_hook_that_forward_adds_runs_when_it_would_without_the_scanner() -> None:
    ran = []
    for scanned in (False, True):
        model = Registers()
        with pyscan.attach(model) if scanned else contextlib.nullcontext():
            for _ in range(2):
                model(torch.zeros(3, dtype=torch.long)).sum().backward()
                model.ran.append("end")
        ran.append(model.ran)
    assert ran[0] == ran[1] == ["Embedding", "end", "Embedding", "Registers", "end"]


def test_a_scan_that_is_closed_inside_a_forward_sees_nothing_of_its_end() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            if scan is not None:
                scan.close()
            return {"loss": self.linear(input_ids.float()).sum()}

    scan: pyscan.Scanner | None = None
    model = Model()
    with pyscan.attach(model) as attached:
        model(torch.ones(2, 8, dtype=torch.long))["loss"].backward()
        attached.step()
        scan = attached
        model(torch.ones(2, 8, dtype=torch.long))["loss"].backward()
        assert attached._forward.state.take_losses() == []
    assert [event["kind"] for event in attached.events if event["kind"] == "off"] == []


def test_torch_is_asked_the_same_by_both_ways() -> None:
    """What torch's libraries export, and what its Python functions say where a torch exports nothing."""

    def asked() -> list[tuple[bool, int, bool]]:
        answers = [_C.torch_state()]
        with torch.no_grad():
            answers.append(_C.torch_state())
        x = torch.ones(1, requires_grad=True)
        inside: list[int] = []
        x.register_hook(lambda grad: inside.append(_C.torch_state()[1] - torch._C._current_graph_task_id()))
        (2 * x).backward()
        assert inside == [0]
        torch.jit.trace(lambda y: answers.append(_C.torch_state()) or y + 1, torch.ones(1), check_trace=False)
        return answers

    try:
        torch_access.use_torch(is_native=False)
        assert asked() == [(True, -1, False), (False, -1, False), (True, -1, True)]
    finally:
        torch_access.use_torch()
    assert asked() == [(True, -1, False), (False, -1, False), (True, -1, True)]


@pytest.mark.parametrize("seconds", [0.002, 0.05])
def test_what_an_input_takes_is_counted_as_the_clock_counts_it(seconds: float) -> None:
    """In compiled code, which counts by the processor's own counter."""
    state = _C.CaptureState(1)
    buffer = _C.StepBuffer(3, [])
    see = _C.make_observer(buffer, state, 0, 8, lambda x: time.sleep(seconds))
    start = time.perf_counter()
    see("not a tensor, so all of it is left to that function")
    elapsed = time.perf_counter() - start
    assert seconds <= state.seconds * 1.001
    assert state.seconds <= elapsed * 1.001
