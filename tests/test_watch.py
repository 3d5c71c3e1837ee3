"""The rules of the watch: each fires for its fault, once, and not for what is healthy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyscan
from pyscan import _C
from pyscan.first_bad import Orders
from pyscan.levels import Bounds, Glance, Sites, levels_of
from pyscan.schema import SiteInfo
from pyscan.watch import KINDS, RowWatch, Watch
from tests import families

NAMES = ["embed.weight", *(f"layers.{i}.{part}.weight" for i in range(4) for part in ("up", "down")), "head.weight"]
BLOCKS = 3


def sites() -> list[SiteInfo]:
    return [SiteInfo(name, "linear", (32, 64 * BLOCKS), "float32", BLOCKS) for name in NAMES]


class Feed:
    """Rows with levels that wander by chance, to which a test does what it wants. The rules look at them as they are
    defined and as they are compiled, and must find the same."""

    def __init__(self, limits: Watch | None = None, orders: Orders | None = None) -> None:
        self.watch, self.compiled = (
            RowWatch(sites(), limits, lambda: orders or Orders(), kind) for kind in (Glance, _C.Glance)
        )
        self.random = np.random.default_rng(0)
        self.step = 0
        self.events: list[dict[str, Any]] = []
        self.scale = dict.fromkeys(NAMES, 1.0)  # of gradients, as norms

    def norms(self) -> dict[str, np.ndarray]:
        return {
            channel: np.exp(self.random.normal(0, 0.2, (len(NAMES), BLOCKS)))
            * (np.array([[self.scale[name]] for name in NAMES]) if channel == "grad" else 1.0)
            for channel in ("act", "grad")
        }

    def row(self, change: Any = None, *, loss: float | None = 1.0, flags: int = 0) -> list[dict[str, Any]]:
        """One more row; `change` may alter the norms [sites, blocks] by channel. What it sets off."""
        norms = self.norms()
        if change is not None:
            change(norms)
        squares = [np.where(norms[c] < 0, -1.0, np.square(norms[c])).ravel() for c in ("act", "grad")]
        maxima = [norms[c].max(axis=1) for c in ("act", "grad")]
        bad = np.zeros(2 * len(NAMES))
        self.step += 1
        cells = np.concatenate([*squares, *maxima, bad])
        found = self.watch.see(self.step, cells, loss, flags)
        assert rounded(self.compiled.see(self.step, cells, loss, flags)) == rounded(found)
        self.events += found
        return found

    def rows(self, count: int, change: Any = None, **options: Any) -> None:
        for _ in range(count):
            self.row(change, **options)


def rounded(value: Any) -> Any:
    """Numbers to 9 digits: compiled code adds in another order."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return f"{value:.9g}" if isinstance(value, float) else value


def at(channel: str, name: str, value: float) -> Any:
    """Multiply the norms of a site."""

    def change(norms: dict[str, np.ndarray]) -> None:
        norms[channel][NAMES.index(name)] *= value

    return change


def test_a_healthy_run_fires_nothing() -> None:
    feed = Feed()
    feed.scale = {name: 2.0 ** -(i % 6) for i, name in enumerate(NAMES)}
    feed.rows(500)
    assert feed.events == []
    assert feed.watch.finish(feed.step) == []


@pytest.mark.parametrize("channel", ["act", "grad"])
def test_a_spike_fires_once_and_again_only_after_a_calm_window(channel: str) -> None:
    feed = Feed()
    feed.rows(40)
    spike = at(channel, "layers.2.up.weight", 40)
    (event,) = feed.row(spike)
    assert (event["kind"], event["site"], event["channel"], event["step"]) == (
        "spike",
        "layers.2.up.weight",
        channel,
        41,
    )
    assert 25 < event["factor"] < 60
    assert set(event["neighbours"]) == {"layers.1.down.weight", "layers.2.down.weight"}
    assert all(0.3 < factor < 3 for factor in event["neighbours"].values())
    assert feed.row(spike) == [], "still the same spike"
    feed.rows(40)
    assert [event["kind"] for event in feed.row(spike)] == ["spike"]


def test_a_spike_of_less_than_its_factor_is_none() -> None:
    feed = Feed()
    feed.rows(40)
    assert feed.row(at("grad", "head.weight", 8)) == []


def test_noise_widens_the_bound() -> None:
    """Where norms vary by a factor of ten from row to row, a factor of 40 is nothing special."""
    feed = Feed()
    for _ in range(64):
        feed.row(at("grad", "head.weight", 10 ** feed.random.normal(0, 0.6)))
    assert feed.row(at("grad", "head.weight", 40)) == []


def test_a_spike_does_not_hide_the_next_one() -> None:
    feed = Feed()
    feed.rows(40)
    feed.row(at("grad", "head.weight", 1e9))
    feed.rows(60)
    assert [event["kind"] for event in feed.row(at("grad", "head.weight", 40))] == ["spike"]


