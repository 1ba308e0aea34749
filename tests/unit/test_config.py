import pytest

from corun.config import MEASURE, CoRunConfig, resolve


def test_nothing_given_is_off():
    assert resolve({}, {}).policy == "off"
    assert resolve(None, {}).enabled is False


def test_additional_config_wins_over_the_environment():
    config = resolve({"corun": {"policy": "isolate"}}, {"CORUN_POLICY": "off"})
    assert config.policy == "isolate"


def test_environment():
    env = {"CORUN_POLICY": " Isolate ", "CORUN_STRICT": "0", "CORUN_STEP_LOG": "steps.jsonl"}
    assert resolve({}, env) == CoRunConfig("isolate", strict=False, step_log="steps.jsonl")


def test_split_decode_from_the_environment():
    env = {"CORUN_POLICY": "certified", "CORUN_SPLIT_DECODE": "on"}
    assert resolve({}, env) == CoRunConfig("certified", split_decode=True)
    assert not resolve({}, env | {"CORUN_SPLIT_DECODE": "0"}).split_decode
    assert not resolve({}, {"CORUN_SPLIT_DECODE": "1"}).split_decode, "beside a policy only"
    with pytest.raises(ValueError, match="CORUN_SPLIT_DECODE"):
        CoRunConfig.from_env(env | {"CORUN_SPLIT_DECODE": "maybe"})
    with pytest.raises(ValueError, match="'isolate'"):
        CoRunConfig.from_env(env | {"CORUN_POLICY": "isolate"})


def test_mapping_round_trip():
    config = CoRunConfig("isolate", strict=False, step_log="x")
    assert CoRunConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"policy": "fast"}, "fast"),
        ({"polcy": "auto"}, "polcy"),
        ({"strict": "yes"}, "strict"),
        ({"step_log": 3}, "step_log"),
        ({"split_decode": 1}, "split_decode"),
        ({"policy": "isolate", "split_decode": True}, "'isolate'"),
        ({"policy": "pack", "split_decode": True}, "'pack'"),
        ({"policy": "off", "split_decode": True}, "'off'"),
        ("auto", "mapping"),
    ],
)
def test_bad_settings_are_named(given, word):
    with pytest.raises(ValueError, match=word):
        CoRunConfig.from_mapping(given)


def test_bad_environment_is_named():
    with pytest.raises(ValueError, match="CORUN_STRICT"):
        CoRunConfig.from_env({"CORUN_POLICY": "auto", "CORUN_STRICT": "maybe"})
    with pytest.raises(ValueError, match="quick"):
        CoRunConfig.from_env({"CORUN_POLICY": "quick"})


@pytest.mark.parametrize("policy", ["isolate", "pack", "auto", "off"])
def test_an_unproven_engine_is_certified_by_name_only(policy):
    assert CoRunConfig("certified", certificate=MEASURE).certificate == MEASURE
    with pytest.raises(ValueError, match=rf"'measure'.*'certified', not '{policy}'"):
        CoRunConfig(policy, certificate=MEASURE)
