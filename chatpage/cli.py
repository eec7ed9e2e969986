"""The `chatpage` command. The only place that knows every part.

Invariants: a `ChatpageError` becomes one line on stderr and an exit code, never a traceback: 2 if the user can mend it by
asking differently, else 1; 130 after Ctrl-C. What is heavy is imported by the command that needs it, so `--help` is instant.
"""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatpage.cli_flags import with_engine_flags, with_sampling_flags
from chatpage.cli_serve import register
from chatpage.config import DEFAULT_MODEL, EngineConfig
from chatpage.errors import ChatpageError, ConfigError, InvalidRequestError, ModelNotFoundError, UnsupportedModelError
from chatpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chatpage.client import Client
    from chatpage.engine.core import Engine

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_USER_MISTAKES = (InvalidRequestError, ConfigError, ModelNotFoundError, UnsupportedModelError)

app = typer.Typer(
    name="chatpage",
    help="A chat whose conversations are trees: fork anything, regenerate for free, stream n samples side by side.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; the console script."""
    # How long torch's OpenMP threads spin before they sleep. By default they hold whole cores for milliseconds after every
    # operation, against the kernels' own threads (15 % of a step) and all else, such as a browser with the page. It is read
    # once, when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except ChatpageError as error:
        sys.exit(report_error(error))
    except OSError as error:
        sys.exit(_report_output(error))


def report_error(error: ChatpageError) -> int:
    """Print an error as one line on stderr and return the exit code for it."""
    _print_error(str(error))
    return EXIT_USAGE if isinstance(error, _USER_MISTAKES) else EXIT_ERROR


def _report_output(error: OSError) -> int:
    """Say that the output cannot be written (every file that is read or written has an error of its own); give it up, so that
    Python does not try once more at its end. A reader that went away, such as `head`, needs no line."""
    if error.errno != errno.EPIPE:
        place = f" {error.filename}" if error.filename else ""
        _print_error(f"Cannot write the output{place}: {error.strerror or error}.")
    if sys.__stdout__ is not None:
        with contextlib.suppress(OSError, ValueError):  # it may be closed, or nothing that has a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
    return EXIT_ERROR


def _print_error(text: str) -> None:
    if sys.stderr is not None:  # print would take stdout then
        print("chatpage: " + " ".join(text.split()), file=sys.stderr)


@app.command()
@with_engine_flags
@with_sampling_flags("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", temperature=0.8, top_p=0.95)
def chat(
    *,
    config: EngineConfig,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option(help="the system prompt")] = None,
    go_on: Annotated[bool, typer.Option("--continue", help="go on with the conversation that was changed last")] = False,
    conversation: Annotated[str | None, typer.Option(metavar="ID", help="go on with this conversation")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="where the conversations lie")] = None,
    url: Annotated[str | None, typer.Option(help="chat on a server, such as http://127.0.0.1:8642")] = None,
    key: Annotated[str | None, typer.Option(help="API key, where the server needs one")] = None,
) -> None:
    """Chat in the terminal; /help shows how to branch."""
    from rich.console import Console

    from chatpage.terminal.chat import Chat, last_conversation
    from chatpage.terminal.streams import check_stdin, check_stdout
    from chatpage.terminal.text import check_unicode

    check_stdin()
    check_stdout()
    system = None if system is None else check_unicode(system, "--system")
    if url is not None and data is not None:
        raise InvalidRequestError("The conversations of a server lie where it keeps them: leave out --data, or --url.")
    if url is None and key is not None:
        raise InvalidRequestError("A key is for a server: give --url, too, or leave out --key.")
    with _naming_absence(), _connect(url, key) if url is not None else _load_client(config, data) as client:
        Chat(
            client,
            Console(highlight=False),
            params=params,
            model_name=client.welcome().model.name if url is not None else _name_of(config),
            system=system,
            conversation_id=last_conversation(client) if go_on and conversation is None else conversation,
            hint=client.hint,
        ).run()


@app.command()
@with_engine_flags
@with_sampling_flags("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", max_tokens=512)
def generate(
    *,
    source: Annotated[str | None, typer.Argument(metavar="[-]", help="- reads the prompt from stdin")] = None,
    config: EngineConfig,
    params: SamplingParams,
    prompt: Annotated[str | None, typer.Option(help="the prompt")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="a UTF-8 file with the prompt")] = None,
    system: Annotated[str | None, typer.Option(help="the system prompt")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="send the prompt as it is, without the chat template")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object at the end instead of text")] = False,
) -> None:
    """Answer one prompt on stdout."""
    from chatpage.generate import print_reply, read_prompt, render
    from chatpage.terminal.reply import for_chat
    from chatpage.terminal.streams import check_stdout
    from chatpage.terminal.text import check_unicode

    check_stdout()
    text = read_prompt(prompt, prompt_file, source)
    if raw and system is not None:
        raise InvalidRequestError("--raw sends the prompt alone; leave --system out, or write it into the prompt.")
    system = None if system is None else check_unicode(system, "--system")
    engine = _load(config)
    token_ids = render(engine, text, system, raw=raw)
    params = params if raw else for_chat(engine, params)
    is_whole = print_reply(engine, token_ids, params, model_name=_name_of(config), as_json=as_json)
    engine.close()
    if not is_whole:
        sys.exit(EXIT_INTERRUPTED)


