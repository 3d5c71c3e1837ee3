"""Attach to the training of a program that does not know of pyscan.

Watches torch being imported and optimizers being built; at the first forward with gradients after that it attaches to
the outermost module that owns the optimizers' parameters, says so, and leaves torch as it was. Where the program
attaches by itself, nothing is done. Nothing that goes wrong here reaches the program.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pyscan.scanner import Scanner


def say(line: str) -> None:
    with contextlib.suppress(Exception):  # the program may have closed its stderr
        print(f"pyscan: {line}", file=sys.stderr, flush=True)


class AutoAttach:
    """One program, one scan. `settings` are the keyword arguments of attach."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._scan: Scanner | None = None
        self._done = False  # attached, given up, or the program attached by itself
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Before the program begins. torch is not imported for it: the program may want to set it up first."""
        after_import("torch.optim.optimizer", self._torch_arrived)
        after_import("pyscan.scanner", self._watch_attach)
        atexit.register(self._finish)

    # What happens in the program

    def _torch_arrived(self, module: ModuleType) -> None:
        original = module.Optimizer.__init__

        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(optimizer, *args, **kwargs)
            self._optimizer_built(optimizer)

        self._replace(module.Optimizer, "__init__", __init__)

    def _optimizer_built(self, optimizer: Optimizer) -> None:
        if self._done:
            return
        self._optimizers.append(weakref.ref(optimizer))
        if len(self._optimizers) == 1:
            self._watch_forwards()

    def _watch_forwards(self) -> None:
        import torch
        from torch.nn import Module

        original = Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if torch.is_grad_enabled() and not self._done and not torch.compiler.is_compiling():
                self._forward(module)
            return original(module, *args, **kwargs)

        self._replace(Module, "__call__", __call__)

    def _forward(self, module: nn.Module) -> None:
        try:
            optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
            model = find_owner(module, optimizers)
            if model is not None:
                self._end_watching()
                self._attach(model, optimizers)
        except Exception as error:
            self._end_watching()
            say(f"not attached, the program runs on unscanned: {type(error).__name__}: {error}")

    def _attach(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        from pyscan import scanner, text

        owned = {id(p) for p in model.parameters()}
        followed = [optimizer for optimizer in optimizers if owned & _parameters(optimizer)]
        self._leave_attach()
        try:
            self._scan = scanner.attach(model, optimizer=followed, **self._settings)
        finally:
            self._watch_attach(scanner)
        self._finish_first()
        names = ", ".join(type(optimizer).__name__ for optimizer in followed)
        sites = text.plural(len(self._scan.schema.sites), "site")
        say(f"scanning {type(model).__name__} ({sites}) at each step of {names}, into {self._scan.path}")
        taken = steps_taken(followed) if self._settings.get("resume") else None
        if taken is not None:
            self._scan.load_state_dict({"step": taken})
            say(f"goes on after step {taken}, which is as many as {names} has taken")
        others = set[int]().union(*map(_parameters, optimizers)) - owned
        if others:
            say(f"{text.plural(len(others), 'parameter')} of other modules not scanned: one run scans one model")

    def _finish_first(self) -> None:
        """At exit the scan closes before its writer, which registered itself meanwhile, would."""
        atexit.unregister(self._finish)
        atexit.register(self._finish)

    def _step_aside(self, model: nn.Module) -> None:
        """The program calls pyscan.attach: its scan comes first."""
        ours, self._scan = self._scan, None
        self._leave_attach()
        self._end_watching()
        if ours is not None:
            ours.close()
        say("the program attaches pyscan by itself: `pyscan run` leaves the scan to it")

    def _finish(self) -> None:
        if self._scan is not None:
            self._scan.close()
            say(f"the scan is {self._scan.path}")
        elif not self._done:
            say("nothing was scanned: no forward with gradients came after an optimizer was built")

    # Changes to torch, and to attach

    def _replace(self, owner: type, name: str, new: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        new.__wrapped__ = original  # type: ignore[attr-defined]
        new.__doc__, new.__qualname__ = original.__doc__, original.__qualname__
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, original))

    def _watch_attach(self, scanner: ModuleType) -> None:
        scanner.before_attach.append(self._step_aside)

    def _leave_attach(self) -> None:
        from pyscan import scanner

        scanner.before_attach[:] = [call for call in scanner.before_attach if call != self._step_aside]

    def _end_watching(self) -> None:
        self._done = True
        self._optimizers = []
        while self._undo:
            self._undo.pop()()


def find_owner(called: nn.Module, optimizers: list[Optimizer]) -> nn.Module | None:
    """The module to attach to when this one is called; None if it has no parameter of an optimizer.

    The called module if it owns all parameters of the optimizers it has any of: the first call is the outermost. Else
    the smallest module alive that does, for instance a model of which only parts are called. Else the called one.
    """
    owned = {id(p) for p in called.parameters()}
    wanted = set[int]().union(*(p for p in map(_parameters, optimizers) if p & owned))
    if not wanted:
        return None
    if wanted <= owned:
        return called
    owners = [module for module in _live_modules() if wanted <= {id(p) for p in module.parameters()}]
    return min(owners, key=lambda module: sum(1 for _ in module.modules()), default=called)


def _live_modules() -> list[nn.Module]:
    from torch.nn import Module

    return [thing for thing in gc.get_objects() if issubclass(type(thing), Module)]


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def steps_taken(optimizers: list[Optimizer]) -> int | None:
    """How many steps the optimizers have counted, in this process or in those whose checkpoint they loaded.

    None if they do not count, as SGD, or have none yet. Steps that a GradScaler skipped are not among them.
    """
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return max((int(state["step"]) for state in states if "step" in state), default=None)


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call with the module as soon as it has been imported; at once if it has been already."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and has a word after it was executed; then it is gone."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in sys.meta_path)), None)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, self._call)
        return spec


def _call_after(loader: Loader, call: Callable[[ModuleType], None]) -> None:
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        del loader.exec_module
        call(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
