"""Why a parameter has no gradient, a zero one or a bad one: found from the model, the loss and its graph.

Receives a Case, the model in the state right after a backward; hands on a Cause for each name that is not ok. What can
only be learned by looking at a forward is left to causes_forward.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import torch
from torch import nn

from pyscan.case import BLIND_CHECKPOINT, Case, Cause
from pyscan.causes_forward import look_at_forward
from pyscan.preserve import backward
from pyscan.sites import fused_experts
from pyscan.weights import quantised


def explain(case: Case) -> dict[str, Cause]:
    """A cause for every name that is not ok, and for every fused expert that got nothing."""
    causes = dict(_of_experts(case))
    for name in case.names("zero", "none", "nan", "inf"):
        if (cause := next(filter(None, (rule(case, name) for rule in _RULES)), None)) is not None:
            causes[name] = cause
    for step in (_underflow, _zero_loss, look_at_forward, _flat, _unknown):
        rest = [name for name in case.names("zero", "none", "nan", "inf") if name not in causes]
        causes |= step(case, rest) if rest else {}
    return {name: causes[name] for name in [*case.statuses, *causes] if name in causes}


def _quantised(case: Case, name: str) -> Cause | None:
    parameter = case.parameters[name]
    if stored := quantised(parameter):
        return Cause("quantised", f"{stored}): it has no gradient; train LoRA matrices beside it, or unquantised", True)
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return Cause("quantised", f"stored as {parameter.dtype}: integers have no gradient", True)
    return None


def _frozen(case: Case, name: str) -> Cause | None:
    if case.parameters[name].requires_grad or case.statuses[name] != "none":
        return None
    return Cause("frozen", "frozen (requires_grad=False)", True)


def _own_value(case: Case, name: str) -> Cause | None:
    if case.statuses[name] in ("nan", "inf") and not bool(torch.isfinite(case.parameters[name].detach()).all()):
        return Cause("weight_not_finite", "the weight itself holds NaN or infinite values: go back to a checkpoint")
    return None


def _masked(case: Case, name: str) -> Cause | None:
    targets = case.graph.targets if case.graph is not None else []
    if not targets or case.statuses[name] == "none" or any(t.num_masked < t.num_rows for t in targets):
        return None
    rows = sum(t.num_rows for t in targets)
    return Cause("labels_masked", f"all {rows} labels are masked (-100): there is nothing to learn in this batch")


def _lora(case: Case, name: str) -> Cause | None:
    """Of the two factors of an update, the one beside a zero factor gets a zero gradient."""
    partner = _partner(name) if case.statuses[name] == "zero" else None
    if partner is None or partner not in case.parameters or bool(case.parameters[partner].detach().any()):
        return None
    return Cause("lora_first_step", f"expected at step 1: its partner {partner!r} is still zero", True)


_FACTOR = re.compile(r"lora_(embedding_)?(A|B|a|b|down|up)(?![a-zA-Z])")
_PARTNERS = {"A": "B", "B": "A", "a": "b", "b": "a", "down": "up", "up": "down"}


def _partner(name: str) -> str | None:
    swapped, count = _FACTOR.subn(lambda m: f"lora_{m[1] or ''}{_PARTNERS[m[2]]}", name)
    return swapped if count else None


_EXPERT = re.compile(r"^(.*expert[^.]*\.)(\d+)(\..*)$")


def _expert(case: Case, name: str) -> Cause | None:
    """An expert that is a module of its own: nothing of it has a gradient, and another expert of the layer has."""
    if (match := _EXPERT.match(name)) is None or case.statuses[name] not in ("zero", "none"):
        return None
    layer, expert = match[1], f"{match[1]}{match[2]}."
    mine = {status for other, status in case.statuses.items() if other.startswith(expert)}
    others = {status for other, status in case.statuses.items() if other.startswith(layer)} - mine
    return _NO_TOKENS if "ok" in others and mine <= {"zero", "none"} else None


_NO_TOKENS = Cause("expert_without_tokens", "expert without tokens: the router sent it none in this step", True)


def _of_experts(case: Case) -> Iterator[tuple[str, Cause]]:
    """Experts fused into one parameter that is ok as a whole: those whose part is zero, as `name[3]`."""
    if all(parameter.ndim < 3 for parameter in case.parameters.values()):
        return
    for name, parameter in fused_experts(case.model):
        if case.statuses.get(name) == "ok" and parameter.grad is not None:
            has_any = parameter.grad.flatten(1).any(1).tolist()
            yield from ((f"{name}[{expert}]", _NO_TOKENS) for expert, has in enumerate(has_any) if not has)


def _checkpoint(case: Case, name: str) -> Cause | None:
    """Reentrant checkpointing set up by transformers, of which no trace is in the graph of the loss."""
    if case.statuses[name] != "none" or case.graph is None or case.graph.num_checkpoints:
        return None
    parents = [case.modules.get(name[:end]) for end, letter in enumerate(name) if letter == "."]
    return BLIND_CHECKPOINT if any(module is not None and _is_reentrant(module) for module in parents) else None


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    settings = getattr(function, "keywords", None) or {}
    is_on = bool(getattr(module, "gradient_checkpointing", False)) and module.training
    return is_on and bool(settings.get("use_reentrant", False))


def _loss(case: Case, name: str) -> Cause | None:
    if case.loss is None:
        return None
    value, status = float(case.loss.detach()), case.statuses[name]
    if not case.loss.requires_grad:
        text = f"the loss ({value:.4g}) has no graph: computed under no_grad, as generate() does, or detached"
        return Cause("loss_constant", text)
    if status != "none" and not math.isfinite(value):
        return Cause("loss_not_finite", f"the loss itself is {value}: pyscan.trace_nonfinite(model, batch) says where")
    return None


def _overflow(case: Case, name: str) -> Cause | None:
    if case.statuses[name] not in ("nan", "inf"):
        return None
    if case.graph is not None and case.graph.has_half:
        text = "overflow in fp16: the loss is finite, its gradient is not; a GradScaler lowers the scale and goes on"
        return Cause("overflow", text)
    return Cause("backward_not_finite", "made in the backward pass: pyscan.trace_nonfinite(model, batch) says where")


_RULES: list[Callable[[Case, str], Cause | None]] = [
    _quantised,
    _frozen,
    _own_value,
    _masked,
    _lora,
    _expert,
    _checkpoint,
    _loss,
    _overflow,
]


def _underflow(case: Case, names: list[str]) -> dict[str, Cause]:
    """Zero gradients that appear when the loss is scaled: each scale tried costs one more backward."""
    zero = [name for name in names if case.statuses[name] == "zero"]
    if not zero or case.loss is None or case.graph is None or not case.graph.has_half:
        return {}
    for exponent in (8, 15) if case.loss.dtype is torch.float16 else (8, 15, 24):
        for parameter in case.parameters.values():
            parameter.grad = None
        backward(case.loss, 2.0**exponent)
        sizes = {name: grad.abs().max().item() for name in zero if (grad := case.parameters[name].grad) is not None}
        found = {name: size for name, size in sizes.items() if 0 < size < math.inf}
        if found:
            return {name: _needs_scale(2.0**exponent, size) for name, size in found.items()}
    return {}


def _needs_scale(scale: float, size: float) -> Cause:
    """The power of two that lifts the largest element, `size` at `scale`, to the smallest normal fp16 number."""
    needed = 2.0 ** math.ceil(math.log2(scale * 2.0**-14 / size))
    text = f"underflow in fp16: zero as it is, {size / scale:.2g} with the loss scaled; scale it by {needed:.0f}"
    return Cause("underflow", f"{text} (torch.amp.GradScaler(init_scale={needed:.0f}))")


def _zero_loss(case: Case, names: list[str]) -> dict[str, Cause]:
    if case.loss is None or float(case.loss.detach()) != 0 or case.names("ok", "nan", "inf"):
        return {}
    cause = Cause("loss_zero", "the loss itself is 0, and so is every gradient")
    return {name: cause for name in names if case.statuses[name] == "zero"}


def _flat(case: Case, names: list[str]) -> dict[str, Cause]:
    """A loss that depends on the parameters, and changes with none of them."""
    if case.loss is None or case.names("ok", "nan", "inf"):
        return {}
    text = f"the loss is constant here ({float(case.loss.detach()):.4g}): its gradient is 0 for every parameter"
    return {name: Cause("loss_constant", text) for name in names if case.statuses[name] == "zero"}


def _unknown(case: Case, names: list[str]) -> dict[str, Cause]:
    more = "" if case.batch is not None else "; pass batch= to learn why"
    texts = {"none": f"not connected to the loss{more}", "zero": f"the gradient is exactly zero{more}"}
    return {name: Cause("unknown", texts[case.statuses[name]]) for name in names}
