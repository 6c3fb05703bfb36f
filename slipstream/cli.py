"""The command line: its syntax, and how errors are shown. The commands are in ``slipstream.commands``.

Nothing here imports torch: ``slipstream --help`` answers at once, and commands import what they need when they run.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream import __version__
from slipstream.commands.options import refuse_options_before, with_options
from slipstream.config import EngineOptions, debug_enabled
from slipstream.errors import ConfigError, SlipstreamError, nearest
from slipstream.load.settings import LoadSettings
from slipstream.sampling_params import SamplingParams
from slipstream.server.settings import ServerSettings
from slipstream.train.settings import BlockSettings, TrainSettings

EXIT_ERROR = 1  # a bug of ours
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as shells report Ctrl-C
EXIT_BROKEN_PIPE = 141  # as shells report a closed pipe

app = typer.Typer(
    name="slipstream",
    add_completion=False,
    help="Run language models: generate text, chat, measure speed.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

train = typer.Typer(help="Train a draft head for a model.", no_args_is_help=True)
app.add_typer(train, name="train")
benchmarks = typer.Typer(invoke_without_command=True)
app.add_typer(benchmarks, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]
SystemText = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message to begin with.")]


def _show_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@with_options(temperature=0.0, max_tokens=256)
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt, or - to read it from standard input.")],
    sampling: SamplingParams,
    engine: EngineOptions,
    system: SystemText = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt unchanged, without the chat template.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Answer one prompt, shown as it is generated.

    The model's chat template is applied if it has one. Statistics follow on standard error.
    """
    from slipstream.commands.generate import run

    return run(prompt, sampling, engine, system=system, raw=raw, as_json=as_json)


@app.command()
@with_options()
def transcribe(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Sound files: WAV, FLAC, MP3, OGG.")],
    engine: EngineOptions,
    language: Annotated[
        str | None, typer.Option("--language", help="Language of the speech, by code or name; detected if unset.")
    ] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Translate to English.")] = False,
    output_format: Annotated[str, typer.Option("--format", help="text, json, verbose_json, srt or vtt.")] = "text",
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Write a file for each sound into this folder.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text as if it came before, for names and style.")
    ] = None,
    batched: Annotated[
        bool, typer.Option("--batched", help="Cut long sounds where it is quiet, and transcribe pieces together.")
    ] = False,
    word_timestamps: Annotated[
        bool, typer.Option("--word-timestamps", help="Times of words: with --format verbose_json, srt or vtt.")
    ] = False,
) -> int:
    """Transcribe sound files with a speech model; --model names it.

    The text goes to standard output, or into files with --output-dir.
    """
    from slipstream.commands.transcribe import TranscriptOutput, run
    from slipstream.transcription.options import TranscriptionOptions

    task = "translate" if translate else "transcribe"
    output = TranscriptOutput(output_format, output_dir)
    options = TranscriptionOptions(
        language=language,
        task=task,
        prompt=prompt,
        batched=batched,
        no_speech_probs=output_format == "verbose_json",
        word_timestamps=word_timestamps,
    )
    return run(files, options, engine, output)


@app.command()
@with_options()
def demo(
    engine: EngineOptions,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; three built-in ones if unset.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Maximum tokens of an answer.")] = 128,
) -> int:
    """Answer with and without speculation, side by side: the same text, drafted tokens in colour, both speeds."""
    from slipstream.commands.demo import run

    return run(prompt, engine, max_tokens=max_tokens)


@app.command()
@with_options(temperature=0.0, max_tokens=512)
def chat(sampling: SamplingParams, engine: EngineOptions, system: SystemText = None) -> int:
    """Chat with a model; /help lists the commands.

    Ctrl-C stops an answer, Ctrl-D leaves.
    """
    from slipstream.commands.chat import run

    return run(sampling, engine, system=system)


@benchmarks.callback()
@with_options()
def bench(
    context: typer.Context,
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to measure; the default model if neither this nor --shape.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Measure random weights of a known shape, such as llama-3.1-8b.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, separated by commas.")] = "1,8,32",
    prompt_len: Annotated[int, typer.Option("--prompt-len", help="Random tokens in each prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", help="Tokens generated for each prompt.")] = 256,
    repeat: Annotated[int, typer.Option("--repeat", help="Runs of each batch size; the best one counts.")] = 3,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Folder for the result file.")] = Path(
        "benchmarks/results"
    ),
    as_json: AsJson = False,
) -> int | None:
    """Measure decode speed: output tokens per second with every request of the batch in decode.

    Greedy, end-of-sequence ignored, random prompts. Writes one JSON file per run. `slipstream bench serve` measures a
    server.
    """
    if context.invoked_subcommand is not None:
        refuse_options_before(context)
        return None
    from slipstream.commands.bench import Workload, run

    workload = Workload.parse(batch, prompt_len=prompt_len, output_len=output_len, repeat=repeat)
    return run(engine, workload, model=model, shape=shape, output_dir=output_dir, as_json=as_json)


