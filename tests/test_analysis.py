"""Worked examples: every expected number below is computed by hand in the comment beside it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyscan
from pyscan import analysis, codecs
from pyscan.codecs import ABSENT
from pyscan.schema import Channel
from tests.make_scan import Builder, make_cells, make_rows, make_schema, site

NAN, INF = math.nan, math.inf


def test_layer_is_the_name_up_to_its_first_integer():
    assert analysis.layer_of("model.layers.0.mlp.experts.3.up_proj.weight") == "model.layers.0"
    assert analysis.layer_of("model.layers.12.q.weight") == "model.layers.12"
    assert analysis.layer_of("h.0") == "h.0"
    assert analysis.layer_of("0.weight") == "0"
    assert analysis.layer_of("experts.up[3]") == "experts.up[3]"
    assert analysis.layer_of("experts.up[3].weight") == "experts.up[3]"


def test_a_name_without_an_integer_is_a_layer_of_its_own():
    assert analysis.layer_of("lm_head.weight") == "lm_head.weight"
    assert analysis.layer_of("fc1.weight") == "fc1.weight"  # a digit inside a word is no integer
    assert analysis.layer_of("") == ""


@pytest.mark.parametrize(
    ("features", "num_blocks", "block", "widths"),
    [
        (128, 2, 64, [64, 64]),
        (130, 3, 64, [64, 64, 2]),
        (1, 1, 64, [1]),
        (1000, 1, 0, [1000]),
        (0, 3, 64, [64, 64, 64]),  # no shape known
        (0, 1, 0, [1]),
        (64, 0, 64, []),
    ],
)
def test_block_widths_add_up_to_the_features(features, num_blocks, block, widths):
    assert analysis.block_widths(features, num_blocks, block).tolist() == widths


def test_levels_are_log2_of_norm_per_root_width():
    # 8 / sqrt(4) = 4 -> 2;  1 / sqrt(16) = 1/4 -> -2
    assert analysis.levels([8, 1], [4, 16]).tolist() == [2.0, -2.0]


def test_zero_inf_nan_and_negative_have_no_level():
    assert np.isnan(analysis.levels([0.0, INF, NAN, -1.0])).all()


def test_sps_of_a_worked_layer():
    # act levels 0, 2, 4: mean 2, variance (4+0+4)/3 -> z = -sqrt(1.5), 0, +sqrt(1.5)
    # grad levels 3, 1, 2: mean 2, variance 2/3 -> z = +sqrt(1.5), -sqrt(1.5), 0
    r = math.sqrt(1.5)
    sps = analysis.sps([1, 4, 16], [8, 2, 4], np.ones(3), ["l.0"] * 3)
    assert sps == pytest.approx([-2 * r, r, r])


def test_sps_takes_the_block_width_out():
    # act 8 in a block of 64 and act 1 in a block of 1 are the same level 0: z = 0 for both
    # grad levels 0 and 2: mean 1, standard deviation 1 -> z = -1, +1
    assert analysis.sps([8, 1], [8, 4], [64, 1], ["l.0"] * 2) == pytest.approx([1.0, -1.0])


def test_sps_scope_layer_compares_within_layers_and_global_over_all():
    act, grad = [1, 4, 16, 64], [1, 1, 1, 1]
    layers = ["l.0", "l.0", "l.1", "l.1"]
    # two cells of different level have z = -1, +1; equal grads have z = 0
    assert analysis.sps(act, grad, np.ones(4), layers) == pytest.approx([-1, 1, -1, 1])
    # levels 0, 2, 4, 6: mean 3, variance (9+1+1+9)/4 = 5
    s = math.sqrt(5)
    assert analysis.sps(act, grad, np.ones(4), layers, scope="global") == pytest.approx([-3 / s, -1 / s, 1 / s, 3 / s])


def test_sps_keeps_the_order_of_cells_when_layers_are_interleaved():
    act = [1, 16, 4, 64]
    assert analysis.sps(act, [1] * 4, np.ones(4), ["b", "a", "b", "a"]) == pytest.approx([-1, -1, 1, 1])


@pytest.mark.parametrize("bad", [0.0, NAN, INF])
def test_a_cell_without_level_has_no_sps_and_leaves_the_others_alone(bad):
    r = math.sqrt(1.5)
    sps = analysis.sps([1, 4, 16, bad], [8, 2, 4, 1], np.ones(4), ["l.0"] * 4)
    # z(act) is over three cells as above; z(grad) over levels 3, 1, 2, 0: mean 1.5, variance 5/4
    g = math.sqrt(1.25)
    assert sps[:3] == pytest.approx([-r - 1.5 / g, 0.5 / g, r - 0.5 / g])
    assert math.isnan(sps[3])


def test_fewer_than_two_levels_in_a_layer_give_nan():
    assert np.isnan(analysis.sps([2.0], [3.0], [1], ["l.0"])).all()
    assert np.isnan(analysis.sps([2.0, 0.0], [3.0, 4.0], [1, 1], ["l.0", "l.0"])).all()
    assert np.isnan(analysis.sps([2.0, 4.0], [3.0, 4.0], [1, 1], ["l.0", "l.1"])).all()


def test_each_step_is_scored_by_itself():
    steps = analysis.sps([[1, 4], [4, 1], [3, 3]], np.ones((3, 2)), [1, 1], ["l", "l"])
    assert steps == pytest.approx(np.array([[-1, 1], [1, -1], [0, 0]]))


def test_sps_of_no_steps_and_no_cells_is_empty():
    assert analysis.sps(np.zeros((0, 3)), np.zeros((0, 3)), np.ones(3), ["l"] * 3).shape == (0, 3)
    assert analysis.sps(np.zeros((2, 0)), np.zeros((2, 0)), [], []).shape == (2, 0)


def test_sps_names_the_rule_and_the_value_it_refuses():
    with pytest.raises(ValueError, match='scope must be "layer" or "global", got \'world\''):
        analysis.sps([1], [1], [1], ["l"], scope="world")
    with pytest.raises(ValueError, match=r"one shape, got \(2,\) and \(1,\)"):
        analysis.sps([1, 2], [1], [1, 1][:1], ["l", "l"])
    with pytest.raises(ValueError, match="each of the 2 cells, got 1"):
        analysis.sps([1, 2], [1, 2], [1, 1], ["l"])


@given(st.lists(st.floats(-60, 60), min_size=2, max_size=30), st.integers(1, 5))
def test_spread_in_pieces_equals_numpy_over_the_whole(values, pieces):
    spread = analysis.Spread(1)
    for piece in np.array_split(np.array(values), pieces):
        spread.add(piece[None])
    std = np.std(values)
    expected = (np.array(values) - np.mean(values)) / std if std > 1e-6 else None
    if expected is not None:
        assert spread.z(np.array(values)[None])[0] == pytest.approx(expected, abs=1e-6)
    assert spread.mean[0] == pytest.approx(np.mean(values), abs=1e-9)


def test_integral_is_the_mean_of_the_finite_steps():
    assert analysis.mean_over_steps([[1, NAN], [2, NAN], [NAN, NAN]])[0] == 1.5
    assert math.isnan(analysis.mean_over_steps([[1, NAN], [2, NAN]])[1])
    assert np.isnan(analysis.mean_over_steps(np.zeros((0, 2)))).all()


def test_extremes_are_ordered_and_pass_over_nan():
    top, bottom = analysis.extremes([3, NAN, 1, 5, 5, -INF], 2)
    assert top.tolist() == [3, 4]
    assert bottom.tolist() == [5, 2]
    assert [len(part) for part in analysis.extremes([NAN], 4)] == [0, 0]


def test_drift_of_a_worked_example():
    # cell 0 doubles every step, cell 1 stays, cell 2 falls from 8 to 1 at the last step
    norms = [[1, 3, 8], [2, 3, 8], [4, 3, 8], [8, 3, 1]]
    found = analysis.drift(norms, steps=[10, 20, 30, 40])
    assert found.ratio == pytest.approx([3, 0, -3])
    # slopes of levels over steps: 3 / 30;  0;  levels 3,3,3,0 on x = -15,-5,5,15: (-45-15+15+0) / 500
    assert found.slope == pytest.approx([0.1, 0, -45 / 500])
    assert found.farthest() == 0


def test_drift_windows_are_geometric_means_over_their_rows():
    # 4 rows, half of them in each window: early sqrt(1*4) = 2, late sqrt(8*32) = 16
    assert analysis.drift([[1], [4], [8], [32]], window=0.5).ratio == pytest.approx([3])


def test_drift_passes_over_zeros_and_nan():
    found = analysis.drift([[1, 0], [NAN, 0], [4, 2]], window=0.5)
    assert found.ratio[0] == pytest.approx(2)
    assert found.slope[0] == pytest.approx(1)  # from step 0 to step 2 two doublings
    assert math.isnan(found.ratio[1])
    assert math.isnan(found.slope[1])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_drift_needs_two_steps(num_steps):
    found = analysis.drift(np.ones((num_steps, 2)))
    assert np.isnan(found.ratio).all()
    assert np.isnan(found.slope).all()
    assert found.farthest() is None


def test_drift_refuses_a_window_over_half():
    with pytest.raises(ValueError, match=r"at most 0.5 of the rows, got 0.6"):
        analysis.drift([[1], [2]], window=0.6)


def test_dead_is_zero_or_absent_but_not_nan():
    norms = np.array([[0, ABSENT, NAN, 1], [0, ABSENT, NAN, 0]], np.float32)
    assert analysis.dead(norms).tolist() == [True, True, False, False]
    assert analysis.dead(norms, share=0.5).tolist() == [True, True, False, True]


def test_no_steps_prove_nothing_dead():
    assert analysis.dead(np.zeros((0, 3))).tolist() == [False] * 3


def test_dead_refuses_a_share_of_nothing():
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 0"):
        analysis.dead([[0.0]], share=0)


def test_difference_is_log2_of_b_over_a():
    assert analysis.difference([1, 4, 0, INF], [8, 1, 0, INF]).tolist() == [3, -2, 0, 0]
    assert analysis.difference([0, 1, INF, 1], [1, 0, 1, INF]).tolist() == [INF, -INF, -INF, INF]
    assert np.isnan(analysis.difference([NAN, 1], [1, NAN])).all()


@pytest.fixture(params=["log2q8", "f32"])
def run(request, tmp_path):
    """Three sites in two layers, blocks of 64 but for one of 32 features; a zero, a NaN and an absent cell."""
    channels = (Channel("act", codec=request.param), Channel("grad", codec=request.param))
    sites = (site("l.0.q", 2), site("l.1.q", 2), site("l.0.k", 1))
    schema = make_schema(channels=channels, sites=(replace(sites[0], shape=(8, 96)), *sites[1:]))
    builder = Builder(schema)
    cells = make_cells(schema, range(1, 6))
    values = [codecs.decode(cell, request.param) for cell in cells]
    values[0][1, 2], values[1][3, 1], values[0][4, 0] = 0, math.nan, codecs.ABSENT
    builder.writer.steps(make_rows(range(1, 6)), [codecs.encode(part, request.param) for part in values])
    with pyscan.open(builder.save(tmp_path / "run.mscan")) as opened:
        yield opened


@pytest.mark.parametrize("held", [0, 1 << 24])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_sps_of_a_run_equals_sps_of_its_arrays(run, scope, held, monkeypatch):
    monkeypatch.setattr(analysis, "_HELD_CELLS", held)
    names = [where.name for where in run.sites]
    act, grad = (np.concatenate([run.get(c, n, blocks=True) for n in names], axis=1) for c in ("act", "grad"))
    layers = ["l.0", "l.0", "l.1", "l.1", "l.0"]
    expected = analysis.sps(act, grad, [64, 32, 64, 64, 64], layers, scope)
    assert np.isnan(expected).any()
    found = analysis.run_sps(run, scope, integral=False)
    assert sorted(found) == sorted(names)
    np.testing.assert_allclose(np.concatenate([found[n] for n in names], axis=1), expected, atol=1e-5)
    integral = analysis.run_sps(run, scope)
    mean = analysis.mean_over_steps(expected)
    np.testing.assert_allclose(np.concatenate([integral[n] for n in names]), mean, atol=1e-5)


def test_sps_of_some_sites_reads_their_layers_alone(run, monkeypatch):
    everything = analysis.run_sps(run)
    read = []
    for method in ("codes", "get"):
        original = getattr(run, method)
        monkeypatch.setattr(run, method, lambda c, n, *a, o=original, **k: read.append(n) or o(c, n, *a, **k))
    found = dict(analysis.iter_sps(run, only=["l.0.k"]))
    assert list(found) == ["l.0.k"]
    assert set(read) == {"l.0.q", "l.0.k"}
    np.testing.assert_array_equal(analysis.mean_over_steps(found["l.0.k"]), everything["l.0.k"])


@pytest.mark.parametrize(("shape", "features"), [((10, 6), 6), ((10, 6, 3, 3), 54), ((7,), 7), ((), 0)])
def test_features_run_along_the_input_axis(shape, features):
    assert analysis.features_of(SimpleNamespace(shape=shape)) == features