def test_growth_beyond_the_first_rows_is_an_explosion() -> None:
    feed = Feed()
    for i in range(40):
        feed.row(at("act", "layers.1.down.weight", 1.5**i))
    kinds = [event["kind"] for event in feed.events]
    assert kinds.count("exploding") == 1
    event = next(event for event in feed.events if event["kind"] == "exploding")
    assert (event["site"], event["channel"]) == ("layers.1.down.weight", "act")
    assert 1024 < event["factor"] < 8000


def test_an_explosion_is_seen_before_there_is_a_moving_average() -> None:
    feed = Feed()
    feed.rows(5)
    feed.rows(2, at("grad", "embed.weight", 1e5))
    assert [(event["kind"], event["step"]) for event in feed.events] == [("exploding", 7)]


def test_what_begins_near_zero_may_grow_to_what_others_are() -> None:
    """The A of a LoRA pair has no gradient in step 1 and a tiny one in step 2."""
    feed = Feed()
    feed.row(at("grad", "head.weight", 0.0))
    for i in range(60):
        feed.row(at("grad", "head.weight", min(1e-6 * 1.3**i, 1.0)))
    assert not [event for event in feed.events if event["kind"] == "exploding"]


def test_gradients_that_fade_on_the_way_back_vanish() -> None:
    feed = Feed()
    feed.scale = {name: 20.0 ** -(len(NAMES) - i) for i, name in enumerate(NAMES)}
    feed.rows(15)
    assert feed.events == [], "it must last"
    (event,) = feed.row()
    assert (event["kind"], event["site"], event["largest"]) == ("vanishing", "embed.weight", "head.weight")
    assert event["sites"] == 4, "at 2**-4.3 from site to site, those 6 and more sites away"
    feed.rows(64)
    assert len(feed.events) == 1, "said once"


def test_gradients_that_grow_on_the_way_back_explode() -> None:
    feed = Feed()
    feed.scale = {name: 16.0 ** (len(NAMES) - i) for i, name in enumerate(NAMES)}
    feed.rows(32)
    (event,) = feed.events
    assert (event["kind"], event["site"], event["smallest"]) == ("exploding", "embed.weight", "head.weight")


def test_the_order_of_execution_decides_which_way_gradients_go() -> None:
    backwards = list(range(len(NAMES)))  # the first one defined is the nearest to the loss
    feed = Feed(orders=Orders(backwards[::-1], backwards))
    feed.scale = {name: 16.0 ** (len(NAMES) - i) for i, name in enumerate(NAMES)}
    feed.rows(16)
    assert [(event["kind"], event["site"]) for event in feed.events] == [("vanishing", "head.weight")]


def kill(channel: str, name: str, block: int) -> Any:
    def change(norms: dict[str, np.ndarray]) -> None:
        norms[channel][NAMES.index(name), block] = 0.0

    return change


def test_a_block_that_stays_zero_is_dead() -> None:
    feed = Feed()
    feed.rows(24)
    feed.rows(23, kill("act", "layers.3.down.weight", 1))
    assert feed.events == [], "not in every row of a window yet"
    (event,) = feed.row(kill("act", "layers.3.down.weight", 1))
    assert (event["kind"], event["site"], event["blocks"], event["since"]) == ("dead", "layers.3.down.weight", [1], 33)
    assert "1 of its 3 blocks" in event["text"]
    feed.rows(64, kill("act", "layers.3.down.weight", 1))
    assert len(feed.events) == 1


def test_the_first_dead_site_in_the_forward_is_named() -> None:
    feed = Feed()

    def change(norms: dict[str, np.ndarray]) -> None:
        for name in ("layers.2.down.weight", "layers.1.up.weight"):
            norms["act"][NAMES.index(name)] = 0.0
            norms["grad"][NAMES.index(name)] = 0.0

    feed.rows(16, change)
    (event,) = feed.events
    assert (event["site"], event["channel"], event["sites"]) == ("layers.1.up.weight", "act", 2)


def test_zero_now_and_then_is_not_dead() -> None:
    feed = Feed()
    for i in range(64):
        feed.row(kill("grad", "head.weight", 0) if i % 16 else None)
    assert feed.events == []


def test_an_expert_without_tokens_is_not_dead() -> None:
    expert = [SiteInfo(f"experts.up[{i}]", "expert", (8, 8), "float32", 1) for i in range(2)]
    watch = RowWatch(expert)
    cells = np.array([0.0, 4, 0, 4, 0, 1, 0, 1, 0, 0, 0, 0])
    assert [watch.see(step, cells) for step in range(40)] == [[]] * 40


def all_zero(norms: dict[str, np.ndarray]) -> None:
    norms["grad"][:] = 0.0


