"""Far more clients than the server can serve, for minutes: `python -m chatpage.chaos --overload`.

    alone      one question at a time: the time to the first token
    calm       as many streams as may run at once: what each of them gets, and how many replies a second there are
    crowded    ten times as many questions as that, on hundreds of sockets; most are told to wait
    afterwards everybody goes home: what is still held, and how long until one question is answered as fast as at first

Invariant: what the crowd got is compared with what the same server gave in the same run without it.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatpage.chaos.crowd import Account, Client, Crowd, rates
from chatpage.chaos.findings import Finding, Findings, Violation
from chatpage.chaos.invariants import SERVER, check_rest
from chatpage.chaos.victim import Victim
from chatpage.chaos.wire import Wire
from chatpage.client import AsyncClient
from chatpage.server.connections import raise_descriptor_limit
from chatpage.session import SessionLimits
from chatpage.store import NewNode, Role, Store, database_path

TIMES = 10.0  # the questions that can be answered
ALONE_ASKS = 7
NORMAL_S = 5.0  # within which all is as it was
DEAF_WORDS = 60_000  # of the conversation that is asked for and not read
NUM_DEAF = 4
PATIENCE_S = 300.0  # with replies that are waited for; then the server is gone, or as good as that
MAX_TOLD = 10  # times in a row to a client that waits as it is told
BY_THE_CLOCK = frozenset({"slow", "latency", "starved", "too little"})  # findings that a busy machine explains, too
# How much memory may grow, the KV cache apart: from calm to the most, and from the first quarter of the crowd to the last.
MORE_BYTES, MORE_LATER_BYTES = 256 * 2**20, 48 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an overload is to be.

    Args:
        seconds: How long the crowd stays.
        calm_s: How long the streams before it are measured.
        num_sockets: Of the crowd.
        num_polite: How many of those wait as they are told; as many more do so over HTTP, by a quarter of them.
        num_users: How many share the sockets of those who do not.
        num_streams: Runs that the server lets compute at once.
        num_queued: Runs that it lets wait.
        max_tokens: Of each reply.
        arguments: More, for `chatpage serve`.
    """

    seconds: float = 300.0
    calm_s: float = 20.0
    num_sockets: int = 500
    num_polite: int = 20
    num_users: int = 25
    num_streams: int = SessionLimits().server_running_runs
    num_queued: int = SessionLimits().server_queued_runs
    max_tokens: int = 64
    arguments: Sequence[str] = ()


