"""The certificate as a file: it comes back as it was, or is refused with what is wrong."""

import copy
import json
import os
from dataclasses import replace

import pytest
from certificates import DOMAIN, certificate, certificates, row_claim
from hypothesis import given, settings

from corun.certify import store
from corun.certify.certificate import VERSION, Certificate, CertificateError
from corun.rows import Rows


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(store.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@given(certificates())
@settings(deadline=None)
def test_json_round_trip(made):
    text = json.dumps(made.to_mapping(), allow_nan=False)
    back = Certificate.from_mapping(json.loads(text))
    assert back == made
    assert back.digest == made.digest


def test_the_digest_names_the_claims():
    made = certificate()
    changed = [
        replace(made, largest=65),
        replace(made, engine=None),
        replace(made, steps=made.steps[:-1]),
        replace(made, rows=(row_claim("linear", [range(2, 65)]), made.rows[1])),
        replace(made, domain={**DOMAIN, "threads": 3}),
    ]
    assert len({c.digest for c in (made, *changed)}) == len(changed) + 1
    assert len(made.digest) == 16


def test_the_common_class():
    made = certificate(largest=20)
    more = row_claim("norm", [[3, 4, 5, 20], [1, 2]], variant=[6])
    both = replace(made, rows=(*made.rows, more))
    assert both.step_rows() == Rows.of([3, 4, 5, 20])
    assert both.sample_rows() == Rows.span(1, 8)
    nothing = row_claim("odd", [], variant=range(1, 21))
    assert replace(made, rows=(*made.rows, nothing)).step_rows() == Rows()
    assert replace(made, rows=()).step_rows() == Rows()
    assert replace(made, rows=()).sample_rows() == Rows()


def test_a_property_holds_only_if_it_was_tried_and_holds_everywhere():
    made = certificate()
    assert made.holds("mixed")
    assert not replace(made, steps=()).holds("mixed")
    broken = certificate(broken=["mixed"])
    assert not replace(made, steps=(*made.steps, *broken.steps)).holds("mixed")
    assert broken.holds("chunks")


@pytest.mark.parametrize("given", [[], 3, "text", None, {}, {"policies": []}])
def test_what_is_no_certificate(given):
    with pytest.raises(CertificateError, match=r"no CoRun certificate.*corun certify"):
        Certificate.from_mapping(given)


@pytest.mark.parametrize("version", [0, VERSION + 1, "1", True, 1.0, None])
def test_another_format(version):
    told = rf"format {version!r}, not {VERSION}.*corun certify"
    with pytest.raises(CertificateError, match=told):
        Certificate.from_mapping({**certificate().to_mapping(), "version": version})


def places(value, path=()):
    """Every place in a JSON value."""
    if path:
        yield path
    if not isinstance(value, dict | list):
        return
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in inside:
        yield from places(child, (*path, key))


def parent_of(value, path):
    for key in path[:-1]:
        value = value[key]
    return value


WHOLE = certificate(broken=["mixed"]).to_mapping()


@pytest.mark.parametrize("junk", [None, "x", -1, [], {}, [[5]], [[9, 3]]])
def test_damage_anywhere_is_a_clear_error_or_harmless(junk):
    refused = 0
    for path in places(WHOLE):
        damaged = copy.deepcopy(WHOLE)
        parent_of(damaged, path)[path[-1]] = junk
        try:
            Certificate.from_mapping(damaged)
        except CertificateError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("largest", value) for value in ("64", 10**6, 63, 64.0, True, -1, None)),
        *(("seconds", value) for value in (float("nan"), float("inf"), "12.5", -1, True, None)),
        *(("engine", value) for value in ({}, [], False)),
    ],
)
def test_numbers_that_were_never_measured(name, value):
    damaged = {**WHOLE, name: value}
    again = json.loads(json.dumps(damaged))
    with pytest.raises(CertificateError, match=r"damaged.*corun certify"):
        Certificate.from_mapping(again)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("rows", 0, "values"), "1000000"),
        (("rows", 0, "seconds"), float("nan")),
        (("rows", 0, "sampled"), 0),
        (("rows", 0, "classes", 0, 0, 1), "64"),
        (("rows", 0, "classes", 0, 0, 1), 64.5),
        (("rows", 0, "variant"), [[65.0, 65.0]]),
        (("steps", 0, "holds"), 1),
        (("steps", 0, "trials"), 24.0),
        (("steps", 0, "example"), 3),
        (("engine", "equal"), "True"),
        (("engine", "tokens"), -5),
    ],
)
def test_a_wrong_type_anywhere_is_damage(where, value):
    damaged = copy.deepcopy(WHOLE)
    parent_of(damaged, where)[where[-1]] = value
    with pytest.raises(CertificateError, match=r"damaged.*corun certify"):
        Certificate.from_mapping(damaged)


