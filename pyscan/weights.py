"""Decide what one parameter is for: which operation consumes it, along which axis, and how its input can be seen.

Receives a module with its ancestors and hands on its parameters of two or more dimensions (Weight), each with a Role.
Nothing is run to find out, and a parametrised weight is never evaluated: spectral_norm would change its state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.utils import parametrize

# A watched module pays about 2 us for every torch function that runs in it, so a whole model is never watched for the
# sake of one unusual parameter.
MAX_WATCHED_MODULES = 8

_NOT_MATMUL = re.compile(
    r"bias|token|(^|_)(abs_|rel_)?pos(ition|itional)?(_|s?$)|embed(ding)?s?$|(^|_)(A_log|A|D|scale|gamma|lambda|sinks?"
    r"|latents?|quer(y|ies)|mask_emb|codevectors|time_mix\w*)$"
)
_HIDDEN_KERNELS = re.compile(r"deepgemm|sonicmoe")
_ROUTER = re.compile(r"router|gate|topk", re.IGNORECASE)
_OLD_STYLE = {"weight_v": "weight_g", "weight_orig": None}  # torch.nn.utils.weight_norm and spectral_norm


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of two or more dimensions: `path` below its module names it, `attribute` is what the module reads."""

    path: str
    attribute: str
    parameter: nn.Parameter
    originals: tuple[nn.Parameter, ...] = ()

    @property
    def is_scale(self) -> bool:
        """Whether it only scales the rows of a parametrised weight (the magnitude of weight_norm)."""
        return bool(self.originals) and self.parameter.numel() < max(p.numel() for p in self.originals)


@dataclass(frozen=True, eq=False)
class Role:
    """What a weight does. Kind "none": no activation meets it as a matrix, for `reason`."""

    kind: str
    module: nn.Module  # whose forward consumes the weight
    shape: tuple[int, int] = (0, 0)  # (out, in)
    in_axis: int = 1
    observe: str = "module_input"
    reason: str = ""
    num_experts: int | None = None


def weights_of(module: nn.Module) -> Iterator[Weight]:
    """The parameters of `module` itself, its parametrised ones included, that have two or more dimensions."""
    own = module._parameters
    for attribute, parameter in own.items():
        if parameter is None or parameter.ndim < 2:
            continue
        old = next((v for v, g in _OLD_STYLE.items() if v in own and attribute in (v, g)), None)
        originals = tuple(p for key in (_OLD_STYLE[old], old) if key and (p := own[key]) is not None) if old else ()
        yield Weight(attribute, attribute, parameter, originals)
    if parametrize.is_parametrized(module):
        for attribute, stack in module.parametrizations.items():  # type: ignore[union-attr,operator]
            originals = tuple(stack._parameters.values())
            for key, parameter in stack._parameters.items():
                if parameter is not None and parameter.ndim >= 2:
                    yield Weight(f"parametrizations.{attribute}.{key}", attribute, parameter, originals)


