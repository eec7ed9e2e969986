"""The command line: help is instant, every mistake is one line on stderr with the right exit code, flags reach the engine."""

import io
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from chatpage import cli
from tests.terminal.pseudo_terminal import CTRL_C, PseudoTerminal
from tests.tiny_models import save_tiny_llama, tiny_llama_folder

ROOT = Path(__file__).parents[1]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs a command line on the tiny model, with bytes on stdin."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def call(*arguments: str, stdin: bytes = b"", model: Path | str | None = None) -> Outcome:
        tiny = [] if model is None else ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--kv-memory", "2MiB"]
        monkeypatch.setattr(sys, "argv", ["chatpage", *arguments, *tiny])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, *capsys.readouterr())

    return call


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )


# -- help ------------------------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['chatpage', 'generate', '--help']\n"
        "import chatpage.cli\n"
        "try: chatpage.cli.main()\n"
        "except SystemExit: print({m for m in ('torch', 'transformers', 'numpy') if m in sys.modules})"
    )
    assert _python("-c", code).stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", ["chat", "generate", "bench", "doctor"])
def test_every_command_takes_the_flags_of_the_engine(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(command, "--help").out
    for flag in ("model", "device", "dtype", "quantization", "kv-memory", "block-size", "max-batched-tokens", "max-num-seqs"):
        assert f"--{flag}" in shown
    for flag in ("max-model-len", "threads", "config"):
        assert f"--{flag}" in shown


def test_the_version_is_shown(run: Run) -> None:
    assert run("--version").out.startswith("chatpage ")


def test_a_server_that_is_not_there_is_named_as_the_reason() -> None:
    """It said that the output could not be written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = _python("-m", "chatpage", "chat", "--url", f"http://127.0.0.1:{port}")
    assert result.returncode == 1
    assert "No server answers there" in result.stderr
    assert "chatpage serve" in result.stderr


def test_the_package_runs_as_a_module() -> None:
    result = _python("-m", "chatpage", "--version")
    assert (result.returncode, result.stdout[:9], result.stderr) == (0, "chatpage ", "")


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["generate"], "Give the prompt in one way, not 0"),
        (["generate", "--prompt", "a", "-"], "Give the prompt in one way, not 2"),
        (["generate", "hello"], "Unexpected argument 'hello'"),
        (["generate", "--prompt-file", "/no/such/file"], "Cannot read /no/such/file: No such file"),
        (["generate", "--prompt", "bytes \udcff"], "--prompt is not valid UTF-8 at character 6"),
        (["generate", "--prompt", "x", "--raw", "--system", "y"], "--raw sends the prompt alone"),
        (["generate", "--prompt", "x", "-n", "0"], "n is 0; it must be between 1 and 64"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it must be in [0, 100]"),
        (["generate", "--prompt", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "--prompt", "x", "--top-p", "0"], "top_p is 0.0; it must be in (0, 1]"),
        (["generate", "--prompt", "x", "--stop", ""], "stop has an empty string"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "--prompt", "x", "--logprobs", "21"], "logprobs is 21"),
        (["generate", "--prompt", "x", "--seed", "-1"], "seed is -1"),
        (["generate", "--prompt", "x", "--device", "tpu"], "device: Input should be 'auto', 'cpu' or 'cuda' (got 'tpu')"),
        (["generate", "--prompt", "x", "--kv-memory", "lots"], "'lots' is not a size"),
        (["generate", "--prompt", "x", "--block-size", "0"], "block_size: Input should be greater than or equal to 1"),
        (["generate", "--prompt", "x", "--model", "/no/such/model"], "There is no file or folder /no/such/model"),
        (["generate", "--prompt", "x", "--config", "/no/such.toml"], "Cannot read the config file /no/such.toml"),
        (["chat", "--model", "/no/such/model.gguf"], "There is no file or folder /no/such/model.gguf"),
        (["chat", "--system", "\udcff"], "--system is not valid UTF-8"),
        (["bench", "--workloads", "W1,W9"], "There is no workload W9; known are W1"),
        (["bench", "--workloads", ","], "--workloads names none"),
        (
            ["bench", "--against", "ollama"],
            "There is no engine ollama to run against; known are chatpage-no-cascade",
        ),
        (["bench", "--quick", "--chart", "/no/such/bench.svg"], "Cannot write /no/such/bench.svg"),
        (["bench", "--counters", "--against", "vllm"], "--counters always counts everything once"),
        (["bench", "--kv-disk", "here"], "would make cold runs warm"),
        (["bench", "--counters", "--quick"], "--counters always counts everything once"),
        (["doctor", "--threads", "0"], "threads: Input should be greater than or equal to 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run: Run, arguments: list[str], problem: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert problem in err
    assert err.startswith("chatpage: ")
    assert len(err.splitlines()) == 1
    assert "chatpage: " not in out


def test_a_broken_gguf_is_one_line_and_exit_code_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing that makes sense")
    code, _, err = run("generate", "--prompt", "x", "--model", str(tmp_path / "broken.gguf"))
    assert code == 1
    assert "broken.gguf is damaged or incomplete" in err
    assert "Traceback" not in err


def test_an_unknown_key_of_the_config_file_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('modell = "x"\n', encoding="utf-8")
    code, _, err = run("doctor", "--config", str(tmp_path / "my.toml"))
    assert code == 2
    assert "modell: unknown setting; known are model, device" in err


def test_an_unknown_flag_is_a_usage_error(run: Run) -> None:
    code, _, err = run("generate", "--prompt", "x", "--tempratur", "1")
    assert code == 2
    assert "tempratur" in err


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ("generate - <&-", 2, "stdin is closed"),
        ("chat <&-", 2, "stdin is closed"),
        ("chat </dev/null >&-", 2, "stdout is closed"),
        ("generate --prompt hi >&-", 2, "stdout is closed"),
        ("doctor >&-", 2, "stdout is closed"),
        ("generate --prompt hi --max-tokens 2 --json >/dev/full", 1, "Cannot write the output: No space left on device."),
        ("--version >/dev/full", 1, "Cannot write the output: No space left on device."),
    ],
)
def test_a_stream_that_is_closed_or_full_is_one_line(arguments: str, code: int, problem: str) -> None:
    """Python has None for a stream that is closed, and finds out that a disk is full when it ends, with an exit code of 120."""
    flags = ["--device", "cpu", "--kv-memory", "2MiB", "--model", str(tiny_llama_folder())]
    words = arguments.split()
    command = shlex.join([sys.executable, "-m", "chatpage"]) + f" {arguments} "
    command += shlex.join(flags) if words[0] != "--version" else ""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    result = subprocess.run(
        ["/bin/sh", "-c", command], check=False, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert result.returncode == code
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1


# -- generate --------------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_alone(run: Run) -> None:
    prompt = ["generate", "--prompt", "hello", "--max-tokens", "8", "--seed", "1"]
    first = run(*prompt, model=tiny_llama_folder())
    assert first.code == 0
    assert first.out.endswith("\n")
    assert len(first.out) > 1
    assert "tok/s" not in first.out
    assert run(*prompt, model=tiny_llama_folder()).out == first.out


def test_the_three_ways_to_give_a_prompt_agree(run: Run, tmp_path: Path) -> None:
    text = "hello,\nwith é and a second line"
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    flags = ["--max-tokens", "6", "--temperature", "0"]
    outputs = {
        run("generate", "--prompt", text, *flags, model=tiny_llama_folder()).out,
        run("generate", "--prompt-file", str(tmp_path / "prompt.txt"), *flags, model=tiny_llama_folder()).out,
        run("generate", "-", *flags, stdin=text.encode(), model=tiny_llama_folder()).out,
    }
    assert len(outputs) == 1


def test_stdin_that_is_not_utf8_is_refused_with_its_place(run: Run) -> None:
    code, _, err = run("generate", "-", stdin=b"ab\xff")
    assert code == 2
    assert "stdin is not valid UTF-8: byte 0xff at position 2" in err


def test_json_is_one_object_of_the_promised_shape(run: Run) -> None:
    flags = ["-n", "3", "--max-tokens", "5", "--seed", "2", "--json", "--prompt", "hello", "--block-size", "4"]
    code, out, _ = run("generate", *flags, model=tiny_llama_folder())
    assert code == 0
    assert len(out.splitlines()) == 1
    answer = json.loads(out)
    assert list(answer) == [
        "model",
        "seed",
        "prompt_tokens",
        "cached_tokens",
        "computed_prompt_tokens",
        "samples",
        "timing",
        "memory",
    ]
    assert answer["seed"] == 2
    assert [sample["index"] for sample in answer["samples"]] == [0, 1, 2]
    for sample in answer["samples"]:
        assert list(sample) == ["index", "text", "token_ids", "finish_reason", "num_tokens", "sum_logprob"]
        assert len(sample["token_ids"]) == sample["num_tokens"] <= 5
        assert sample["finish_reason"] in ("stop", "length")
        assert sample["sum_logprob"] < 0
    assert list(answer["timing"]) == ["ttft_ms", "decode_tok_s", "wall_ms"]
    memory = answer["memory"]
    assert list(memory) == ["block_size", "bytes_per_block", "blocks_used", "blocks_shared", "rows_held", "rows_wasted"]
    # A row of the tiny model: 2 layers x (key + value) x 2 heads x 16 x 4 bytes.
    assert memory["bytes_per_block"] == 4 * 2 * 2 * 2 * 16 * 4
    assert memory["blocks_used"] * 4 == memory["rows_held"] + memory["rows_wasted"]
    prompt, generated = answer["prompt_tokens"], sum(sample["num_tokens"] - 1 for sample in answer["samples"])
    assert prompt < memory["rows_held"] <= prompt + generated + 2 * (prompt % 4)
    assert memory["blocks_shared"] >= prompt // 4
    assert (answer["cached_tokens"], answer["computed_prompt_tokens"]) == (0, prompt)


def test_the_seed_that_was_drawn_makes_the_same_answer_again(run: Run) -> None:
    flags = ["--prompt", "hello", "--max-tokens", "8", "--json"]
    drawn = json.loads(run("generate", *flags, model=tiny_llama_folder()).out)
    again = json.loads(run("generate", *flags, "--seed", str(drawn["seed"]), model=tiny_llama_folder()).out)
    assert again["samples"] == drawn["samples"]


def test_json_has_logprobs_only_when_asked(run: Run) -> None:
    flags = ["--max-tokens", "3", "--json", "--prompt", "hello", "--logprobs", "2"]
    (sample,) = json.loads(run("generate", *flags, model=tiny_llama_folder()).out)["samples"]
    assert len(sample["logprobs"]) == sample["num_tokens"]
    for token, token_id in zip(sample["logprobs"], sample["token_ids"], strict=True):
        assert token["token_id"] == token_id
        assert len(token["alternatives"]) == 2
    assert sum(token["logprob"] for token in sample["logprobs"]) == pytest.approx(sample["sum_logprob"])


def test_samples_are_printed_one_after_the_other_with_headers(run: Run) -> None:
    flags = ["--prompt", "hello", "-n", "3", "--max-tokens", "4", "--seed", "5"]
    out = run("generate", *flags, model=tiny_llama_folder()).out
    samples = json.loads(run("generate", *flags, "--json", model=tiny_llama_folder()).out)["samples"]
    expected = "\n\n".join(f"--- sample {i + 1} of 3 ---\n{sample['text']}" for i, sample in enumerate(samples))
    assert out == expected + "\n"


def test_logprobs_are_printed_behind_the_text(run: Run) -> None:
    out = run("generate", "--prompt", "x", "--max-tokens", "2", "--logprobs", "1", model=tiny_llama_folder()).out
    assert len(out.partition("logprobs of sample 1:\n")[2].splitlines()) in (1, 2)


def test_a_raw_prompt_skips_the_chat_template(run: Run) -> None:
    flags = ["--prompt", "hello", "--max-tokens", "2", "--json"]
    raw = json.loads(run("generate", *flags, "--raw", model=tiny_llama_folder()).out)
    templated = json.loads(run("generate", *flags, model=tiny_llama_folder()).out)
    assert raw["prompt_tokens"] == len("hello")
    assert templated["prompt_tokens"] > len("hello")


def test_a_stop_string_is_not_printed(run: Run) -> None:
    flags = ["--prompt", "hello", "--max-tokens", "12", "--seed", "1"]
    text = json.loads(run("generate", *flags, "--json", model=tiny_llama_folder()).out)["samples"][0]["text"]
    stop = text[4]
    assert run("generate", *flags, "--stop", stop, model=tiny_llama_folder()).out == text[: text.index(stop)] + "\n"


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(run: Run, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "short", max_position_embeddings=64)
    code, _, err = run("generate", "--raw", "--prompt", "x" * 64, model=model)
    assert code == 2
    assert "The prompt has 64 tokens; at most 63 leave room" in err


def test_flags_win_over_variables_and_variables_over_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.toml").write_text("max_num_seqs = 3\nmax_batched_tokens = 77\nblock_size = 2\n", encoding="utf-8")
    monkeypatch.setenv("CHATPAGE_MAX_BATCHED_TOKENS", "66")
    monkeypatch.setenv("CHATPAGE_MAX_NUM_SEQS", "5")
    code, out, _ = run("doctor", "--config", str(tmp_path / "my.toml"), "--max-num-seqs", "7", model=tiny_llama_folder())
    assert code == 0
    assert "at most 66 tokens of 7 sequences" in out
    assert "blocks of 2 tokens" in out


# -- the others ------------------------------------------------------------------------------------------------------


def test_doctor_says_what_is_here_and_what_will_be_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run("doctor", model=tiny_llama_folder())
    assert code == 0
    for part in (
        "python",
        "torch",
        "CPU features",
        "C++ compiler",
        "memory",
        str(tiny_llama_folder()),
        "float32",
        "KV cache",
        "attention",
    ):
        assert part in out
    blocks = 2 * 2**20 // (16 * 2 * 2 * 2 * 16 * 4)
    assert f"{blocks:,} blocks of 16 tokens: {blocks * 16:,} tokens, 2.0 MiB" in out


def test_doctor_describes_the_machine_even_if_the_model_is_missing(run: Run) -> None:
    code, out, err = run("doctor", "--model", "/no/such/model")
    assert code == 2
    assert "CPU features" in out
    assert "/no/such/model" in err


def test_bench_measures_one_workload_and_writes_it_down(run: Run, tmp_path: Path) -> None:
    flags = ["--workloads", "W1", "--quick", "--repeat", "2", "--json", str(tmp_path / "bench.json")]
    code, out, _ = run("bench", *flags, model=tiny_llama_folder())
    assert code == 0
    assert "W1 decode, one stream" in out
    times = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["times"]
    speeds = [times["W1"][engine]["numbers"]["decode tok/s"]["values"] for engine in ("chatpage", "transformers")]
    assert [len(values) for values in speeds] == [2, 2]


def test_chat_reads_piped_lines(run: Run) -> None:
    code, out, _ = run("chat", "--max-tokens", "4", "--system", "be kind", stdin=b"hello\n/tree\n", model=tiny_llama_folder())
    assert code == 0
    assert "#1 system be kind" in out
    assert "#3 assistant" in out


@pytest.mark.timeout(240)
def test_ctrl_c_while_loading_ends_without_a_traceback() -> None:
    with PseudoTerminal(["-m", "chatpage", "chat", "--model", str(tiny_llama_folder())]) as terminal:
        terminal.expect("loading")
        terminal.send(CTRL_C)
        assert terminal.wait() == cli.EXIT_INTERRUPTED
        assert "Traceback" not in terminal.screen


@pytest.mark.timeout(240)
def test_ctrl_c_stops_a_generation_and_prints_what_there_is() -> None:
    flags = ["--prompt", "hello", "--max-tokens", "1900", "--temperature", "0", "--seed", "1"]
    model = [
        "--model",
        str(tiny_llama_folder()),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-memory",
        "8MiB",
        "--threads",
        "1",
    ]
    with PseudoTerminal(["-m", "chatpage", "generate", *flags, *model]) as terminal:
        start = terminal.expect("\x1b[?25h")  # the cursor comes back when the status line goes
        terminal.expect_more(30, after=start)
        terminal.send(CTRL_C)
        assert terminal.wait() == cli.EXIT_INTERRUPTED
        assert "stopped · seed 1" in terminal.screen
        assert "Traceback" not in terminal.screen