@app.command()
@with_engine_flags
def bench(
    *,
    config: EngineConfig,
    against: Annotated[
        str | None, typer.Option(metavar="NAMES", help="transformers,openvino,onnxruntime,llama.cpp,llama.cpp-q4_0,vllm")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the numbers as JSON")] = None,
    chart_file: Annotated[Path | None, typer.Option("--chart", metavar="FILE", help="draw the numbers as SVG")] = None,
    workloads: Annotated[str | None, typer.Option(help="which to run, such as W1,W4 (default: W1 to W8 and STEP)")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="runs of each; medians are reported (default: 3)")] = None,
    patience: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="wait this long for other processes to rest, before each run")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a tenth of the lengths, and one run by default")] = False,
    counters: Annotated[bool, typer.Option("--counters", help="only count tokens, rows and bytes; fail if one is off")] = False,
) -> None:
    """Measure chatpage beside other engines (default: plain transformers), or check what is never computed twice."""
    others = (against, chart_file, workloads, repeat, patience)
    if counters and (quick or any(value is not None for value in others)):
        raise InvalidRequestError(
            "--counters always counts everything once: leave out --against, --chart, --workloads, --repeat, --patience "
            "and --quick."
        )
    from rich.console import Console

    if config.kv_disk is not None:
        raise InvalidRequestError("What lies on disk would make cold runs warm: give --kv-disk off (W8 has its own).")
    console = Console(highlight=False)
    if counters:
        from chatpage.bench.report import run_counters

        if not run_counters(_load(config), console, json_file=json_file):
            sys.exit(EXIT_ERROR)
        return
    from chatpage.bench.against import Plan, run_against
    from chatpage.bench.peers.registry import parse_peers
    from chatpage.bench.workloads import TITLES, parse_names

    plan = Plan(
        workloads=tuple(TITLES) if workloads is None else parse_names(workloads),
        peers=parse_peers("transformers" if against is None else against),
        repeat=repeat or (1 if quick else 3),
        is_quick=quick,
        patience_s=patience or 0.0,
        json_file=json_file,
        chart_file=chart_file,
    )
    run_against(config, plan, console)


@app.command()
@with_engine_flags
def doctor(*, config: EngineConfig) -> None:
    """Say what this machine has and what chatpage will use."""
    from rich.console import Console

    from chatpage.doctor import run_doctor
    from chatpage.terminal.streams import check_stdout

    check_stdout()
    run_doctor(config, Console(highlight=False))


register(app)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="show the version")] = False) -> None:
    if version:
        from chatpage import __version__

        print(f"chatpage {__version__}")
        raise typer.Exit


@contextlib.contextmanager
def _naming_absence() -> Iterator[None]:
    try:
        yield
    except (ConnectionRefusedError, TimeoutError, socket.gaierror) as error:
        reason = error.strerror or error
        raise ChatpageError(f"No server answers there: {reason}. Start one with 'chatpage serve', or look at --url.") from error


def _connect(url: str, key: str | None) -> "Client":
    from chatpage.client import Client

    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(f"{url!r} is no address of a server; write something like http://127.0.0.1:8642.")
    return Client(url, key=key, patience_s=10.0)


def _load_client(config: EngineConfig, data: Path | None) -> "Client":
    from rich.console import Console

    with Console(stderr=True).status(f"loading {config.model} …"):
        from chatpage.local import LocalClient

        return LocalClient(config, data)


def _load(config: EngineConfig) -> "Engine":
    from rich.console import Console

    # The status line goes to stderr, so that stdout holds only what was asked for.
    with Console(stderr=True).status(f"loading {config.model} …"):
        from chatpage.engine.core import Engine

        return Engine.load(config)


def _name_of(config: EngineConfig) -> str:
    """Name the model for people."""
    if config.model == DEFAULT_MODEL:
        from chatpage.engine.models.default_model import MODEL_NAME

        return MODEL_NAME.removesuffix(".gguf")
    return Path(config.model).stem if config.model.endswith(".gguf") else config.model
