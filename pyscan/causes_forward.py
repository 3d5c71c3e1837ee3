"""Why a gradient is missing, learned by looking at a forward: on a tape of the batch, or in a scanner's last row.

Receives a Case with the names still unexplained; hands on a Cause for those of which the forward tells: never called,
used only where gradients are off, behind an activation that is zero everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyscan.attached import Attached, scanners_of
from pyscan.case import BLIND_CHECKPOINT, Case, Cause
from pyscan.parallel import without_sync
from pyscan.preserve import find_loss, run, running, untouched
from pyscan.tape import Event, Tape

_DETACHING = {"detach", "detach_", "data"}
_ACTIVATIONS = {
    "relu", "relu_", "relu6", "threshold", "clamp", "clamp_", "clip", "hardtanh", "hardsigmoid", "hardswish", "elu",
    "gelu", "silu", "sigmoid", "sigmoid_", "tanh", "tanh_", "softmax", "leaky_relu", "softplus", "dropout",
}  # fmt: skip


def look_at_forward(case: Case, names: list[str]) -> dict[str, Cause]:
    """What a forward tells about these names; nothing if there is neither a batch nor a scanner."""
    names = [name for name in names if case.statuses[name] in ("zero", "none")]
    if names and case.batch is not None:
        return _Tracer(case).explain(names)
    found: dict[str, Cause] = {}
    for scanner in scanners_of(case.model):
        found |= {name: cause for name in names if (cause := _from_row(scanner, name, case.statuses[name]))}
    return found


class _Tracer:
    """A tape of one forward and backward of the batch, and the way along it."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._tape = tape = Tape(case.parameters)
        assert case.batch is not None
        with untouched(case.model), running(case.model), without_sync(case.model), tape.recording(case.model):
            loss = find_loss(run(case.model, case.batch))
            if loss is not None and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        last = tape.maker_of(loss) if loss is not None else None
        self._before_loss = self._ancestors(last) if last is not None else set(range(len(tape.events)))

    def explain(self, names: list[str]) -> dict[str, Cause]:
        ways = {"none": self._none, "zero": self._zero}
        return {name: cause for name in names if (cause := ways[self._case.statuses[name]](name))}

    def _uses(self, name: str) -> list[int]:
        return [index for index, event in enumerate(self._tape.events) if name in event.parameters]

    def _ancestors(self, last: int) -> set[int]:
        found = {last}
        for index in range(last, -1, -1):
            if index in found:
                found.update(self._tape.events[index].makers)
        return found

    def _descendants(self, first: Iterable[int]) -> list[int]:
        found = dict.fromkeys(sorted(first))
        for index, event in enumerate(self._tape.events):
            if index not in found and any(maker in found for maker in event.makers):
                found[index] = None
        return sorted(found)

    def _none(self, name: str) -> Cause | None:
        events = [self._tape.events[i] for i in self._uses(name)]
        if not events:
            return self._never_called(name)
        if all(event.is_blind for event in events):
            return BLIND_CHECKPOINT
        if not any(event.grad_enabled for event in events):
            return _behind("no_grad", events[0])
        if all(event.op in _DETACHING for event in events):
            return _behind("detach()", events[0])
        return self._cut(name)

    def _never_called(self, name: str) -> Cause:
        owner = name.rpartition(".")[0]
        if owner in self._tape.called:
            return Cause("never_called", f"never used: {owner!r} is called, but does not touch it", _is_pooler(name))
        return Cause("never_called", f"never called: {owner!r} takes no part in the forward", _is_pooler(name))

    def _cut(self, name: str) -> Cause:
        """Where the way from a used parameter to the loss loses its gradient."""
        after = [self._tape.events[i] for i in self._descendants(self._uses(name)) if i in self._before_loss]
        cuts = [event for event in after if event.is_cut and not any(out.requires_grad for out in event.outputs)]
        explicit = [event for event in cuts if event.op in _DETACHING or not event.grad_enabled]
        if explicit:
            return _behind("detach()" if explicit[0].op in _DETACHING else "no_grad", explicit[0])
        if cuts:
            return _behind(f"{cuts[0].op}, which has no gradient,", cuts[0])
        return Cause("not_in_loss", "used, but what is computed with it does not reach the loss", _is_pooler(name))

    def _zero(self, name: str) -> Cause | None:
        meets = self._meets(name)
        events = [self._tape.events[i] for i in meets]
        if not events:
            return None
        is_matrix = self._case.parameters[name].ndim > 1
        if is_matrix and all(event.arguments and all(a.is_zero for a in event.arguments) for event in events):
            return self._dead_input(meets[0])
        if all(event.grad_is_zero for event in events):
            return self._dead_gradient(meets)
        return None

    def _meets(self, name: str) -> list[int]:
        """The calls with a gradient in which a parameter, or a view or cast of it, meets another tensor."""
        derived: set[int] = set()
        meets = []
        for index, event in enumerate(self._tape.events):
            others = [argument for argument in event.arguments if argument.maker not in derived]
            if name not in event.parameters and len(others) == len(event.arguments):
                continue
            if others or set(event.parameters) - {name}:
                meets.append(index)
            else:
                derived.add(index)
        return [index for index in meets if self._tape.events[index].grad_is_zero is not None]

    def _dead_input(self, index: int) -> Cause:
        """Back from a call with an all-zero input to the one that made the zeros."""
        source = next((i for i in self._tape.events[index].makers if self._tape.events[i].is_zero), None)
        while source is not None:
            event = self._tape.events[source]
            before = next((i for i in event.makers if self._tape.events[i].is_zero), None)
            if before is None:
                return _dead(f"its input is all zero: {_place(event)} gives nothing but zeros")
            source = before
        return _dead("its input is all zero: the batch brings nothing but zeros")

    def _dead_gradient(self, meets: list[int]) -> Cause | None:
        """Forward from a call whose gradient is zero to the one where it is not yet."""
        for index in self._descendants(meets):
            event = self._tape.events[index]
            if event.grad_is_zero is not False:
                continue
            zero = [p for p in event.parameters if not bool(self._case.parameters[p].detach().any())]
            if zero:
                text = f"expected at step 1: its gradient passes {zero[0]!r}, which is still all zero"
                return Cause("zero_weight", text, True)
            if event.is_zero:
                return _dead(f"no gradient comes back through {_place(event)}, which gives nothing but zeros")
            kind = "saturated" if event.op in _ACTIVATIONS else "with a zero derivative everywhere"
            return _dead(f"no gradient comes back through {_place(event)}, {kind}")
        return None


def _is_pooler(name: str) -> bool:
    """Encoders bring one along, and most losses do not use it."""
    return "pooler" in name.split(".")


def _place(event: Event) -> str:
    return f"{event.op} in {event.module!r}" if event.module else event.op


def _behind(what: str, event: Event) -> Cause:
    return Cause(
        "detached", f"used only behind {what} in {event.module!r}" if event.module else f"used only behind {what}"
    )


def _dead(text: str) -> Cause:
    return Cause("dead_activation", f"dead activation: {text}")


def _from_row(scanner: Attached, name: str, status: str) -> Cause | None:
    """What the last finished row of a scanner says of a weight; of other parameters it knows that of the weight."""
    site = name if name in scanner.coverage() else f"{name.rpartition('.')[0]}.weight"
    stats = scanner.latest()["param_stats"].get(site)
    if stats is None or scanner.coverage().get(site) != "scanned":
        return None
    norm = stats["activation_norm"]
    if status == "zero":
        return _dead("its input was all zero in the last step") if norm == 0 and site == name else None
    if norm is None:
        return Cause("never_called", "never called with gradients on in the last step: not at all, or under no_grad")
    return Cause("detached", "met an input with gradients on, but behind it a detach() cuts it off from the loss")
