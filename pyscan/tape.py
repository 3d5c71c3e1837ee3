"""Write down one forward and backward, call by call: which torch function, in which module, from what, to where.

Receives a model while it runs; hands on a Tape of Events linked by their inputs, each with the parameters it used,
whether gradients were on, and whether its output and the gradient that came back were all zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pyscan.sites import named_modules

# Properties that hand on the values of a tensor; all others only tell about it.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}


class Argument(NamedTuple):
    """A tensor given to a call."""

    maker: int | None  # the event that made it
    is_zero: bool  # holds nothing but zeros, and is floating


@dataclass(eq=False)
class Event:
    """One call of a torch function."""

    op: str
    module: str
    parameters: tuple[str, ...]  # those among its arguments
    arguments: tuple[Argument, ...]  # the other tensors among them
    grad_enabled: bool
    is_blind: bool  # inside reentrant checkpointing whose inputs need no gradient
    is_cut: bool = False  # an argument needs a gradient, the result does not
    is_zero: bool = False
    grad_is_zero: bool | None = None  # None: none came back
    outputs: list[Tensor] = field(default_factory=list)  # kept, so that no other tensor takes their place

    @property
    def makers(self) -> list[int]:
        return [argument.maker for argument in self.arguments if argument.maker is not None]


class Tape(TorchFunctionMode):
    """Records while entered with `recording`; keeps every intermediate result of the forward alive."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.called: set[str] = set()  # names of modules
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._made_by: dict[int, int] = {}  # id of a tensor -> event
        self._modules: list[str] = [""]
        self._blind = 0

    @contextlib.contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, name in named_modules(model).items():
                enter, leave = self._enter(name), self._leave
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self._seeing_checkpoints())
            stack.enter_context(self)
            yield

    def maker_of(self, tensor: Tensor) -> int | None:
        """The event that made a tensor."""
        return self._made_by.get(id(tensor))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        given = list(_tensors((args, kwargs)))
        needs_grad = any(tensor.requires_grad for tensor in given)
        event = self._event(name, given) if name else None  # before the call, which may change its arguments
        out = func(*args, **(kwargs or {}))
        made = [t for t in _tensors(out) if id(t) not in self._names]  # `weight.to(...)` may be the weight itself
        if event is not None and given and made:
            event.is_cut = needs_grad and not any(t.requires_grad for t in made)
            self._add(event, made)
        return out

    def _event(self, name: str, given: list[Tensor]) -> Event:
        others = [t for t in given if id(t) not in self._names]
        return Event(
            op=name,
            module=self._modules[-1],
            parameters=tuple(self._names[id(t)] for t in given if id(t) in self._names),
            arguments=tuple(Argument(self._made_by.get(id(t)), _is_zero(t)) for t in others),
            grad_enabled=torch.is_grad_enabled(),
            is_blind=self._blind > 0,
        )

    def _add(self, event: Event, made: list[Tensor]) -> None:
        event.is_zero, event.outputs = all(map(_is_zero, made)), made
        for tensor in made:
            self._made_by[id(tensor)] = len(self.events)
            if tensor.grad_fn is not None and torch.is_grad_enabled():
                tensor.register_hook(_note_gradient(event))  # type: ignore[no-untyped-call]
        self.events.append(event)

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(name)
            self.called.add(name)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    @contextlib.contextmanager
    def _seeing_checkpoints(self) -> Iterator[None]:
        kind: Any = torch.utils.checkpoint.CheckpointFunction
        original = kind.apply

        def apply(*args: Any) -> Any:
            is_blind = not any(tensor.requires_grad for tensor in _tensors(args))
            self._blind += is_blind
            try:
                return original(*args)
            finally:
                self._blind -= is_blind

        kind.apply = apply
        try:
            yield
        finally:
            del kind.apply


def _note_gradient(event: Event) -> Callable[[Tensor], None]:
    def note(grad: Tensor) -> None:
        event.grad_is_zero = _is_zero(grad) and event.grad_is_zero is not False

    return note


def _name(func: Callable[..., Any]) -> str:
    """The name of a function, or of the property it reads; empty if the values of the tensor do not come through."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        return name if name in _VALUES else ""
    return "" if name in ("__set__", "__delete__") else str(name)


def _is_zero(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        has_values = tensor.layout is torch.strided and tensor.is_floating_point() and not tensor.is_meta
        return has_values and tensor.numel() > 0 and not bool(tensor.detach().any())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _of_all(value.values())
    elif isinstance(value, list | tuple):
        yield from _of_all(value)


def _of_all(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from _tensors(value)