def absent(*channels: str) -> Any:
    def change(norms: dict[str, np.ndarray]) -> None:
        for channel in channels:
            norms[channel][:] = -1.0

    return change


@pytest.mark.parametrize(
    ("change", "loss", "words"),
    [
        (all_zero, float("nan"), "every one is masked"),
        (all_zero, 0.0, "every label is masked"),
        (all_zero, 2.0, "does not depend on the weights"),
        (all_zero, None, "does not depend on the weights"),
        (absent("grad"), 2.0, "no weight got a gradient"),
    ],
)
def test_no_gradient_is_told_at_once_with_its_cause(change: Any, loss: float | None, words: str) -> None:
    feed = Feed()
    (event,) = feed.row(change, loss=loss)
    assert (event["kind"], event["step"]) == ("no_gradient", 1)
    assert words in event["text"]
    feed.rows(40, change, loss=loss)
    assert len(feed.events) == 1, "once, and no dead blocks beside it"


def test_a_row_in_which_nothing_was_observed_says_nothing() -> None:
    feed = Feed()
    feed.rows(40, absent("act", "grad"))
    assert feed.events == []


def test_every_number_of_an_event_can_be_written_as_json() -> None:
    import json

    feed = Feed()
    feed.rows(40)
    feed.row(at("act", "head.weight", np.inf))
    feed.rows(2, at("act", "head.weight", np.inf))
    assert {event["kind"] for event in feed.events} == {"spike", "exploding"}
    json.dumps(feed.events, allow_nan=False)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"explode": 1.0}, "explode must lie between 1 and inf, got 1.0"),
        ({"spike": float("nan")}, "spike must lie between 1 and inf, got nan"),
        ({"deviations": "6"}, "deviations must lie between 0 and inf, got '6'"),
        ({"fade": 1.0}, "fade must lie between 0 and 1, got 1.0"),
        ({"patience": 3}, "patience must be an int >= 4, got 3"),
        ({"keep": -1}, "keep must be an int >= 0, got -1"),
        ({"detail": True}, "detail must be an int >= 0, got True"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="must") as error:
        Watch(**limits)
    assert str(error.value) == message


# With a scanner


def alarms(scan: pyscan.Scanner) -> list[dict[str, Any]]:
    return [event for event in scan.events if event["kind"] in (*KINDS, "off")]


def train(model: nn.Module, steps: int, **options: Any) -> pyscan.Scanner:
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    with pyscan.attach(model, optimizer=optimizer, **options) as scan:
        for step in range(1, steps + 1):
            x = torch.randn(4, 8)
            model(x * (100 if step == 40 else 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return scan


def test_on_event_is_called_and_the_alarm_is_in_the_file(tmp_path: Any) -> None:
    heard: list[dict[str, Any]] = []
    torch.manual_seed(0)
    path = tmp_path / "run.mscan"
    scan = train(nn.Linear(8, 8), 50, path=path, on_event=heard.append)
    (event,) = alarms(scan)
    assert (event["kind"], event["step"], event["site"]) == ("spike", 40, "weight")
    assert event in heard
    with pyscan.open(path) as run:
        assert event in run.events


def test_watch_false_is_silent_and_other_values_are_refused() -> None:
    torch.manual_seed(0)
    assert alarms(train(nn.Linear(8, 8), 50, watch=False)) == []
    assert alarms(train(nn.Linear(8, 8), 50, watch=Watch(spike=1e9, explode=1e9))) == []
    with pytest.raises(TypeError, match=r"watch must be True, False or a pyscan\.Watch, got str"):
        pyscan.attach(nn.Linear(8, 8), watch="yes")


@pytest.mark.parametrize("detail", [0, 5])
def test_an_alarm_switches_on_detail_for_the_next_steps(detail: int) -> None:
    torch.manual_seed(0)
    scan = train(nn.Linear(8, 8), 60, every=2, watch=Watch(detail=detail))
    assert [event["step"] for event in alarms(scan)] == [40]
    odd = [row.step for row in scan.rows if row.step % 2]
    assert odd == ([41, 43, 45] if detail else [])
    assert [row.step for row in scan.rows if not row.step % 2] == list(range(2, 61, 2))


def test_the_end_of_a_short_run_is_reviewed() -> None:
    model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 8))
    with torch.no_grad():
        model[0].bias[:64] = -1e3
    scan = train(model, 6)
    (event,) = alarms(scan)
    assert (event["kind"], event["site"], event["blocks"]) == ("dead", "2.weight", [0])