@dataclass(slots=True)
class OverloadReport:
    """What was measured."""

    plan: Plan
    calm: Account = field(default_factory=Account)
    crowd: Account = field(default_factory=Account)
    calm_s: float = 0.0
    crowd_s: float = 0.0
    ttft_before: list[float] = field(default_factory=list)
    ttft_after: list[float] = field(default_factory=list)
    normal_after_s: float | None = None
    memory: dict[str, list[int]] = field(default_factory=lambda: {"server": [], "engine": []})
    calm_memory: dict[str, int] = field(default_factory=dict)
    most_files: int = 0
    violations: Sequence[Violation] = ()

    @property
    def served_per_s(self) -> tuple[float, float]:
        """Replies per second, calm and crowded."""
        return len(self.calm.streams) / self.calm_s, len(self.crowd.streams) / max(self.crowd_s, 1e-9)

    @property
    def times(self) -> float:
        """How many questions came for each that could be answered."""
        return self.crowd.num_asked / self.crowd_s / self.served_per_s[0]

    def speeds(self, share: float) -> tuple[float, float]:
        """Tokens per second of a stream, calm and crowded; `share` of the streams are slower."""
        calm, crowded = (at(rates(account.streams), share) for account in (self.calm, self.crowd))
        return calm, crowded

    def to_dict(self) -> dict[str, Any]:
        calm, crowded = self.served_per_s
        return {
            "sockets": self.plan.num_sockets,
            "seconds": round(self.crowd_s, 1),
            "served_per_s": {"calm": calm, "crowded": crowded},
            "asked_times": self.times,
            "tok_s_per_stream": {f"p{share * 100:g}": self.speeds(share) for share in (0.05, 0.1, 0.5)},
            "asked": self.crowd.num_asked,
            "served": len(self.crowd.streams),
            "refused": len(self.crowd.told_s),
            "left": self.crowd.num_left,
            "told_s": {"median": at(sorted(self.crowd.told_s), 0.5), "most": max(self.crowd.told_s, default=0.0)},
            "polite": {"served": len(self.crowd.tellings), "tellings": sorted(self.crowd.tellings)},
            "pings": {
                "sent": self.crowd.num_pings,
                "answered": len(self.crowd.pongs_s),
                "most_s": max(self.crowd.pongs_s, default=0.0),
            },
            "ttft_s": {"before": self.ttft_before, "after": self.ttft_after, "normal_after_s": self.normal_after_s},
            "memory": {name: {"calm": self.calm_memory[name], "series": sizes} for name, sizes in self.memory.items()},
            "most_files": self.most_files,
            "violations": [violation.to_dict() for violation in self.violations],
        }

    def render(self) -> str:
        """Return it as lines of text."""
        plan, crowd = self.plan, self.crowd
        calm, crowded = self.served_per_s
        lines = [
            f"{plan.num_sockets} sockets for {self.crowd_s:.0f} s, {self.times:.1f} times what can be served",
            "",
            f"  served      {calm:.2f} replies/s by {plan.num_streams} streams alone, {crowded:.2f} in the crowd",
            f"  asked       {crowd.num_asked:,}: {len(crowd.streams):,} served, {len(crowd.told_s):,} told to wait, "
            f"{crowd.num_left:,} left",
        ]
        for name, share in (("median", 0.5), ("slowest tenth", 0.1), ("slowest 20th", 0.05)):
            alone, among = self.speeds(share)
            lines.append(f"  a stream    {name:<14} {alone:6.2f} tok/s alone, {among:6.2f} in the crowd: {among / alone:.2f}")
        told, tellings, pongs = sorted(crowd.told_s), sorted(crowd.tellings), sorted(crowd.pongs_s)
        lines += [
            f"  told        to wait {at(told, 0.5):.1f} s (median), {at(told, 1):.1f} s at most",
            f"  who waited  as told was served {len(tellings):,} times, after {at(tellings, 0.5):g} tellings (median), "
            f"{crowd.most_told} at most",
            f"  pings       {crowd.num_pings:,} sent, {len(pongs):,} answered: {at(pongs, 0.5) * 1e3:.0f} ms (median), "
            f"{at(pongs, 0.99) * 1e3:.0f} ms (99 %), {at(pongs, 1) * 1e3:.0f} ms at most",
        ]
        for name, sizes in self.memory.items():
            first, last = quarters(sizes)
            numbers = [size / 2**20 for size in (self.calm_memory[name], first, last, max(sizes, default=0))]
            what = "engine without KV" if name == "engine" else name
            text = "  memory      {}: {:.0f} MiB calm, {:.0f} first quarter, {:.0f} last, {:.0f} most"
            lines.append(text.format(what, *numbers))
        back = "never" if self.normal_after_s is None else f"{self.normal_after_s:.1f} s after the crowd had gone"
        before, after = (statistics.median(times or [math.nan]) * 1e3 for times in (self.ttft_before, self.ttft_after))
        lines += [
            f"  files       {self.most_files} open in the server at most",
            f"  first token {before:.0f} ms before, {after:.0f} ms after; as before {back}",
        ]
        lines += [f"VIOLATION {violation.finding}" for violation in self.violations]
        return "\n".join([*lines, "", f"{len(self.violations)} violations"])


async def run(data: Path, plan: Plan) -> OverloadReport:
    """Run an overload to its end; `data` is the folder for the server."""
    raise_descriptor_limit()
    keys, chats = make_clients(data, plan)
    limits = ["--server-running-runs", str(plan.num_streams), "--server-queued-runs", str(plan.num_queued)]
    async with Wire() as wire:
        victim = Victim(data, [*plan.arguments, *limits, "--require-login"], wire, keys[0])
        await victim.start()
        overload = Overload(plan, victim, keys, chats)
        try:
            return await overload.run()
        finally:
            await victim.close()