@benchmarks.command("serve")
@with_options()
def bench_serve(
    settings: LoadSettings,
    more_limits: Annotated[list[str] | None, typer.Argument(metavar="LIMIT", hidden=True)] = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Folder for the result file.")] = Path(
        "benchmarks/results"
    ),
    png: Annotated[
        Path | None, typer.Option("--png", help="Plot both distributions, and the rate over time, into this file.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Show two result files side by side, and measure nothing."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Measure throughput and latency of an OpenAI-compatible server under load.

    A closed loop of streams, arrivals at a rate, or a trace. Writes one JSON file.
    """
    from slipstream.commands.bench_serve import Output, run, run_compare

    if compare is not None:
        return run_compare(*compare)
    return run(settings.with_limits(more_limits or []), Output(output_dir, png, as_json))


@app.command()
@with_options()
def serve(
    settings: ServerSettings,
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model to serve; the default model if unset.")
    ] = None,
    model_option: Annotated[str | None, typer.Option("--model", help="The same as the argument.")] = None,
) -> int:
    """Serve a model over HTTP with an OpenAI-compatible API.

    The engine runs in its own process. Documentation of every route is at /docs.
    """
    from slipstream.commands.serve import run

    if model is not None and model_option is not None:
        raise ConfigError(f"two models are named, {model} and {model_option}; give one of them")
    return run(model if model_option is None else model_option, engine, settings)


@app.command()
def doctor(as_json: AsJson = False) -> int:
    """Show what this machine has, what works, and how to get what is missing."""
    from slipstream.commands.doctor import run

    return run(as_json=as_json)


@app.command()
def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, or a known shape such as llama-3.1-8b.")],
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            help="Also measure this draft head of the model. Or a shape: llama-3.1-8b-eagle3.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File to write; one in the cache, which every engine reads, if unset."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes that compile; one for each core if unset.")
    ] = None,
) -> int:
    """Measure the fastest kernel tiles for a model's weights on this GPU, and store them.

    Takes a minute or two. Without it, shipped measurements are used, or a heuristic.
    """
    from slipstream.commands.tune import run

    return run(model, head=head, output=output, jobs=jobs)


@train.command("eagle3")
@with_options()
def train_eagle3(settings: TrainSettings) -> int:
    """Train an EAGLE-3 head on texts that the model itself generates; no data set is needed.

    A run that was stopped resumes from its last checkpoint.
    """
    from slipstream.commands.train import run
    from slipstream.train.eagle3 import train_eagle3 as train_head

    return run(settings, "eagle3", train_head)


@train.command("dflash")
@with_options()
def train_dflash(settings: BlockSettings) -> int:
    """Train a DFlash head, which drafts a block in one pass, on texts that the model itself generates.

    A run that was stopped resumes from its last checkpoint.
    """
    from slipstream.commands.train import run
    from slipstream.train.dflash import train_dflash as train_head

    return run(settings, "dflash", train_head)


@app.command()
def models(as_json: AsJson = False) -> int:
    """List the models with a short name, and those in the cache."""
    from slipstream.commands.models import run

    return run(as_json=as_json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Every failure is one line on standard error."""
    if sys.stdin is None:  # closed by the parent process
        sys.stdin = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the answer.
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    with _quiet_threads():
        try:
            command = typer.main.get_command(app)
            with command.make_context("slipstream", list(sys.argv[1:] if argv is None else argv)) as context:
                code = command.invoke(context)
                sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except typer.Exit as done:
            return done.exit_code
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Buffered output would fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        except Exception as error:
            if debug_enabled():
                traceback.print_exc()
            return _fail(*_explain(error))


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, SlipstreamError):
        return str(error), EXIT_BAD_INPUT
    if hasattr(error, "format_message"):  # all usage errors have it, wherever typer defines their classes
        return _explain_usage(error), EXIT_BAD_INPUT
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}; check the path and your rights to it", EXIT_BAD_INPUT
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not valid {error.encoding} text; convert it", EXIT_BAD_INPUT
    if isinstance(error, MemoryError):
        return "out of memory; use a smaller model, max_model_len or kv_cache_memory_bytes", EXIT_BAD_INPUT
    return f"{type(error).__name__}: {error}; a bug of ours, SLIPSTREAM_DEBUG=1 shows where", EXIT_ERROR


def _explain_usage(error: Any) -> str:
    message: str = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    hint = ""
    if context is not None and hasattr(error, "possibilities"):
        flags = [flag for param in context.command.params for flag in (*param.opts, *param.secondary_opts)]
        message = f"unknown option '{error.option_name}'"
        hint = nearest(error.option_name, [flag for flag in flags if flag.startswith("--")])
    elif context is not None and (unknown := re.match("No such command '(.*?)'", message)):
        message = f"unknown command '{unknown[1]}'"
        hint = nearest(unknown[1], context.command.list_commands(context))
    see = f"; see '{context.command_path if context is not None else 'slipstream'} --help'"
    return message[0].lower() + message[1:] + (hint or see)


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Hide tracebacks of the engine's threads: their failures reach the caller as errors."""
    before = threading.excepthook
    if not debug_enabled():
        threading.excepthook = lambda _: None
    try:
        yield
    finally:
        threading.excepthook = before


if __name__ == "__main__":
    sys.exit(main())
