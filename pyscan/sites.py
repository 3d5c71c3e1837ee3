"""Find every weight of a model and the place where it meets its input.

Receives a model as the user has it (wrapped, adapted, quantised, partly frozen) and hands on an Inventory: the sites
in the order of the model, each with the module to watch and how, and a reason for every parameter not fully seen.
What a single parameter is for is decided in weights.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pyscan.shards import Held, whole
from pyscan.weights import Role, Weight, dtype_name, quantised, role_of, weights_of
from pyscan.wrappers import remarks

Patterns = str | Sequence[str] | None

# Wrappers add a component to every parameter name. `module` is also a name that models give to their own children, so
# it is dropped only below a class that is known to wrap.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "AveragedModel"}


@dataclass(frozen=True, eq=False)
class Site:
    """One weight matrix and the place where it meets its input. `shape` is (out, in); of an embedding, as stored.

    `observe` says how the input is seen: "module_input", by a forward pre-hook on `module`; "lookup", as the output of
    `module`; "functional", by pyscan.functional while `module` runs; "none", not at all, for the reason in `note`.
    """

    name: str
    kind: str
    module: nn.Module
    holder: nn.Module  # holds the parameter under `attribute`; differs from `module` where a parent consumes it
    attribute: str
    parameter: nn.Parameter | None  # whose .grad is recorded; None for quantised weights
    shape: tuple[int, int]
    dtype: str
    num_blocks: int
    in_axis: int  # axis of matrix(gradient) along which the input features, and so the blocks, run
    observe: str
    trainable: bool
    num_row_blocks: int = 0
    block: int = 0  # features per cell; 0: one cell, whatever its width
    held: Held = field(default_factory=lambda: whole((0, 0)))  # the part of the weight that this rank has
    expert: int | None = None
    tied_to: str | None = None
    note: str = ""
    originals: tuple[nn.Parameter, ...] = ()  # of a parametrised weight: everything its value is computed from

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The part of a tensor shaped like the local parameter that belongs to this site; None: it is elsewhere."""
        part = tensor
        if self.expert is not None:
            start, length = self.held.experts or (0, len(tensor))
            if not start <= self.expert < start + length:
                return None
            part = tensor[self.expert - start]
        return part if part.ndim == 2 else part.reshape(part.shape[0], -1)


@dataclass(frozen=True)
class Inventory:
    """All sites of a model; `coverage` names every parameter of two or more dimensions: "scanned" or the reason."""

    sites: list[Site] = field(default_factory=list)
    coverage: dict[str, str] = field(default_factory=dict)


def find_sites(
    model: nn.Module,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    block: int = 64,
    rows: bool = False,
    expert_blocks: bool = False,
) -> Inventory:
    """List the weights of `model`; `include` and `exclude` are regular expressions searched for in parameter names.

    Experts fused into one parameter have one cell each unless `expert_blocks` asks for blocks.
    """
    if block < 0:
        raise ValueError(f"block must be >= 0 (0: whole tensor), got {block}")
    wanted = _Filter(include, exclude)
    inventory = Inventory()
    first_names: dict[tuple[int, int | None], str] = {}  # (id of parameter, expert) -> first site that has it
    for name, weight, role, holder in _weights(model, inventory.coverage):
        reason = role.reason if role.kind == "none" else wanted.refusal(name) or _unseen(weight, role)
        if reason:
            inventory.coverage[name] = reason
            continue
        whole = _site(name, weight, role, holder)
        for site in _split(whole, role.num_experts):
            first = first_names.setdefault((id(weight.parameter), site.expert), site.name)
            tied_to = None if first == site.name else first
            inventory.sites.append(replace(_blocked(site, block, rows, expert_blocks), tied_to=tied_to))
        inventory.coverage[name] = _coverage(weight, role)
    if not inventory.sites:
        raise ValueError(wanted.explain(inventory.coverage) or _nothing_found(model))
    return inventory


def _weights(model: nn.Module, coverage: dict[str, str]) -> Iterator[tuple[str, Weight, Role, nn.Module]]:
    """Every weight once, under its first name; the other names of a shared module go straight into `coverage`."""
    first_names: dict[int, str] = {}  # id(module) -> name
    for name, module, ancestors in _modules(model):
        if isinstance(module, nn.utils.parametrize.ParametrizationList):
            continue  # its own parameters are listed with the module they belong to
        first = first_names.setdefault(id(module), name)
        _check_shapes(name, module)
        for weight in weights_of(module):
            full = _join(name, weight.path)
            if first != name:
                coverage[full] = f"scanned as {_join(first, weight.path)!r}"
                continue
            yield full, weight, role_of(weight, module, name.rpartition(".")[2], ancestors), module


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, of whatever shape, under its first name without wrappers."""
    seen: set[int] = set()
    for name, module, _ in _modules(model):
        _check_shapes(name, module)
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield _join(name, key), parameter


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that hold one matrix per expert along their first axis."""
    for name, weight, role, _ in _weights(model, {}):
        if role.num_experts is not None:
            yield name, weight.parameter


