"""What hides weights or gradients is said in a sentence, at attach or in the error that nothing was found."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import pyscan


class FullyShardedDataParallel(nn.Module):
    """Known by its name: FSDP1 itself runs on accelerators alone."""

    def __init__(self, module: nn.Module, *, flat: bool) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        if flat:
            for layer in (module[0], module[2]):
                weight = layer.weight.detach()
                del layer.weight
                layer.weight = weight  # a view of the flat parameter, which is no parameter itself
            self._flat_param = nn.Parameter(torch.zeros(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._fsdp_wrapped_module(x)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_model_of_flat_parameters_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"FSDP1.*wrap the model with torch\.distributed\.fsdp\.fully_shard"):
        pyscan.attach(FullyShardedDataParallel(network(), flat=True))


def test_what_can_be_read_is_read_and_the_rest_is_said_once() -> None:
    model = FullyShardedDataParallel(network(), flat=False)
    with pytest.warns(RuntimeWarning, match="FSDP1"):
        scan = pyscan.attach(model)
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
        scan.step()
    assert [event["text"][:24] for event in scan.events if event["kind"] == "note"] == ["FullyShardedDataParallel"]
    assert scan.latest()["param_stats"]["0.weight"]["activation_norm"] > 0
    scan.close()


class DeepSpeedEngine(nn.Module):
    """What matters of DeepSpeed's: gradients are reduced, or taken away, when autograd has ended."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        super().__init__()
        self.module, self.stage = module, stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for parameter in self.module.parameters():
            parameter.grad = None if self.stage else parameter.grad / 2


@pytest.mark.parametrize("stage", [0, 2])
def test_of_deepspeed_the_reduced_gradient_is_recorded_or_none(stage: int) -> None:
    engine = DeepSpeedEngine(network(), stage)
    optimizer = torch.optim.SGD(engine.parameters(), 0.1)
    with pytest.warns(RuntimeWarning, match="safe_get_full_grad"):
        scan = pyscan.attach(engine, optimizer=optimizer)
    for _ in range(2):
        engine.backward(engine(torch.randn(3, 8)).square().sum())
        wanted = None if stage else float(engine.module[0].weight.grad.norm())
        optimizer.step()
        found = scan.latest()["param_stats"]["0.weight"]
        assert found["activation_norm"] > 0
        assert found["grad_norm"] == (pytest.approx(wanted, rel=1e-6) if wanted else None)
        optimizer.zero_grad()
    scan.close()


def test_parameters_of_deepspeed_are_known() -> None:
    model = network()
    model[0].weight.ds_id = 0
    with pytest.warns(RuntimeWarning, match="DeepSpeed"):
        pyscan.attach(model).close()


def test_warnings_that_are_errors_do_not_leave_the_scanner() -> None:
    model = network()
    model[0].weight.ds_id = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pyscan.attach(model) as scan:
            assert [event["text"][:9] for event in scan.events if event["kind"] == "note"] == ["DeepSpeed"]
