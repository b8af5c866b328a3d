"""Whose fault an unexpected error is."""

import importlib

import pytest

from protofl_common.basics.faults import fault_of
from protofl_common.basics.text import human_bytes


def error_of(function):
    """Return the error that the function raises."""
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def in_our_code():
    return human_bytes("many")


@pytest.mark.parametrize(("own", "whose", "cure"), [
    ((), "a fault of ProtoFL: TypeError: ", "; report it"),
    (("server_app.strategies.fedavg",), "a fault of ProtoFL: TypeError: ", "; report it"),
    (("mine.method",), "a fault of mine or of ProtoFL: TypeError: ",
        "; report it unless it is of mine"),
])  # fmt: skip
def test_an_error_in_our_code_may_come_from_what_the_users_returned(own, whose, cure):
    fault = fault_of(error_of(in_our_code), own)

    assert fault.startswith(whose)
    assert fault.endswith(cure)


def test_an_installed_method_is_no_library(tmp_path, monkeypatch):
    """A helper of the package fails, which is called by our code as the method is."""
    package = tmp_path / "site-packages" / "installed_method"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("def fails():\n    raise KeyError('mine')\n")
    monkeypatch.syspath_prepend(str(package.parent))
    helper = importlib.import_module("installed_method.helper")

    fault = fault_of(error_of(helper.fails), ["installed_method.method"])

    assert fault == f"a fault of helper.py: KeyError: 'mine', in {package}/helper.py, line 2"
