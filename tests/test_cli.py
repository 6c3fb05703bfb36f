from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream import cli as command_line
from slipstream.errors import EngineError
from tests.commands.run_cli import RunCli, assert_one_line_error, make_runner


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCli:
    return make_runner(capsys, monkeypatch)


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; from slipstream.cli import main; "
        "assert main(['--help']) == 0 and main(['generate', '--help']) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("generate", "chat", "bench", "doctor", "models"):
        assert name in done.stdout


@pytest.mark.parametrize("module", ["slipstream", "slipstream.cli"])
def test_exit_code_of_the_process(module: str) -> None:
    command = [sys.executable, "-m", module, "generate", "x", "--max-token", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: unknown option '--max-token'; did you mean '--max-tokens'?\n"


def test_version(cli: RunCli) -> None:
    assert cli("--version") == (0, f"slipstream {slipstream.__version__}\n", "")


def test_no_command_shows_the_help(cli: RunCli) -> None:
    outcome = cli()
    assert outcome.code == 0
    assert "generate" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["generat"], ["unknown command 'generat'; did you mean 'generate'?"]),
        (["frobnicate"], ["unknown command 'frobnicate'; see 'slipstream --help'"]),
        (["--verison"], ["unknown option '--verison'", "did you mean '--version'?"]),
        (["generate"], ["missing argument 'PROMPT'", "see 'slipstream generate --help'"]),
        (["generate", "x", "y"], ["unexpected extra argument", "see 'slipstream generate --help'"]),
        (["generate", "x", "--top_k", "3"], ["unknown option '--top_k'; did you mean '--top-k'?"]),
        (["generate", "x", "--zzz"], ["unknown option '--zzz'; see 'slipstream generate --help'"]),
        (["generate", "x", "--max-tokens", "many"], ["'--max-tokens'", "see 'slipstream generate --help'"]),
        (["generate", "x", "--max-tokens"], ["'--max-tokens' requires an argument"]),
        (["bench", "--batch", "1,two"], ["--batch must be positive numbers", "such as 1,8,32"]),
        (["bench", "--model", "a", "--shape", "b"], ["give one of them"]),
    ],
)
def test_usage_errors_are_one_line(cli: RunCli, arguments: list[str], messages: list[str]) -> None:
    assert_one_line_error(cli(*arguments), *messages)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (EngineError("it broke;\n try again"), 2, "error: it broke; try again\n"),
        (FileNotFoundError(2, "No such file or directory", "a.bin"), 2, "error: a.bin: No such file or directory; "),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            2,
            "error: the input is not valid utf-8 text; convert it\n",
        ),
        (MemoryError(), 2, "error: out of memory; use a smaller model"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (KeyError("oops"), 1, "error: KeyError: 'oops'; a bug of ours, SLIPSTREAM_DEBUG=1 shows where\n"),
    ],
)
def test_failures_never_show_a_traceback(
    cli: RunCli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("slipstream.commands.models.run", fail)
    outcome = cli("models")
    assert outcome.code == code
    assert outcome.out == ""
    assert outcome.err.startswith(line)
    assert outcome.err.count("\n") == 1


def test_debug_shows_the_traceback(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")
    monkeypatch.setattr("slipstream.commands.models.run", fail)
    outcome = cli("models")
    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: KeyError")


def test_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    code = (
        "import sys; from slipstream import cli; import slipstream.commands.models as m\n"
        "def flood(**_):\n"
        "    for _ in range(100_000): sys.stdout.write('x' * 100)\n"
        "m.run = flood\n"
        "sys.exit(cli.main(['models']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == command_line.EXIT_BROKEN_PIPE
