"""Wrapping in place: every wrapper once, whoever else wraps the same function."""

import functools
import inspect
from types import SimpleNamespace

import pytest

from corun.engine.wrap_once import wrap_once


def outer(original):
    return lambda *args: f"outer({original(*args)})"


def inner(original):
    return lambda *args: f"inner({original(*args)})"


class Plain:
    def greet(self, name):
        """Say it."""
        return name

    @classmethod
    def made(cls, name):
        return f"{cls.__name__} {name}"


@pytest.fixture
def owner():
    return type("Owner", (), dict(vars(Plain)))


def test_a_second_time_changes_nothing(owner):
    wrap_once(owner, "greet", inner)
    wrapped = owner.greet
    wrap_once(owner, "greet", inner)
    assert owner.greet is wrapped
    assert owner().greet("a") == "inner(a)"
    assert wrapped.__doc__ == "Say it."
    assert list(inspect.signature(wrapped).parameters) == ["self", "name"]


def test_two_seams_on_one_function_do_not_hide_each_other(owner):
    for make in (inner, outer, inner, outer):
        wrap_once(owner, "greet", make)
    assert owner().greet("a") == "outer(inner(a))"


def test_a_wrapper_of_somebody_else_keeps_the_mark(owner):
    wrap_once(owner, "greet", inner)
    ours = owner.greet

    @functools.wraps(ours)
    def theirs(self, name):
        return f"theirs({ours(self, name)})"

    owner.greet = theirs
    wrap_once(owner, "greet", inner)
    assert owner().greet("a") == "theirs(inner(a))"


def test_class_methods_stay_class_methods(owner):
    for _ in range(2):
        wrap_once(owner, "made", inner)
    assert owner.made("a") == owner().made("a") == "inner(Owner a)"


def test_what_a_class_inherits_is_wrapped_for_that_class_alone(owner):
    child = type("Child", (owner,), {})
    wrap_once(child, "greet", inner)
    assert (child().greet("a"), owner().greet("a")) == ("inner(a)", "a")


def test_what_a_parent_class_has_wrapped_is_not_wrapped_again(owner):
    child = type("Child", (owner,), {})
    wrap_once(owner, "greet", inner)
    wrap_once(child, "greet", inner)
    assert child().greet("a") == "inner(a)"


def test_functions_of_a_module():
    module = SimpleNamespace(run=str.upper)
    for _ in range(2):
        wrap_once(module, "run", inner)
    assert module.run("a") == "inner(A)"


def test_what_is_not_there_is_an_error(owner):
    with pytest.raises(AttributeError, match="gone"):
        wrap_once(owner, "gone", inner)
