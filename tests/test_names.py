import pytest

from pyscan.names import bare_name, match_names

PLAIN = ["model.embed_tokens.weight", "model.layers.0.q.weight", "model.layers.1.q.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: name.removesuffix(".weight"),
        lambda name: "module." + name,
        lambda name: "_orig_mod.module." + name,
        lambda name: "base_model.model." + name,
        lambda name: name.replace(".q", ".q.base_layer"),
        lambda name: name.replace("layers.0", "layers.0._checkpoint_wrapped_module"),
        lambda name: "policy." + name.removesuffix(".weight"),
        lambda name: name.removeprefix("model."),
        lambda name: name.replace("model.", "transformer."),
    ],
    ids=["exact", "no weight", "module", "compiled", "peft", "lora", "checkpoint", "longer", "shorter", "other prefix"],
)
def test_the_same_model_pairs_completely_under_every_naming(rename):
    other = [rename(name) for name in PLAIN]
    for a, b in ((PLAIN, other), (other, PLAIN)):
        matches = match_names(a, list(reversed(b)))
        assert matches.pairs == list(zip(a, b, strict=True))
        assert (matches.only_a, matches.only_b) == ([], [])


def test_names_of_one_run_alone_are_listed_and_not_paired():
    a = ["layers.0.q.weight", "layers.0.gone.weight"]
    b = ["layers.0.q.weight", "layers.0.q.lora_A.default.weight"]
    assert match_names(a, b) == ([(a[0], b[0])], ["layers.0.gone.weight"], ["layers.0.q.lora_A.default.weight"])


def test_two_names_that_fit_one_are_both_left_alone():
    a, b = ["encoder.layers.0.q", "decoder.layers.0.q"], ["layers.0.q"]
    assert match_names(a, b) == ([], a, b)
    assert match_names(b, a) == ([], b, a)


def test_an_exact_name_is_taken_before_a_similar_one():
    assert match_names(["q", "q.weight"], ["q.weight"]).pairs == [("q.weight", "q.weight")]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("layers.0.experts.3.up", "layers.1.experts.3.up"),  # the same expert of another layer
        ("vision.0.proj", "text.0.proj"),  # a bare number is no layer
        ("vision.norm", "text.norm"),  # a word alone names nothing
        ("stage.2.layers.0.q", "layers.0.q"),  # the prefix that would go has a number of its own
    ],
)
def test_names_that_only_look_alike_stay_apart(a, b):
    assert match_names([a], [b]).pairs == []


def test_no_names_give_no_pairs():
    assert match_names([], []) == ([], [], [])
    assert match_names(["q"], []) == ([], ["q"], [])


def test_bare_name_drops_wrappers_in_any_place():
    assert bare_name("_orig_mod.base_model.x.module.base_layer.weight") == "base_model.x"
    assert bare_name("base_model.model.model.x.weight") == "model.x"
    assert bare_name("weight") == "weight"
