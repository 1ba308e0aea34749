"""``corun certify``: what it prints, what it writes, and its exit statuses. No engine starts."""

import json

import pytest
from certificates import DIFFERS, certificate

from corun import cli
from corun.certify import run, store
from corun.certify.planner import Engine
from corun.certify.run import Certified, CertifyOptions


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv(store.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "250")
    for name in ("CORUN_DEBUG", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # pytest's own logging stays as it is


def written(tmp_path, value):
    path = tmp_path / "c.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def show(tmp_path, value):
    return cli.main(["certify", "--show", written(tmp_path, value)])


def test_show(tmp_path, capsys):
    assert show(tmp_path, certificate().to_mapping()) == 0
    text = capsys.readouterr().out
    for words in (
        "linear",
        "1-64",
        "a prompt beside other prompts",
        "every bit equal",
        "256 tokens",
    ):
        assert words in text
    assert "certified: allowed" in text
    assert "1,000,000" in text


def test_show_takes_what_json_wrote(tmp_path, capsys):
    found = Certified(certificate(), Engine(8, 64, False), None, 3.0)
    assert show(tmp_path, found.to_mapping()) == 0
    assert "certified: allowed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (certificate(broken=["decode_rows"]), "certified: not allowed: decode rows does not hold"),
        (certificate(engine=DIFFERS), "DIFFERS: request 3, output 7"),
        (certificate(engine=None), "not checked on the loaded engine"),
        (certificate(step=[[64], range(1, 64)]), "pack: allowed"),
    ],
)
def test_show_says_why_not(tmp_path, capsys, made, words):
    assert show(tmp_path, made.to_mapping()) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "is no JSON file"),
        ("", "is no JSON file"),
        ({}, "no CoRun certificate"),
        ({"version": 99}, "format 99"),
        ({**certificate().to_mapping(), "rows": [{}]}, "damaged"),
    ],
)
def test_show_of_another_file(tmp_path, capsys, value, words):
    assert show(tmp_path, value) == 2
    error = capsys.readouterr().err
    assert error.startswith("corun certify: ")
    assert words in error
    assert error.count("\n") == 1


def test_show_of_no_file(tmp_path, capsys):
    assert cli.main(["certify", "--show", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


def test_no_model(capsys):
    assert cli.main(["certify"]) == 2
    assert "MODEL" in capsys.readouterr().err


@pytest.fixture
def certified(monkeypatch):
    """Stands in for the measurement: returns what it was asked, and what it will find."""
    file = store.save(certificate())
    asked, found = [], [Certified(certificate(), Engine(8, 64, False), file, 36.2)]

    def certify(options, progress):
        asked.append((options, progress))
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    monkeypatch.setattr(run, "certify", certify)
    return asked, found


def test_measured_and_kept(certified, capsys, tmp_path):
    out = tmp_path / "out.json"
    assert cli.main(["certify", "m", "--json", str(out), "--rows", "8", "--budget", "2.5"]) == 0
    text = capsys.readouterr().out
    assert f"measured and checked in 36.2 s; digest {certificate().digest}" in text
    file = store.path_of(certificate().domain)
    assert f"kept as {file}" in text
    assert json.loads(file.read_text())["name"] == "m"
    assert store.load(certificate().domain) == certificate()
    saved = json.loads(out.read_text())
    assert saved["digest"] == certificate().digest
    assert [p["policy"] for p in saved["policies"] if p["allowed"]] == [
        "certified",
        "pack",
        "isolate",
    ]
    assert saved["file"] == str(file)
    (options, progress), *others = certified[0]
    assert not others and progress is True
    assert (options.model, options.rows, options.budget_s, options.keep) == ("m", 8, 2.5, True)


def test_flags_reach_the_measurement(certified, capsys):
    certified[1][0] = Certified(certificate(), Engine(8, 64, False), None, 1.0)
    flags = ["--no-keep", "--no-progress", "--random-weights", "--dtype", "float32"]
    assert cli.main(["certify", "m", *flags, "--engine-arg", "max_model_len=128"]) == 0
    assert "not kept" in capsys.readouterr().out
    options, progress = certified[0][0]
    assert not options.keep and options.random_weights and not progress
    assert options.engine_args == {"dtype": "float32", "max_model_len": 128}


def test_a_certificate_that_does_not_allow_certified(certified):
    certified[1][0] = Certified(certificate(engine=DIFFERS), Engine(8, 64, False), None, 1.0)
    assert cli.main(["certify", "m"]) == 1


@pytest.mark.parametrize("error", [ValueError("no such model"), RuntimeError("engine failed")])
def test_what_cannot_be_measured(certified, capsys, error):
    certified[1][0] = error
    assert cli.main(["certify", "m"]) == 2
    assert capsys.readouterr().err == f"corun certify: {error}\n"


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_is_some_time(budget):
    with pytest.raises(ValueError, match="above 0"):
        CertifyOptions("m", budget_s=budget)
    assert cli.main(["certify", "m", "--budget", str(budget)]) == 2
