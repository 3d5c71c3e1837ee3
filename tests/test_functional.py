"""What functional capture sees is what the weights met, and nothing it does outlives the forward."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyscan import intercept, uses
from pyscan.functional import FunctionalCapture
from pyscan.sites import Site, find_sites
from tests import families, link

# Modules that a forward of the family does not call, and so sites that see nothing.
UNCALLED = {"t5": {"shared.weight"}}
TOLERANCE = 1e-5

Seen = list[tuple[int, Tensor, Tensor | None]]


def run(family: families.Family) -> link.Recording:
    sites = find_sites(family.model).sites
    return link.record(sites, lambda: family.loss().backward())


def expected_gradient(site: Site, weight_gradient: Tensor) -> Tensor:
    """The gradient of the parameter that g^T x implies: through the parametrisation where there is one."""
    if not site.originals:
        return weight_gradient if site.in_axis == 1 else weight_gradient.T
    site.holder.eval()  # spectral_norm would take another step of its power iteration
    if site.attribute == "weight_v":
        weight = torch._weight_norm(site.holder.weight_v, site.holder.weight_g, 0)
    else:
        weight = getattr(site.holder, site.attribute)
    return torch.autograd.grad(weight, site.parameter, weight_gradient.to(weight.dtype))[0]


def link_errors(recording: link.Recording) -> dict[str, float]:
    """Relative error of every trainable parameter that was seen, tied sites added up."""
    gradients = link.weight_gradients(recording)
    groups: dict[str, Tensor] = {}
    for site in recording.sites:
        if site.name in gradients:
            first = site.tied_to or site.name
            groups[first] = groups.get(first, 0) + expected_gradient(site, gradients[site.name]).double()
    errors = {}
    by_name = {site.name: site for site in recording.sites}
    for name, gradient in groups.items():
        site = by_name[name]
        truth = site.matrix(site.parameter.grad).double()
        errors[name] = (
            float((gradient - truth).norm() / max(truth.norm(), 1e-30)) if truth.any() else float(gradient.norm())
        )
    return errors


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_observed_site_links_its_input_to_its_gradient(name: str) -> None:
    family = families.build(name)
    recording = run(family)
    assert recording.problems == {}
    observed = {site.name for site in recording.sites if site.observe != "none"} - UNCALLED.get(name, set())
    unrouted = {s.name for s in recording.sites if s.expert is not None and s.name not in recording.seen()}
    assert recording.seen() == observed - unrouted
    for site in recording.sites:
        if site.name in unrouted and site.trainable:
            assert not site.matrix(site.parameter.grad).any(), f"{site.name} had tokens that were not seen"
    errors = link_errors(recording)
    trainable = {s.tied_to or s.name for s in recording.sites if s.trainable and s.name in recording.seen()}
    assert {n for n in errors if n in trainable} == trainable
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", ["mixtral-grouped_mm", "gpt_oss-batched_mm", "mixtral-eager", "attention", "odd"])
def test_capture_changes_no_loss_and_no_gradient(name: str, one_thread: None) -> None:
    bare, scanned = families.build(name), families.build(name)
    bare_loss, scanned_loss = bare.loss(), None
    bare_loss.backward()
    capture = FunctionalCapture(find_sites(scanned.model).sites, lambda *use: None, on_error=pytest.fail)
    scanned_loss = scanned.loss()
    scanned_loss.backward()
    capture.remove()
    assert torch.equal(bare_loss, scanned_loss)
    for (key, one), (_, other) in zip(bare.model.named_parameters(), scanned.model.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), key


class Attached:
    """A capture that keeps what it saw."""

    def __init__(self, model: nn.Module) -> None:
        self.sites = find_sites(model).sites
        self.seen: Seen = []
        self.errors: list[Exception] = []
        self.capture = FunctionalCapture(self.sites, self._see, on_error=self.errors.append)

    def _see(self, site: int, x: Tensor, offsets: Tensor | None) -> None:
        self.seen.append((site, x.detach().clone(), offsets))

    def names(self) -> list[str]:
        return [self.sites[site].name for site, _, _ in self.seen]


@pytest.fixture
def one_thread() -> Any:
    """Gathered experts get their gradient by atomic additions: with two threads torch differs from itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_left() -> Any:
    """Whatever happens in a test, torch is as it was afterwards."""
    before = F.linear, torch._grouped_mm, torch._C._len_torch_function_stack()
    yield
    assert (F.linear, torch._grouped_mm, torch._C._len_torch_function_stack()) == before
    assert intercept.listeners() == []