def test_the_worker_that_measured_is_in_it():
    made = certificate()
    told = replace(made, worker={"threads": 2})
    assert "worker" not in made.to_mapping()
    assert Certificate.from_mapping(made.to_mapping()).worker == {}
    assert Certificate.from_mapping(told.to_mapping()) == told
    assert told.digest not in (made.digest, replace(made, worker={"threads": 1}).digest)


def test_a_lost_key_is_damage():
    for path in places(WHOLE):
        damaged = copy.deepcopy(WHOLE)
        parent = parent_of(damaged, path)
        if (path[0] == "domain" and len(path) > 1) or not isinstance(parent, dict):
            continue
        del parent[path[-1]]
        if path[-1] in (
            "example",
            "sequence",
            "together",
        ):  # a claim that holds has none; older ones neither
            continue
        with pytest.raises(CertificateError, match="corun certify"):
            Certificate.from_mapping(damaged)


# The store


def test_kept_and_found_again(cache):
    assert store.count() == 0
    assert store.load(DOMAIN) is None
    made = certificate()
    path = store.save(made)
    assert path.is_relative_to(cache)
    assert store.load(DOMAIN) == made
    assert store.load({**DOMAIN, "threads": 3}) is None
    store.save(certificate(domain={**DOMAIN, "threads": 3}))
    assert store.count() == 2
    store.save(certificate(largest=128))  # the same subject: it takes the place of the first
    assert store.count() == 2
    assert store.load(DOMAIN).largest == 128
    assert store.path_of(dict(reversed(DOMAIN.items()))) == path


def test_where_it_is(cache, monkeypatch, tmp_path):
    assert store.directory() == cache
    monkeypatch.delenv(store.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.directory() == tmp_path / "xdg" / "corun"


@pytest.mark.parametrize("text", ["", "{", "no json", "\x00"])
def test_an_unreadable_file_is_named(text):
    path = store.save(certificate())
    path.write_text(text)
    with pytest.raises(CertificateError, match=rf"{path.name} cannot be read.*delete it"):
        store.load(DOMAIN)


def test_a_foreign_certificate_names_what_differs():
    here = {**DOMAIN, "device": "other", "moe_backend": "x"}
    with pytest.raises(CertificateError) as raised:
        store.check_subject(certificate(), here, "file.json")
    message = str(raised.value)
    assert "file.json" in message
    assert "device: 'd', here 'other'" in message
    assert "moe_backend: None, here 'x'" in message
    assert "threads" not in message
    store.check_subject(certificate(), dict(DOMAIN), "file.json")


def test_a_file_in_the_wrong_place_is_refused():
    path = store.save(certificate())
    other = {**DOMAIN, "device": "other"}
    path.rename(store.path_of(other))
    with pytest.raises(CertificateError, match="device: 'd', here 'other'"):
        store.load(other)


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_crash_while_saving_leaves_the_old_one(monkeypatch, function):
    def crash(*args):
        raise OSError("power cut")

    old = certificate()
    store.save(old)
    with monkeypatch.context() as patched:
        patched.setattr(os, function, crash)
        with pytest.raises(OSError, match="power cut"):
            store.save(certificate(largest=128))
    assert store.load(DOMAIN) == old
    assert store.count() == 1