def named_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Every module with its first name without wrappers."""
    names: dict[nn.Module, str] = {}
    for name, module, _ in _modules(model):
        names.setdefault(module, name)
    return names


def _check_shapes(name: str, module: nn.Module) -> None:
    lazy = next(
        (key for key, parameter in module._parameters.items() if parameter is not None and is_lazy(parameter)), None
    )
    if lazy is not None:
        full = _join(name, lazy)
        raise ValueError(f"{full!r} of {type(module).__name__} has no shape yet: run one forward first")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module under every name it has: (name without wrappers, module, ancestors from the nearest to the root)."""
    stack: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", model, ())]
    while stack:
        name, module, ancestors = stack.pop()
        yield name, module, ancestors
        below = (module, *ancestors)
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        stack.extend((_join(name, _bare(module, key)), child, below) for key, child in reversed(children))


def _bare(module: nn.Module, key: str) -> str:
    wraps = key in _WRAPPED or (key == "module" and any(c.__name__ in _WRAPPERS for c in type(module).__mro__))
    return "" if wraps else key


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or key


def _unseen(weight: Weight, role: Role) -> str:
    if weight.parameter.requires_grad or role.observe != "none":
        return ""
    return f"frozen (requires_grad=False), and its input is not observed ({role.reason}): nothing to record"


def _site(name: str, weight: Weight, role: Role, holder: nn.Module) -> Site:
    parameter, stored = weight.parameter, quantised(weight.parameter)
    return Site(
        name=name,
        kind="quantized" if stored else role.kind,
        module=role.module,
        holder=holder,
        attribute=weight.attribute,
        parameter=None if stored else parameter,
        shape=role.shape,
        dtype=str(getattr(parameter, "quant_type", None) or dtype_name(parameter)),
        num_blocks=1,
        in_axis=role.in_axis,
        observe=role.observe,
        trainable=parameter.requires_grad,
        held=whole(role.shape),
        note=_note(name, weight, role, stored),
        originals=weight.originals,
    )


def _note(name: str, weight: Weight, role: Role, stored: str) -> str:
    if stored:
        logical = f"logical {role.shape[0]}x{role.shape[1]})"
        return f"{name!r} is {stored}, {logical}: it has no gradient; scan its LoRA matrices."
    if not weight.parameter.requires_grad:
        return f"{name!r} is frozen (requires_grad=False): recording its input activation only."
    return f"{name!r}: recording its gradient only, {role.reason}." if role.observe == "none" else ""


def _split(site: Site, num_experts: int | None) -> Iterator[Site]:
    if num_experts is None:
        yield site
        return
    for expert in range(num_experts):
        yield replace(site, name=f"{site.name}[{expert}]", expert=expert)


def _blocked(site: Site, block: int, rows: bool, expert_blocks: bool) -> Site:
    if site.expert is not None and not expert_blocks:
        block = 0
    num_rows, num_blocks = (-(-size // block) if block else 1 for size in site.shape)
    return replace(site, num_blocks=num_blocks, num_row_blocks=num_rows if rows else 0, block=block)


def _coverage(weight: Weight, role: Role) -> str:
    if stored := quantised(weight.parameter):
        return f"activation only: {stored})"
    if not weight.parameter.requires_grad:
        return "activation only: frozen (requires_grad=False)"
    return f"gradient only: {role.reason}" if role.observe == "none" else "scanned"


def _nothing_found(model: nn.Module) -> str:
    counts = Counter(type(m).__name__ for m in model.modules() if m._parameters)
    found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(8)) or "no module with parameters"
    remedy = "; ".join(remarks(model)) or "attach to the model after its layers are built"
    return (
        f"no weight matrix found in {type(model).__name__}: it holds {found}. pyscan scans parameters of two or more "
        f"dimensions that meet an activation; {remedy}."
    )


class _Filter:
    """The include and exclude patterns, checked once."""

    def __init__(self, include: Patterns, exclude: Patterns) -> None:
        self._include = _compile("include", include)
        self._exclude = _compile("exclude", exclude)

    def refusal(self, name: str) -> str:
        if self._include and not any(p.search(name) for p in self._include):
            return "excluded: no include pattern matches"
        hit = next((p for p in self._exclude if p.search(name)), None)
        return f"excluded: exclude pattern {hit.pattern!r} matches" if hit else ""

    def explain(self, coverage: dict[str, str]) -> str:
        """Why nothing is left, when it is the patterns that left nothing."""
        refused = [name for name, reason in coverage.items() if reason.startswith("excluded")]
        if not refused:
            return ""
        patterns = [f"{what}={[p.pattern for p in ps]}" for what, ps in self._both() if ps]
        return f"{' and '.join(patterns)} leave none of {len(refused)} weights; the first are {', '.join(refused[:4])}"

    def _both(self) -> list[tuple[str, list[re.Pattern[str]]]]:
        return [("include", self._include), ("exclude", self._exclude)]


def _compile(what: str, patterns: Patterns) -> list[re.Pattern[str]]:
    return [_regex(what, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns or [])]


def _regex(what: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{what} must be a regular expression, got {pattern!r}: {error}") from None