def make_clients(data: Path, plan: Plan) -> tuple[list[str], list[str]]:
    """Make users with a key and conversation for each socket; the first are polite, and each a user of its own.

    Returns:
        The keys and the conversations, both for each socket; the last of them are for the deaf, with a long conversation.
    """
    keys, chats = [], []
    with Store(database_path(data)) as store:
        num_own = plan.num_polite + -(-plan.num_polite // 4)
        users = [store.create_user(f"user{i}") for i in range(num_own + max(plan.num_users, -(-plan.num_streams // 8)))]
        user_keys = [store.create_api_key(user.id, "overload")[1] for user in users]
        for i in range(plan.num_sockets + num_own + NUM_DEAF):
            number = i if i < num_own else num_own + i % (len(users) - num_own)
            keys.append(user_keys[number])
            chat = store.create_conversation(users[number].id, title="overload")
            chats.append(chat.id)
            if i >= plan.num_sockets + num_own:
                store.add_node(users[number].id, chat.id, None, NewNode(role=Role.USER, text="word " * DEAF_WORDS))
    return keys, [str(chat) for chat in chats]


class Overload:
    """One overload of one server."""

    def __init__(self, plan: Plan, victim: Victim, keys: Sequence[str], chats: Sequence[str]) -> None:
        self._plan = plan
        self._victim = victim
        self._keys = keys
        self._chats = chats
        self._report = OverloadReport(plan)
        self._findings = Findings()
        self._model = ""
        self._bytes_per_block = 0

    async def run(self) -> OverloadReport:
        """Run it and return the report."""
        report = self._report
        self._model = (await AsyncClient(self._victim.server.url, key=self._keys[0]).welcome()).model.name
        self._bytes_per_block = (await AsyncClient(self._victim.server.url, key=self._keys[0]).kv()).stats.bytes_per_block
        pids = self._pids()
        await self._alone(2)  # what is slow the first time
        report.ttft_before = await self._alone(ALONE_ASKS)
        await self._calm()
        report.calm_memory = await self._memory()
        await self._crowded()
        report.ttft_after, report.normal_after_s = await self._afterwards()
        if self._pids() != pids:
            self._find("crash", f"the processes were {pids}, and are {self._pids()}")
        await self._victim.close()
        self._findings.add(*(Finding("traceback", SERVER, trace) for trace in self._victim.errors))
        self._findings.add(*judge(report))
        report.violations = self._findings.violations
        return report

    def _pids(self) -> Mapping[str, int | None]:
        return {"server": self._victim.server.process.pid, "engine": self._victim.engine_pid}

    async def _memory(self) -> dict[str, int]:
        """Return what the processes hold, without the blocks of the KV cache, whose number is a setting."""
        numbers = await self._victim.numbers()
        num_blocks = numbers["chatpage_blocks:used"] + numbers["chatpage_blocks:cached"]
        taken = self._victim.look()
        if len(taken) < 2:
            raise OSError(f"of the processes there are only {list(taken)}")
        self._report.most_files = max(self._report.most_files, taken["server"].num_files)
        kv_bytes = int(num_blocks) * self._bytes_per_block
        return {"server": taken["server"].memory_bytes, "engine": taken["engine"].memory_bytes - kv_bytes}

    def _client(self, number: int) -> Client:
        url, key, chat = self._victim.server.url, self._keys[number], self._chats[number]
        return Client(url, key, chat, self._plan.max_tokens, self._model)

    async def _alone(self, times: int) -> list[float]:
        account = Account()
        crowd = Crowd(account)
        crowd.add(crowd.polite(self._client(0), pause_s=0.1))
        deadline = time.monotonic() + PATIENCE_S
        while len(account.streams) < times and not account.problems and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if len(account.streams) < times and not account.problems:
            account.problems[f"{times} questions, one after the other, were not answered within {PATIENCE_S:g} s"] += 1
        await crowd.go_home()
        self._note(account)
        return [stream.ttft_s for stream in account.streams[:times]] or [math.inf]

    async def _calm(self) -> None:
        """As many streams as may run, and one more question each as soon as one has ended."""
        report, plan = self._report, self._plan
        crowd = Crowd(report.calm)
        first = len(self._keys) - NUM_DEAF - plan.num_streams
        for number in range(plan.num_streams):
            crowd.add(crowd.polite(self._client(first + number)))
        began = time.monotonic()
        num_wanted = 2 * plan.num_streams
        while time.monotonic() - began < plan.calm_s or len(report.calm.streams) < num_wanted:
            await asyncio.sleep(0.1)
            if time.monotonic() - began > plan.calm_s + PATIENCE_S:
                await crowd.go_home()
                problems = "; ".join(report.calm.problems) or "they are too slow"
                raise TimeoutError(f"{num_wanted} calm replies were not there within {PATIENCE_S:g} s: {problems}")
        report.calm_s = time.monotonic() - began
        num_streams = len(report.calm.streams)
        await crowd.go_home()
        del report.calm.streams[num_streams:]
        self._note(report.calm)

    async def _crowded(self) -> None:
        report, plan = self._report, self._plan
        crowd = Crowd(report.crowd)
        num_http = -(-plan.num_polite // 4)
        num_rude = plan.num_sockets - plan.num_polite
        # Those that are served or wait ask nothing else meanwhile, so that the others must ask more often.
        num_asking = max(num_rude - plan.num_streams - plan.num_queued, num_rude // 4)
        interval_s = num_asking / (TIMES * report.served_per_s[0])
        for number in range(plan.num_polite):
            crowd.add(crowd.polite(self._client(number)))
        for number in range(num_http):
            crowd.add(crowd.polite_http(self._client(plan.num_polite + number)))
        for number in range(num_rude):
            client = self._client(plan.num_polite + num_http + number)
            behave = crowd.rude_http if number % 50 == 49 else crowd.rude
            crowd.add(behave(client, interval_s, interval_s * number / num_rude))
        for number in range(NUM_DEAF):
            crowd.add(crowd.deaf(self._client(len(self._keys) - 1 - number)))
        began = time.monotonic()
        try:
            while time.monotonic() - began < plan.seconds:
                await asyncio.sleep(min(1.0, plan.seconds / 20))
                try:
                    for name, size in (await self._memory()).items():
                        report.memory[name].append(size)
                except OSError as error:
                    self._find("problem", str(error))
        finally:
            report.crowd_s = time.monotonic() - began
            await crowd.go_home()
        self._note(report.crowd)

    async def _afterwards(self) -> tuple[list[float], float | None]:
        """Ask one question at a time until the first token comes as fast as at first, and look what is held then."""
        began = time.monotonic()
        normal_after_s, times = None, []
        limit_s = normal_s(self._report.ttft_before)
        while time.monotonic() - began < 4 * NORMAL_S and normal_after_s is None:
            [ttft] = await self._alone(1)
            if ttft <= limit_s:
                normal_after_s = time.monotonic() - began
        times = await self._alone(ALONE_ASKS)
        deadline = time.monotonic() + NORMAL_S
        while found := list(check_rest(await self._victim.numbers())):
            if time.monotonic() > deadline:
                self._findings.add(*found)
                break
            await asyncio.sleep(0.1)
        return times, normal_after_s

    def _note(self, account: Account) -> None:
        for problem, number in account.problems.items():
            self._find("problem", f"{number} times: {problem}")

    def _find(self, kind: str, text: str) -> None:
        self._findings.add(Finding(kind, SERVER, text))


def judge(report: OverloadReport) -> Iterator[Finding]:
    """Yield what is wrong with what was measured."""
    crowd = report.crowd
    if report.times < TIMES / 2:
        yield Finding("too little", SERVER, f"only {report.times:.1f} times as much was asked as can be served")
    if not crowd.told_s:
        yield Finding("too little", SERVER, "nobody was told to wait")
    for name, share in (("median", 0.5), ("slowest tenth", 0.1)):
        alone, among = report.speeds(share)
        if among < alone / 2:
            yield Finding("slow", SERVER, f"the {name} stream has {among:.2f} tok/s in the crowd, {alone:.2f} alone")
    if crowd.most_told > MAX_TOLD or not crowd.tellings:
        text = f"a client that waits as it is told was told so {crowd.most_told} times, {len(crowd.tellings)} were served"
        yield Finding("starved", SERVER, text)
    if crowd.num_pings > len(crowd.pongs_s) + report.plan.num_sockets:  # the last of each socket may be on its way
        yield Finding("ping", SERVER, f"{crowd.num_pings} pings, {len(crowd.pongs_s)} answers")
    for name, sizes in report.memory.items():
        first, last = quarters(sizes)
        if max(sizes, default=0) > report.calm_memory[name] + MORE_BYTES or last > first + MORE_LATER_BYTES:
            text = f"{name}: {report.calm_memory[name]:,} bytes calm, then {first:,.0f} to {last:,.0f}, at most {max(sizes):,}"
            yield Finding("memory", SERVER, text)
    if report.normal_after_s is None or report.normal_after_s > NORMAL_S:
        text = f"a question alone has its first token as fast as before after {report.normal_after_s} s"
        yield Finding("latency", SERVER, text)


def normal_s(times: Sequence[float]) -> float:
    """Return the time to the first token that is like those before: twice their median, or a blink more."""
    median = statistics.median(times)
    return max(2 * median, median + 0.05)


def at(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of the others are below; NaN if there are none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan


def quarters(sizes: Sequence[int]) -> tuple[float, float]:
    """Return the medians of the first and the last quarter."""
    length = max(1, len(sizes) // 4)
    return (statistics.median(sizes[:length]), statistics.median(sizes[-length:])) if sizes else (0.0, 0.0)
