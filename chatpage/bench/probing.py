"""Can one user tell by the time to the first token what another has asked? `python -m chatpage.bench.probing`.

Ann computes prompts. Bob then asks for some of them, and for as many that nobody asked for, in random order: while they lie in
memory, and after a restart, when they lie on disk. Held: Bob is never given a cached token. Measured: the two medians of the
time to the first token, and how far apart they would be by chance. What Ann waits for her own prompts shows what a hit is.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from chatpage.bench.serving import serving
from chatpage.store import Store, database_path

TIMEOUT_S = 600.0
_TOKENS = range(10, 200)  # ids that any vocabulary has
MAX_TIMES = (len(_TOKENS) - 2) // 4
_MAD_TO_SIGMA, _MEDIAN_TO_MEAN = 1.4826, 1.2533  # of a normal distribution
Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a user sees of a request: seconds to the first token, and how many tokens were cached."""

    ttft_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What Bob could learn in one place, and what Ann herself waits for her own prompts."""

    place: str
    others: list[Answer]  # prompts that Ann has asked for
    nobodys: list[Answer]
    own: list[Answer]

    @property
    def ratio(self) -> float:
        """Median time to the first token of what another has cached, in parts of that of what nobody has."""
        return _median(self.others) / _median(self.nobodys)

    @property
    def noise(self) -> float:
        """How far from 1 the ratio may lie by chance: two standard errors of the difference of two medians."""
        errors = [_standard_error(answers) / _median(self.nobodys) for answers in (self.others, self.nobodys)]
        return 2 * math.hypot(*errors)

    @property
    def num_leaked_tokens(self) -> int:
        return sum(answer.cached_tokens for answer in (*self.others, *self.nobodys))

    def line(self) -> str:
        """Return the finding as a line of the report."""
        times = " ".join(f"{1e3 * _median(answers):8.1f}" for answers in (self.nobodys, self.others, self.own))
        verdict = "within noise" if abs(self.ratio - 1) <= self.noise else "beyond noise"
        return f"{self.place:16} {times}   {self.ratio:5.3f} ± {self.noise:.3f} {verdict}   {self.num_leaked_tokens} tokens"


HEAD = f"{'ms, medians':16} {'nobody':>8} {'another':>8} {'own':>8}   ratio"


def probe(data: Path, arguments: Sequence[str], *, times: int, num_tokens: int, chance: random.Random) -> list[Finding]:
    """Let Ann ask and Bob probe on a server of their own, before and after a restart.

    Args:
        data: Folder of its database.
        arguments: For `chatpage serve`.
        times: Probes of each kind in each place.
        num_tokens: Of a prompt.
        chance: Makes prompts and their order.
    """
    with Store(database_path(data)) as store:
        ann, bob = (store.create_api_key(store.create_user(name).id, "probing")[1] for name in ("ann", "bob"))
    # No two begin alike: what one has in common with another of Bob's own would be found, to the token.
    beginnings = chance.sample(_TOKENS, 4 * times + 2)
    prompts = [[first, *(chance.choice(_TOKENS) for _ in range(num_tokens - 1))] for first in beginnings]
    warmups, cached, unknown = prompts[:2], prompts[2 : 2 * times + 2], prompts[2 * times + 2 :]
    findings: list[Finding] = []
    for place, part in (("in memory", slice(0, times)), ("after a restart", slice(times, 2 * times))):
        with serving(data, [*arguments, "--require-login"]) as server:
            if not findings:
                for prompt in cached:
                    ask(server.url, ann, prompt)
            ask(server.url, bob, warmups[len(findings)])  # what is made once is made now
            findings.append(_probe(place, server.url, (ann, bob), (cached[part], unknown[part]), chance))
    return findings


def _probe(
    place: str, url: str, keys: tuple[str, str], prompts: tuple[list[Prompt], list[Prompt]], chance: random.Random
) -> Finding:
    ann, bob = keys
    order = [(kind, prompt) for kind, some in enumerate(prompts) for prompt in some]
    chance.shuffle(order)
    answers: tuple[list[Answer], list[Answer]] = ([], [])
    for kind, prompt in order:
        answers[kind].append(ask(url, bob, prompt))
    return Finding(place, *answers, own=[ask(url, ann, prompt) for prompt in prompts[0]])


def ask(url: str, key: str, prompt: Prompt) -> Answer:
    """Ask for one token after a prompt."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began, ttft, cached = time.perf_counter(), None, None
        with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                ttft = time.perf_counter() - began if ttft is None else ttft
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    if ttft is None or cached is None:
        raise RuntimeError("the answer ended before its usage")
    return Answer(ttft, cached)


def _median(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.ttft_s for answer in answers)


def _standard_error(answers: Sequence[Answer]) -> float:
    middle = _median(answers)
    spread = statistics.median(abs(answer.ttft_s - middle) for answer in answers)
    return _MEDIAN_TO_MEAN * _MAD_TO_SIGMA * spread / math.sqrt(len(answers))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 1 if a token leaked. What is given after `--` goes to `chatpage serve`."""
    parser = argparse.ArgumentParser(prog="python -m chatpage.bench.probing", description="Two users probe each other.")
    parser.add_argument("--times", type=int, default=20, help="probes of each kind (default: 20)")
    parser.add_argument("--tokens", type=int, default=400, help="of a prompt (default: 400)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and order")
    parser.add_argument("serve", nargs="*", help="arguments for `chatpage serve`, such as -- --model FOLDER")
    given = parser.parse_args(arguments)
    if not 1 <= given.times <= MAX_TIMES:
        parser.error(f"--times must be from 1 to {MAX_TIMES}")
    with tempfile.TemporaryDirectory() as data:
        chance = random.Random(given.seed)
        findings = probe(Path(data), given.serve, times=given.times, num_tokens=given.tokens, chance=chance)
    print(HEAD)
    for finding in findings:
        print(finding.line())
    return int(any(finding.num_leaked_tokens for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
