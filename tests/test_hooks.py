"""The shortcut around torch's handling of hooks: taken where ours is the only one, and never noticed by anyone else."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyscan
from pyscan import hooks


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def num_handled(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of the model's modules that went through torch's handling of hooks."""
    original, calls = nn.Module._call_impl, []

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "_call_impl", counted)
        model(torch.ones(2, 8)).sum().backward()
    return len([module for module in calls if module is not model])


def test_a_watched_module_without_other_hooks_takes_the_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain()
    assert num_handled(model, monkeypatch) == 2
    with pyscan.attach(model):
        assert num_handled(model, monkeypatch) == 0
        model[0].register_forward_hook(lambda module, args, output: None)
        assert num_handled(model, monkeypatch) == 1
    assert num_handled(model, monkeypatch) == 2


@pytest.mark.parametrize("when", ["before attach", "after attach"])
def test_every_other_hook_runs_once_and_in_its_place(when: str) -> None:
    def double(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        ran.append("pre")
        return (2 * args[0],)

    def register(linear: nn.Linear) -> list[Any]:
        return [
            linear.register_forward_pre_hook(double),
            linear.register_forward_hook(lambda *_: ran.append("forward")),
            linear.register_full_backward_hook(lambda *_: ran.append("backward")),
            linear.register_full_backward_pre_hook(lambda *_: ran.append("backward pre")),
        ]

    model, ran = nn.Linear(8, 8), []
    handles = register(model) if when == "before attach" else []
    with pyscan.attach(model) as scan:
        handles += register(model) if when == "after attach" else []
        for one in range(4):  # all of them, and then each one alone
            ran.clear()
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
            assert sorted(ran) == sorted(["pre", "forward", "backward", "backward pre"][one:])
            handles[one].remove()
            scan.step()
        norms = [row.cells[scan.buffer.cells("act", 0)][0] for row in scan.rows]
        # What the weight meets is doubled by the first hook while it is there; a hook after ours is not yet seen by it.
        assert norms == [64.0 if when == "before attach" else 16.0, 16.0, 16.0, 16.0]
        everywhere = nn.modules.module.register_module_forward_pre_hook(lambda *_: ran.append("everywhere"))
        ran.clear()
        model(torch.ones(2, 8))
        everywhere.remove()
        assert ran == ["everywhere"]


def test_errors_and_keywords_pass_as_they_are() -> None:
    model = nn.Linear(8, 8)
    with pyscan.attach(model) as scan:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.ones(2, 7))
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            model()
        scan.step()
        model(input=torch.ones(2, 8)).sum().backward()
        scan.step()
        assert scan.latest()["param_stats"]["weight"]["activation_norm"] == 4.0


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


def test_a_module_that_is_compiled_in_place_stays_so() -> None:
    model, ran = nn.Linear(8, 8), []

    def compiled(x: Tensor) -> Tensor:
        ran.append("compiled")
        return model._call_impl(x)

    model._compiled_call_impl = compiled
    with pyscan.attach(model) as scan:
        model(torch.ones(2, 8)).sum().backward()
        scan.step()
        assert scan.latest()["param_stats"]["weight"]["activation_norm"] == 4.0
    assert ran == ["compiled"]
    assert model._compiled_call_impl is compiled