IMPLEMENTATIONS = ["mixtral-grouped_mm", "mixtral-batched_mm", "mixtral-eager", "gpt_oss-eager", "attention", "mamba"]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_without_gradients_nothing_is_seen(name: str) -> None:
    family = families.build(name)
    attached = Attached(family.model)
    with torch.no_grad():
        family.loss()
    with torch.inference_mode():
        family.loss()
    if hasattr(family.model, "generate"):
        family.model.generate(family.batch["input_ids"], max_new_tokens=2, do_sample=False)
    assert attached.seen == []
    family.loss()
    assert attached.seen


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_exception_in_the_forward_leaves_nothing_behind(name: str) -> None:
    family = families.build(name)
    attached = Attached(family.model)
    owner = next(s.module for s in attached.sites if s.observe == "functional")

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    for register in (owner.register_forward_pre_hook, owner.register_forward_hook):
        handle = register(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            family.loss()
        assert intercept.listeners() == []
        handle.remove()
    attached.seen.clear()
    family.loss().backward()
    weights = {(s.holder, s.attribute) for s in attached.sites if s.observe == "functional"}
    assert {(attached.sites[i].holder, attached.sites[i].attribute) for i, _, _ in attached.seen} == weights


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["attention", "mixtral-eager"])
def test_a_keyboard_interrupt_heals_at_the_next_forward(name: str) -> None:
    family = families.build(name)
    attached = Attached(family.model)
    owner = next(s.module for s in attached.sites if s.observe == "functional")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    handle = owner.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        family.loss()
    handle.remove()
    attached.seen.clear()
    family.loss()
    once = len(attached.seen)
    attached.seen.clear()
    family.loss()
    assert len(attached.seen) == once > 0


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_two_captures_see_the_same(name: str) -> None:
    family = families.build(name)
    one, other = Attached(family.model), Attached(family.model)
    family.loss()
    assert one.names() == other.names() != []
    one.capture.remove()
    count = len(one.seen)
    family.loss()
    assert len(one.seen) == count
    assert len(other.seen) == 2 * count


class Nested(nn.Module):
    """A watched module around an attention: both are owners, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.attn = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.attn(x, x, x)[0], self.mix)


@pytest.mark.usefixtures("nothing_left")
def test_nested_owners_each_see_their_own() -> None:
    model = Nested()
    attached = Attached(model)
    model(torch.randn(3, 2, 8))
    assert sorted(attached.names()) == ["attn.in_proj_weight", "attn.out_proj.weight", "mix"]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["attention", "mixtral-grouped_mm", "mixtral-eager"])
def test_the_recompute_of_a_checkpoint_is_seen_in_the_backward(name: str, reentrant: bool) -> None:
    family = families.build(name)
    attached = Attached(family.model)
    family.loss()
    once = len(attached.seen)
    attached.seen.clear()
    in_backward: list[bool] = []
    attached.capture.sink = lambda *use: in_backward.append(torch._C._current_graph_task_id() != -1)
    if name == "attention":
        batch = {key: value.requires_grad_() for key, value in family.batch.items()}
        checkpoint(lambda *values: family.model(*values), *batch.values(), use_reentrant=reentrant).backward()
    else:
        family.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        family.loss().backward()
    assert in_backward.count(True) == once
    assert in_backward.count(False) == (0 if reentrant else once)


@pytest.mark.usefixtures("nothing_left")
def test_other_threads_call_the_original_while_an_owner_runs() -> None:
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    attached = Attached(model)
    weight, foreign = torch.randn(4, 8), []
    original = F.linear

    def other_thread() -> None:
        foreign.append((F.linear is original, F.linear(x, weight), F.linear(x, model.out_proj.weight)))

    def start_thread(*args: object) -> None:
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()

    handle = model.register_forward_pre_hook(start_thread)
    model(x, x, x)
    handle.remove()
    replaced, out, _ = foreign[0]
    assert not replaced
    assert torch.equal(out, original(x, weight))
    assert attached.names() == ["in_proj_weight", "out_proj.weight"]


@pytest.mark.usefixtures("nothing_left")
def test_a_function_someone_wraps_meanwhile_is_seen_once_and_stays_theirs() -> None:
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    attached = Attached(model)
    original = F.linear

    def wrap(*args: object) -> None:
        inner = F.linear
        F.linear = lambda *a, **k: inner(*a, **k)

    try:
        handle = model.register_forward_pre_hook(wrap)
        model(x, x, x)
        handle.remove()
        theirs = F.linear
        attached.seen.clear()
        model(x, x, x)
        assert attached.names() == ["in_proj_weight", "out_proj.weight"]
        assert F.linear is theirs
    finally:
        F.linear = original


def test_copies_of_the_model_are_not_seen() -> None:
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    seen: Seen = []
    # A function is not copied by deepcopy and not pickled: a hook that followed the copy would show in either way.
    capture = FunctionalCapture(find_sites(model).sites, lambda *use: seen.append(use), on_error=lambda error: None)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(x, x, x)
    assert seen == []
    model(x, x, x)
    assert len(seen) == 2
    capture.remove()


@pytest.mark.usefixtures("nothing_left")
def test_the_first_error_ends_the_capture_and_not_the_forward() -> None:
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    errors: list[Exception] = []

    def sink(*use: object) -> None:
        raise ZeroDivisionError

    capture = FunctionalCapture(find_sites(model).sites, sink, on_error=errors.append)
    model(x, x, x)[0].sum().backward()
    assert [type(error) for error in errors] == [ZeroDivisionError]
    capture.remove()


@pytest.mark.usefixtures("nothing_left")
def test_replaced_parameters_are_followed() -> None:
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    attached = Attached(model)
    model(x, x, x)
    model.out_proj.weight = nn.Parameter(torch.randn(8, 8))
    model(x, x, x)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model(x, x, x)
    assert attached.names() == ["in_proj_weight", "out_proj.weight"] * 3


class InOutUnsaid(nn.Module):
    """Stores its weight [in, out] and does not say so."""

    def __init__(self, num_out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, num_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("num_out", [5, 8])
def test_a_weight_met_along_the_other_axis_is_a_problem_and_not_a_number(num_out: int) -> None:
    model = InOutUnsaid(num_out)
    attached = Attached(model)
    model(torch.randn(3, 8))
    assert attached.seen == []
    assert attached.capture.problems.keys() == {0}
    assert attached.capture.problems[0].startswith("'kernel': met along")
    assert "is_transposed = True" in attached.capture.problems[0]


class TiedAutoencoder(nn.Module):
    """Meets its one weight along both axes; the site's input is what meets the first."""

    def __init__(self, num_hidden: int) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(num_hidden, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.code).relu(), self.code.T)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("num_hidden", [5, 8])
