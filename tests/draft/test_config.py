"""Speculation configs: what is accepted, what is refused, and what "auto" becomes."""

from __future__ import annotations

import msgspec
import pytest

from draft.config import (
    MAX_TREE_SIZE,
    AutoConfig,
    Eagle3Config,
    FirstConfig,
    MedusaConfig,
    NgramConfig,
    NoSpeculation,
    PredictionConfig,
    SpeculationConfig,
    SuffixConfig,
    bounds_of,
    config_of,
    method_of,
    resolve,
    single_configs,
)
from target.batch import MAX_TREE_SIZE as TARGET_MAX_TREE_SIZE


def decode(value: object) -> SpeculationConfig:
    """A config as a user writes it."""
    config: SpeculationConfig = msgspec.convert(value, type=SpeculationConfig)
    return config


@pytest.mark.parametrize(
    ("value", "config"),
    [
        ({"method": "none"}, NoSpeculation()),
        ({"method": "auto"}, AutoConfig()),
        ({"method": "suffix", "num_speculative_tokens": 8}, SuffixConfig(num_speculative_tokens=8)),
        ({"method": "prediction"}, PredictionConfig()),
        ({"method": "medusa", "tree_size": 20}, MedusaConfig(tree_size=20)),
        (
            {
                "method": "first",
                "proposers": [{"method": "ngram"}, {"method": "eagle3", "num_speculative_tokens": "auto"}],
            },
            FirstConfig(proposers=(NgramConfig(), Eagle3Config())),
        ),
    ],
)
def test_configs_are_read_by_method_and_survive_the_wire(value: object, config: SpeculationConfig) -> None:
    """The method names the type, nested ones too, and MessagePack gives the same config back."""
    assert decode(value) == config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=SpeculationConfig) == config


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"method": "lookup"}, "Invalid value 'lookup'"),
        ({"method": "ngram", "k": 4}, "unknown field `k`"),
        ({"method": "suffix", "num_speculative_tokens": 33}, "<= 32"),
        ({"method": "suffix", "num_speculative_tokens": 0}, ">= 1"),
        ({"method": "eagle3", "tree_size": 64}, "<= 63"),
        ({"method": "eagle3", "tree_size": "big"}, "'big'"),
        ({"method": "suffix", "min_confidence": 1.5}, "<= 1.0"),
        ({"method": "first", "proposers": []}, "length >= 1"),
        ({"method": "first", "proposers": [{"method": "first", "proposers": []}]}, "'first'"),
        ({"method": "first", "proposers": [{"method": "ngram"}, {"method": "ngram"}]}, "names a method twice"),
    ],
)
def test_bad_configs_are_refused_by_name(value: object, complaint: str) -> None:
    """An unknown method or field, and a number beyond its limit, are errors that say what is wrong."""
    with pytest.raises(msgspec.ValidationError, match=complaint):
        decode(value)


def test_bounds_say_whether_the_user_chose_the_size() -> None:
    """A given number is fixed, with a tree only where one was asked for; "auto" goes up to the limits."""
    assert bounds_of(NgramConfig(num_speculative_tokens=4)) == (4, 4, True, True)
    assert bounds_of(NgramConfig()) == (32, 32, False, True)
    assert bounds_of(SuffixConfig(num_speculative_tokens=4)) == (4, 4, True, True)
    assert bounds_of(SuffixConfig(num_speculative_tokens=4, tree_size=12)) == (12, 4, True, False)
    assert bounds_of(Eagle3Config()) == (63, 32, False, False)
    assert bounds_of(Eagle3Config(tree_size=10)) == (10, 32, False, False)


def test_auto_is_lookup_before_the_best_head() -> None:
    """What "auto" becomes depends on what the service has."""
    assert resolve(AutoConfig(), {"ngram"}) == NoSpeculation()
    assert resolve(AutoConfig(), {"ngram", "suffix"}) == FirstConfig(proposers=(SuffixConfig(),))
    assert resolve(AutoConfig(), {"suffix", "draft_model", "eagle3"}) == FirstConfig(
        proposers=(SuffixConfig(), Eagle3Config())
    )


def test_a_prediction_is_consulted_first() -> None:
    """A request with predicted output has the prediction in front, once, unless it asked for plain decoding."""
    methods = {"ngram", "prediction"}
    with_prediction = resolve(NgramConfig(), methods, has_prediction=True)
    assert [method_of(config) for config in single_configs(with_prediction)] == ["prediction", "ngram"]
    assert resolve(with_prediction, methods, has_prediction=True) == with_prediction
    assert resolve(NoSpeculation(), methods, has_prediction=True) == NoSpeculation()


def test_a_method_the_service_lacks_is_refused() -> None:
    """The error names the method and those that are served."""
    with pytest.raises(ValueError, match="'eagle3' is not served here; one of ngram, suffix"):
        resolve(FirstConfig(proposers=(NgramConfig(), Eagle3Config())), {"ngram", "suffix"})
    with pytest.raises(ValueError, match="must be resolved"):
        single_configs(AutoConfig())


def test_a_methods_config_is_found_by_its_name() -> None:
    """Of several methods each has its own config; one that is not named is refused."""
    config = FirstConfig(proposers=(NgramConfig(max_n=4), Eagle3Config()))
    assert config_of(config, "ngram") == NgramConfig(max_n=4)
    with pytest.raises(ValueError, match="'suffix' is not named by"):
        config_of(config, "suffix")


def test_the_tree_limit_is_the_targets() -> None:
    """The limit a request is checked against is the one the batch's masks can hold."""
    assert MAX_TREE_SIZE == TARGET_MAX_TREE_SIZE