def role_of(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    """The role of `weight` in `module`, which its parent, the first of `ancestors`, calls `leaf`."""
    if weight.is_scale:
        return Role("none", module, reason="not a matmul weight: it scales the rows of a parametrised weight")
    if any(isinstance(a, parametrize.ParametrizationList) for a in ancestors):
        return Role("none", module, reason="part of a parametrisation: it meets a weight, not an activation")
    for kind, rule in _RULES:
        if isinstance(module, kind):
            role = rule(weight, module, leaf, ancestors)
            break
    else:
        role = _unknown(weight, module)
    if role.kind == "none" or not weight.originals:
        return role
    if role.observe == "functional":
        reason = "a parametrised weight used functionally is a new tensor each time"
        return replace(role, kind="parametrized", observe="none", reason=reason)
    return replace(role, kind="parametrized")


def quantised(parameter: torch.Tensor) -> str:
    """How a parameter without gradient is stored, for a message; empty when it is an ordinary tensor."""
    kind, stored = type(parameter), "x".join(map(str, parameter.shape))
    if kind.__name__ == "Params4bit":
        return f"4-bit (bitsandbytes Params4bit, stored {stored} {dtype_name(parameter)}"
    if kind.__name__ == "Int8Params":
        return f"8-bit (bitsandbytes Int8Params, stored {stored} {dtype_name(parameter)}"
    if not parameter.requires_grad and kind.__module__.partition(".")[0] != "torch":
        return f"quantised ({kind.__module__.partition('.')[0]} {kind.__name__}, stored {stored}"
    return ""


def dtype_name(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _linear(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    shape = (int(module.out_features), int(module.in_features))  # type: ignore[arg-type]
    parent = ancestors[0] if ancestors else None
    role = Role("router" if "router" in type(module).__name__.lower() else "linear", module, shape)
    if isinstance(parent, nn.MultiheadAttention):
        return replace(role, kind="mha_out", module=parent, observe="functional")
    if any(type(a).__name__ == "ParamWrapper" for a in ancestors[:2]):
        reason = "peft adds it to another parameter as a product of matrices, no activation meets it"
        return replace(role, observe="none", reason=reason)
    if leaf == "dt_proj" and parent is not None and "A_log" in parent._parameters:
        return replace(role, module=parent, observe="functional")  # Mamba mixers compute `dt_proj.weight @ x`
    return role


def _attention(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    if not weight.attribute.endswith("proj_weight"):
        return _not_matmul(weight, module)
    return Role("mha_in", module, _pair(weight.parameter), observe="functional")


def _embedding(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    return Role("embedding", module, (int(module.num_embeddings), int(module.embedding_dim)), observe="lookup")  # type: ignore[arg-type]


def _bag(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    reason = "EmbeddingBag sums its rows inside the kernel"
    return Role("embedding", module, _pair(weight.parameter), observe="none", reason=reason)


def _conv(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    first, rest = _pair(weight.parameter)
    reason = "a convolution reads overlapping windows of its input"
    if getattr(module, "transposed", False):  # stored [in, out, ...]
        return Role("conv", module, (rest, first), in_axis=0, observe="none", reason=reason)
    return Role("conv", module, (first, rest), observe="none", reason=reason)


def _recurrent(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    reason = f"{type(module).__name__} runs all its steps inside one kernel"
    return Role("other", module, _pair(weight.parameter), observe="none", reason=reason)


def _bilinear(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    reason = "Bilinear multiplies two inputs with it"
    return Role("other", module, _pair(weight.parameter), observe="none", reason=reason)


def _container(weight: Weight, module: nn.Module, leaf: str, ancestors: tuple[nn.Module, ...]) -> Role:
    reason = f"it stands in a {type(module).__name__}, which is never called"
    return Role("other", module, _pair(weight.parameter), observe="none", reason=reason)


_Rule = Callable[[Weight, nn.Module, str, tuple[nn.Module, ...]], Role]
_RULES: list[tuple[type | tuple[type, ...], _Rule]] = [
    (nn.Linear, _linear),
    (nn.MultiheadAttention, _attention),
    (nn.Embedding, _embedding),
    (nn.EmbeddingBag, _bag),
    (nn.modules.conv._ConvNd, _conv),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
    (nn.Bilinear, _bilinear),
    ((nn.ParameterList, nn.ParameterDict), _container),
]


def _unknown(weight: Weight, module: nn.Module) -> Role:
    """A module torch does not define: recognised by what it looks like, so that no library need be imported."""
    parameter, class_name = weight.parameter, type(module).__name__
    if class_name == "Conv1D" and hasattr(module, "nf"):  # GPT-2: stored [in, out]
        return Role("conv1d", module, (parameter.shape[1], parameter.shape[0]), in_axis=0)
    if _NOT_MATMUL.search(weight.attribute) or "Norm" in class_name or parameter.numel() == parameter.shape[-1]:
        return _not_matmul(weight, module)
    if parameter.ndim == 3 and (hasattr(module, "num_experts") or "expert" in class_name.lower()):
        return _fused_experts(weight, module)
    if parameter.ndim == 2 and weight.attribute == "weight" and _ROUTER.search(class_name):
        return Role("router", module, _pair(parameter))
    return _other(weight, module)


def _other(weight: Weight, module: nn.Module) -> Role:
    role = Role("other", module, _pair(weight.parameter), observe="functional")
    if weight.parameter.ndim > 2:
        return replace(role, observe="none", reason="it has more than two dimensions and is not known to hold experts")
    if sum(1 for _ in module.modules()) > MAX_WATCHED_MODULES:
        reason = f"{type(module).__name__} is too large to be watched; move it to a module of its own"
        return replace(role, observe="none", reason=reason)
    if _is_in_out(module, role.shape):
        return replace(role, shape=role.shape[::-1], in_axis=0)
    return role


def _is_in_out(module: nn.Module, stored: tuple[int, int]) -> bool:
    """Whether a module of the user's own says that its weight is stored [in, out]."""
    if isinstance(says := getattr(module, "is_transposed", None), bool):
        return says
    only = sum(1 for _ in weights_of(module)) == 1
    return only and getattr(module, "in_features", None) == stored[0] != stored[1]


def _fused_experts(weight: Weight, module: nn.Module) -> Role:
    num_experts, first, second = weight.parameter.shape
    transposed = _is_transposed(module)
    shape = (second, first) if transposed else (first, second)
    role = Role("expert", module, shape, 0 if transposed else 1, "functional", num_experts=num_experts)
    kernel = getattr(getattr(module, "config", None), "_experts_implementation", None) or ""
    if _HIDDEN_KERNELS.search(kernel):
        reason = f"experts run in {kernel!r}: the input is inside the kernel; use experts_implementation='grouped_mm'"
        return replace(role, observe="none", reason=reason)
    return role


def _is_transposed(module: nn.Module) -> bool:
    """Whether experts are stored [E, in, out]: the module says so, or the two projections fit together only so."""
    if isinstance(says := getattr(module, "is_transposed", None), bool):
        return says
    up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor):
        return bool(up.shape[2] != down.shape[1])
    return False


def _not_matmul(weight: Weight, module: nn.Module) -> Role:
    reason = f"not a matmul weight: {type(module).__name__} adds, scales with or looks up {weight.attribute!r}"
    return Role("none", module, reason=reason)


def _pair(parameter: torch.Tensor) -> tuple[int, int]:
    return int(parameter.shape[0]), math.prod(parameter.shape[1:])