def test_a_weight_met_along_both_axes_hands_on_the_input_alone(num_hidden: int) -> None:
    model, x = TiedAutoencoder(num_hidden), torch.randn(3, 8)
    attached = Attached(model)
    for _ in range(2):
        model(x)
    assert all(torch.equal(seen, x) for _, seen, _ in attached.seen)
    assert len(attached.seen) == 2
    assert attached.capture.problems.keys() == {0}


@pytest.mark.parametrize("num_out", [5, 8])
def test_a_module_that_says_how_it_stores_its_weight_is_believed(num_out: int) -> None:
    model = InOutUnsaid(num_out)
    model.is_transposed = True
    attached = Attached(model)
    model(torch.randn(3, 8))
    assert (attached.names(), attached.capture.problems) == (["kernel"], {})
    assert (attached.sites[0].shape, attached.sites[0].in_axis) == ((num_out, 8), 0)


def _shift_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    real = uses._rows_of_experts

    def rows(known: Any, x: Tensor, offsets: Tensor | None) -> Any:
        site, x, ends = real(known, x, offsets)
        return site, x, None if ends is None else (ends + 1).clamp(max=len(x))

    monkeypatch.setattr(uses, "_rows_of_experts", rows)


def _neighbour_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    real = uses._rows_of_experts

    def rows(known: Any, x: Tensor, offsets: Tensor | None) -> Any:
        site, x, ends = real(known, x, offsets)
        return (site ^ 1 if known.expert is not None else site), x, ends

    monkeypatch.setattr(uses, "_rows_of_experts", rows)


def _reversed_features(monkeypatch: pytest.MonkeyPatch) -> None:
    real = uses.Frame.use

    def use(*args: Any) -> Any:
        found = real(*args)
        return found and (found[0], found[1].flip(-1), found[2])

    monkeypatch.setattr(uses.Frame, "use", use)


