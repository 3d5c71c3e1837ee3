"""The first step: a head that is initialised too large is flagged before anything explodes, healthy ones are not."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyscan
from pyscan.graph import Graph
from pyscan.init_check import InitReport, judge_init, weight_gains
from pyscan.sites import find_sites
from tests import families
from tests.test_scanner import batch, llama


def check(model: nn.Module, given: Any) -> InitReport:
    return pyscan.check_init(model, given, verbose=False)


class Classifier(nn.Module):
    """A trunk, and a head of the given standard deviation on top of it."""

    def __init__(self, std: float, seed: int = 0, num_classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = families.build("llama").model.model
        torch.manual_seed(seed)
        self.score = nn.Linear(32, num_classes)
        nn.init.normal_(self.score.weight, std=std)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.trunk(input_ids).last_hidden_state[:, -1]
        return F.cross_entropy(self.score(hidden), labels)


def data(seed: int = 0, num_classes: int = 3, rows: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(3, families.VOCAB, (rows, 7), generator=generator),
        "labels": torch.randint(0, num_classes, (rows,), generator=generator),
    }


@pytest.mark.parametrize("seed", range(10))
def test_a_head_of_std_5_is_flagged_and_one_of_std_002_is_not(seed: int) -> None:
    bad = check(Classifier(5.0, seed), data(seed))
    assert [(finding.kind, finding.site) for finding in bad.findings] == [
        ("gain", "score.weight"), ("loss", None), ("saturation", None),
    ]  # fmt: skip
    assert bad
    good = check(Classifier(0.02, seed), data(seed))
    assert not good
    assert good.findings == []


def test_the_report_says_by_how_much() -> None:
    report = check(Classifier(5.0), data())
    gain, loss, saturated = report.findings
    assert gain.text.startswith("'score.weight' amplifies its input ")
    assert "initialise it smaller (std 0.02, or xavier with gain 0.1)" in gain.text
    assert gain.value == report.gains["score.weight"] > gain.limit
    assert loss.text.endswith("times ln(3) = 1.1, the loss of a model that knows nothing")
    assert report.chance == pytest.approx(math.log(3))
    assert report.loss is not None
    assert loss.value == pytest.approx(report.loss)
    assert "put all probability on one class" in saturated.text
    assert str(report) == "\n".join(map(str, report.findings))
    assert "nothing to object to" in str(check(Classifier(0.02), data()))


def test_gains_are_rms_out_over_rms_in_for_every_site() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50, bias=False), nn.Tanh(), nn.Linear(50, 3))
    x = torch.randn(40, 6)
    hidden = model[0](x)
    report = check(model, x)
    want = {
        "0.weight": (hidden.square().mean() / x.square().mean()).sqrt().item(),
        "2.weight": (model(x).square().mean() / hidden.tanh().square().mean()).sqrt().item(),
    }
    assert report.gains == pytest.approx(want, rel=1e-5)
    assert report.weights == pytest.approx(
        {f"{i}.weight": model[i].weight.norm().item() / n**0.5 for i, n in ((0, 50), (2, 3))}
    )
    assert (report.loss, report.chance) == (None, None)


def test_a_new_module_on_a_trained_trunk_is_flagged_by_its_weights_alone() -> None:
    """What a scanner can tell from its first row: the weights, and not what came out of them."""
    sites = find_sites(Classifier(5.0)).sites
    report = judge_init(weight_gains(sites), [])
    assert [(finding.kind, finding.site) for finding in report.findings] == [("weight", "score.weight")]
    sites = find_sites(Classifier(0.02)).sites
    assert not judge_init(weight_gains(sites), [])


def test_a_trained_model_that_is_sure_and_right_is_not_saturated() -> None:
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(30 * torch.eye(3))
    x, labels = torch.eye(3), torch.arange(3)
    report = check(model, lambda: F.cross_entropy(model(x), labels))
    assert [finding.kind for finding in report.findings if finding.kind != "gain"] == []
    wrong = check(model, lambda: F.cross_entropy(model(x), labels.roll(1)))
    assert {"loss", "saturation"} <= {finding.kind for finding in wrong.findings}


def test_binary_losses_are_judged_against_ln_2() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    x, labels = torch.randn(8, 6), torch.randint(0, 2, (8, 4)).float()
    report = check(model, lambda: F.binary_cross_entropy_with_logits(model(x), labels))
    assert not report
    assert report.chance == pytest.approx(math.log(2))
    nn.init.normal_(model.weight, std=20)
    kinds = {f.kind for f in check(model, lambda: F.binary_cross_entropy_with_logits(model(x), labels)).findings}
    assert kinds == {"gain", "loss", "saturation"}


def test_a_loss_that_was_divided_is_judged_as_it_was_before() -> None:
    """Accumulation divides the loss, and transformers sums over tokens: the rows in the graph say what it means."""
    torch.manual_seed(0)
    logits = torch.randn(10, 7, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 3, 4, 5, -100, 0, 1, 2])
    want = F.cross_entropy(logits, labels).item()
    for loss in (F.cross_entropy(logits, labels) / 8, F.cross_entropy(logits, labels, reduction="sum")):
        (target,) = Graph(loss).targets
        assert target.loss == pytest.approx(want, rel=1e-6)
        assert (target.num_classes, target.num_rows, target.num_masked) == (7, 10, 2)


def test_dense_labels_are_read_too() -> None:
    logits = torch.zeros(2, 5, 3, 3, requires_grad=True)
    (target,) = Graph(F.cross_entropy(logits, torch.zeros(2, 3, 3, dtype=torch.int64))).targets
    assert (target.num_classes, target.num_rows, target.certain) == (5, 18, 0.0)
    assert target.loss == pytest.approx(math.log(5))
    single = F.cross_entropy(torch.zeros(5, requires_grad=True), torch.tensor(3))
    assert Graph(single).targets[0].loss == pytest.approx(math.log(5))


def test_a_language_model_is_judged_against_its_vocabulary() -> None:
    family = llama()
    report = check(family.model, batch(0))
    assert not report
    assert report.chance == pytest.approx(math.log(families.VOCAB))
    nn.init.normal_(family.model.lm_head.weight, std=5.0)
    assert {finding.kind for finding in check(family.model, batch(0)).findings} >= {"gain", "loss"}


@pytest.mark.parametrize("std", [5.0, 0.02])
def test_a_scanner_judges_the_first_step_by_itself(std: float, tmp_path: Path) -> None:
    family = llama()
    nn.init.normal_(family.model.lm_head.weight, std=std)
    optimizer = torch.optim.SGD(family.model.parameters(), 1e-3)
    with pyscan.attach(family.model, tmp_path / "run.mscan", optimizer=optimizer) as scan:
        for k in range(3):
            family.model(**batch(k)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [event for event in pyscan.open(tmp_path / "run.mscan").events if event["kind"] == "init"]
    assert found == [event for event in scan.events if event["kind"] == "init"]
    if std == 0.02:
        assert found == []
        return
    assert found[0]["site"] == "lm_head.weight"
    assert "is so large that it amplifies a random input" in found[0]["text"]
    assert found[1]["text"].startswith("the first loss is ")
    assert {event["step"] for event in found} == {1}, "once, at the first step"