def healthy(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    family = families.FAMILIES[name]()
    family.model.train()
    optimizer = torch.optim.AdamW([p for p in family.model.parameters() if p.requires_grad], 1e-3)
    with pyscan.attach(family.model, optimizer=optimizer, block=16) as scan:
        for _ in range(20):
            family.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert alarms(scan) == []


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_healthy_training_of_every_family_raises_no_alarm(name: str) -> None:
    healthy(name, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_healthy_training_of_every_family_raises_no_alarm_whatever_the_seed(name: str) -> None:
    for seed in range(1, 10):
        healthy(name, seed)


@pytest.mark.parametrize("odd", [None, np.nan, 0.0, -1.0, np.inf])
@pytest.mark.parametrize("place", [0, 5, 11, 13, 15])
@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_the_compiled_glance_sees_what_the_definition_sees(odd: float | None, place: int, num_before: int) -> None:
    random = np.random.default_rng(0)
    starts, num_blocks, num_bad = np.array([0, 3, 4, 6, 9, 10]), 12, 4
    rows = [
        np.concatenate([random.integers(1, 9, num_blocks), np.zeros(num_bad)]).astype(np.float64)
        for _ in range(num_before + 1)
    ]
    if odd is not None:
        rows[-1][place] = odd
    looks = [kind(starts, num_blocks, num_bad, 2, 4) for kind in (Glance, _C.Glance)]
    for look in looks:
        look.limits = np.array([30.0, 9.0, 30.0, 30.0, 9.0, 30.0])
    for step, row in enumerate(rows):
        expected, actual = (np.array(look.look(row, step), np.float64) for look in looks)
        assert looks[1].window_step == looks[0].window_step == step // 2 * 2
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(looks[1].window, looks[0].window)
        np.testing.assert_array_equal(looks[1].tops, looks[0].tops)
    assert looks[1].num_rows == looks[0].num_rows == num_before + 1


def bounds_and_glance(num_rows: int) -> tuple[Bounds, _C.Glance, Sites]:
    tied = SiteInfo("head.weight", "linear", (32, 64 * BLOCKS), "float32", BLOCKS, tied_to=NAMES[0])
    found = Sites([*sites(), tied])
    bounds = Bounds(found, explode=100.0, spike=10.0, deviations=6.0)
    return bounds, _C.Glance(found.starts, found.num_blocks, 0, num_rows, 4), found


def give(glance: _C.Glance, window: np.ndarray) -> None:
    for step, sums in enumerate(window):
        glance.look(np.repeat(sums / BLOCKS, BLOCKS), step)


def copies(bounds: Bounds) -> list[np.ndarray]:
    return [bounds.mean.copy(), bounds.variance.copy(), bounds.spike.copy()]


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_compiled_way_takes_in_a_window_as_the_definition_does(spread: float) -> None:
    expected, *_ = bounds_and_glance(16)
    actual, glance, found = bounds_and_glance(16)
    random = np.random.default_rng(0)
    for number in range(6):
        window = np.exp2(random.normal(-20, spread, (16, len(found.sizes))))
        window[7, number] *= 2.0**40  # above its bound
        give(glance, window)
        expected.follow(levels_of(glance.window))
        if number == 0:
            assert not actual.follow_plain(glance, -48.0), "there is no average yet"
            actual.follow(levels_of(glance.window))
            glance.limits = actual.largest_sum
        else:
            assert actual.follow_plain(glance, -48.0)
        for one, other in zip(copies(actual), copies(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
        np.testing.assert_allclose(glance.limits, expected.largest_sum, rtol=1e-11)
    assert np.isinf(actual.spike).tolist() == [False] * (len(found.sizes) - 1) + [True], "a tied gradient has no bound"


@pytest.mark.parametrize("odd", [0.0, -1.0, np.nan, 2.0**-80])
@pytest.mark.parametrize("rows", [slice(3, 4), slice(None)])
def test_the_compiled_way_leaves_a_window_with_something_in_it_to_the_rules(odd: float, rows: slice) -> None:
    bounds, glance, found = bounds_and_glance(16)
    window = np.full((16, len(found.sizes)), 0.01)
    give(glance, window)
    bounds.follow(levels_of(glance.window))
    before = copies(bounds)
    column = len(found) + 1  # a gradient
    window[rows, column] = odd
    give(glance, window)
    is_plain = odd == 2.0**-80 and rows != slice(None)  # it has faded only if it is so small in every row
    assert bounds.follow_plain(glance, -48.0) == is_plain
    assert all(np.array_equal(*pair) for pair in zip(before, copies(bounds), strict=True)) == (not is_plain)


def test_a_glance_refuses_what_does_not_fit() -> None:
    look = _C.Glance(np.array([0, 2]), 4, 2, 2, 4)
    for limits in (np.ones(1), np.ones(3)):
        with pytest.raises(ValueError, match="limits must hold 2 values"):
            look.limits = limits
    with pytest.raises(ValueError, match="shorter"):
        look.look(np.ones(5), 0)
    with pytest.raises(ValueError, match="ascend"):
        _C.Glance(np.array([2, 0]), 4, 2, 2, 4)
