"""What ``make release-check`` finds; it builds and installs only when it is called."""

from __future__ import annotations

from tests.release_check import sdist_faults, tracked, wheel_faults

METADATA = "Metadata-Version: 2.4\nVersion: 1.2.3\nLicense-Expression: Apache-2.0\nClassifier: Typing :: Typed\n"
PACKAGE = {"slipstream/__init__.py", "slipstream/py.typed"}


def test_a_whole_wheel_has_no_faults() -> None:
    assert wheel_faults([*PACKAGE, "slipstream-1.2.3.dist-info/METADATA"], METADATA, PACKAGE, "1.2.3") == []


def test_faults_are_named() -> None:
    names = ["slipstream/__init__.py", "tests/test_x.py"]
    assert wheel_faults(names, METADATA, PACKAGE, "1.2.4") == [
        "the wheel lacks slipstream/py.typed",
        "the wheel has tests/test_x.py, which is not part of the package",
        "the wheel's metadata lacks 'Version: 1.2.4'",
    ]
    assert sdist_faults(["slipstream-1/README.md"], {"README.md", "Makefile"}) == [
        "the source distribution lacks Makefile"
    ]


def test_what_must_be_in_the_package_is_tracked() -> None:
    package = tracked("slipstream")
    assert {"slipstream/py.typed", "slipstream/cli.py"} <= package
    assert any(name.endswith("smollm2-135m-eagle3/model.safetensors") for name in package)
    assert any(name.endswith(".c") for name in package)