def _miss_views(monkeypatch: pytest.MonkeyPatch) -> None:
    real = uses.Frame._find
    monkeypatch.setattr(uses.Frame, "_find", lambda self, t: real(self, t) if isinstance(t, nn.Parameter) else None)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("mixtral-grouped_mm", _shift_offsets),
        ("mixtral-batched_mm", _shift_offsets),
        ("mixtral-eager", _neighbour_expert),
        ("attention", _reversed_features),
        ("attention", _miss_views),
        ("mixtral-eager", _miss_views),
    ],
)
def test_a_planted_fault_is_caught(
    name: str, break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        test_every_observed_site_links_its_input_to_its_gradient(name)


def test_a_wrong_input_axis_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    family = families.build("gpt2")
    recording = run(family)
    site = next(s for s in recording.sites if s.name.endswith("attn.c_proj.weight"))  # square
    assert link_errors(recording)[site.name] < TOLERANCE
    object.__setattr__(site, "in_axis", 1)
    assert link_errors(recording)[site.name] > 0.1


class Fickle(nn.Module):
    """Calls torch in a way that a test can change."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.mix)


BUILTIN_LINEAR = F.linear
WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "by module": (lambda x, w: F.linear(x, w), "linear"),
    "by keywords": (lambda x, w: F.linear(weight=w, input=x), "linear"),
    "by an imported name": (lambda x, w: BUILTIN_LINEAR(x, w), ""),
    "by operator": (lambda x, w: x @ w.T, ""),
    "by method": (lambda x, w: x.matmul(w.mT), ""),
    "by two functions": (lambda x, w: F.linear(torch.matmul(x, w.T), w), ""),
    "after a cast": (lambda x, w: F.linear(x.double(), w.double()), ""),
    "from the left": (lambda x, w: torch.matmul(w, x.mT).mT, "matmul"),
    "with a bias": (lambda x, w: torch.addmm(torch.zeros(8), x, w.T), ""),
}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_torch_is_seen_at_every_forward(way: str) -> None:
    product, learned = WAYS[way]
    model, x = Fickle(product), torch.randn(3, 8)
    attached = Attached(model)
    for _ in range(3):
        model(x)
    uses_per_forward = 2 if way == "by two functions" else 1
    assert attached.names() == ["mix"] * 3 * uses_per_forward
    assert torch.equal(attached.seen[0][1].to(x.dtype), x)
    assert [owner.learned for owner in attached.capture._owners] == [{None: learned}]


@pytest.mark.usefixtures("nothing_left")
def test_the_part_of_a_forward_without_gradients_is_not_seen() -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            scale = F.linear(x * 2, weight).norm()
        return F.linear(x, weight) / scale

    model, x = Fickle(product), torch.randn(3, 8)
    attached = Attached(model)
    for _ in range(2):
        model(x)
    assert all(torch.equal(seen, x) for _, seen, _ in attached.seen)
    assert attached.names() == ["mix", "mix"]


@pytest.mark.usefixtures("nothing_left")
def test_a_module_that_changes_its_way_is_learned_again() -> None:
    model, x = Fickle(WAYS["by module"][0]), torch.randn(3, 8)
    attached = Attached(model)
    model(x)
    model.product = WAYS["by operator"][0]
    for _ in range(3):
        model(x)
    assert len(attached.seen) == 3  # all but the one forward that went where only F.linear was listened to


@pytest.mark.usefixtures("nothing_left")
def test_a_changed_experts_implementation_is_learned_for_itself() -> None:
    family = families.build("mixtral-grouped_mm")
    attached = Attached(family.model)
    per_layer = {"grouped_mm": 2, "eager": 8, "batched_mm": 2}
    for implementation in ("grouped_mm", "eager", "batched_mm", "grouped_mm", "eager"):
        family.model.set_experts_implementation(implementation)
        attached.seen.clear()
        family.loss()
        assert len(attached.seen) == 2 * per_layer[implementation], implementation


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["attention", "mixtral-eager", "gpt_oss-eager", "mixtral-batched_mm"])
def test_autocast_is_seen_like_full_precision(name: str) -> None:
    family = families.build(name)
    attached = Attached(family.model)
    family.loss()
    plain, attached.seen[:] = attached.names(), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        family.loss()
    assert set(attached.names()) == set(plain)
    assert attached.capture.problems == {}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["encoder", "attention"])
def test_a_compiled_model_stays_one_graph_and_is_not_seen(name: str) -> None:
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    family = families.build(name)
    expected = family.loss()
    attached = Attached(family.model)
    compiled = torch.compile(family.model, backend="aot_eager", fullgraph=True)
    losses = [family.loss(compiled) for _ in range(3)]
    assert all(torch.equal(loss, expected) for loss in losses)
    assert counters["stats"]["unique_graphs"] == 1
    assert attached.seen == []
