"""One request followed to its end."""

import os
import signal

import pytest

from chatpage.chat_template import PLAIN_STOP
from chatpage.engine.core import Engine
from chatpage.errors import ContextLengthError
from chatpage.events import Event, FinishReason, RequestFailed, RequestId, TokenDelta
from chatpage.sampling_params import SamplingParams
from chatpage.terminal.reply import Reply, Sample, for_chat, holding, run_request
from tests.engine.engines import assert_whole, tiny_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def _params(n: int = 2, max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, seed=0, ignore_eos=True)


def test_a_reply_has_the_text_the_ids_and_the_cost_of_every_sample(engine: Engine) -> None:
    events: list[Event] = []
    reply = run_request(engine, [5, 6, 7], _params(), lambda event, _: events.append(event))
    assert [sample.finish_reason for sample in reply.samples] == ["length", "length"]
    for sample in reply.samples:
        assert sample.finished is not None
        assert (sample.text, tuple(sample.token_ids)) == (sample.finished.text, sample.finished.token_ids)
    assert reply.num_tokens == 16
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    assert reply.ttft_s is not None
    assert 0 < reply.ttft_s < reply.wall_s
    assert reply.decode_tok_s == pytest.approx(14 / (reply.wall_s - reply.ttft_s))
    assert sum(isinstance(event, TokenDelta) for event in events) >= 16
    assert_whole(engine)


def test_ctrl_c_stops_every_sample_and_keeps_what_they_said(engine: Engine) -> None:
    def interrupt(event: Event, reply: Reply) -> None:
        if reply.num_tokens == 6 and isinstance(event, TokenDelta):
            os.kill(os.getpid(), signal.SIGINT)

    reply = run_request(engine, [5, 6, 7], _params(max_tokens=1000), interrupt)
    assert reply.was_interrupted
    assert [sample.finish_reason for sample in reply.samples] == [FinishReason.ABORT] * 2
    assert 6 <= reply.num_tokens <= 8
    assert "stopped" in reply.summary()
    assert_whole(engine)


def test_a_prompt_that_the_engine_refuses_raises(engine: Engine) -> None:
    with pytest.raises(ContextLengthError):
        run_request(engine, [5] * 100_000, _params(), lambda event, reply: None)


def test_numbers_that_do_not_exist_are_left_out() -> None:
    """A reply of no token has no rate; a division by its zero seconds would print infinity."""
    reply = Reply([Sample(0)])
    assert reply.ttft_s is None
    assert reply.decode_tok_s is None
    assert reply.summary() == "0 tokens"
    reply.take(RequestFailed(RequestId("r"), "engine_step_failed", "no"))
    assert reply.samples[0].finish_reason == "error"


def test_holding_counts_what_sequences_share_once_and_lets_go(engine: Engine) -> None:
    engine.clear_cache()
    prompt = list(range(10, 30))
    reply = run_request(engine, prompt, _params(n=3), lambda event, reply: None)
    with holding(engine, [[*prompt, *sample.token_ids] for sample in reply.samples]):
        memory = engine.memory()
        assert memory.rows_without_sharing == 3 * (20 + 7)
        assert 20 + 7 < memory.rows_held <= 20 + 3 * 7
    with holding(engine, [[], [200, 201]]):
        assert engine.memory().blocks_used == 0
    assert_whole(engine)


def test_a_model_without_a_chat_template_is_stopped_where_the_user_would_speak(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing taught such a model to end its turn: it would go on and write the user's next message, too."""
    params = SamplingParams(stop=("x", *PLAIN_STOP))
    assert for_chat(engine, params) is params
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert for_chat(engine, SamplingParams(stop=("x",))).stop == ("x", *PLAIN_STOP)
    assert for_chat(engine, params).stop == params.stop
