"""Steps that go wrong for real: a model that gives no numbers, and a machine that has no memory left for a step."""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatpage.engine.core import Engine
from chatpage.events import FinishReason, RequestFailed, RequestFinished, SampleFinished
from tests.engine.engines import assert_whole, generate, greedy, run_all, tiny_engine
from tests.tiny_models import save_tiny_llama

BROKEN = 77  # the token whose weights are damaged
PROMPT = [token for token in range(5, 46) if token != BROKEN]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose weights for one token are infinite: whoever reads that token computes NaN from there on."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("damaged"), tie_word_embeddings=False)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][BROKEN] = torch.inf
    save_file(weights, file, {"format": "pt"})
    return tiny_engine(model=str(folder))


def test_a_prompt_that_overflows_fails_by_name_beside_others_that_go_on(damaged: Engine) -> None:
    alone = generate(damaged, PROMPT, greedy(max_tokens=9, logit_bias={BROKEN: -100.0}))
    damaged.clear_cache()
    good = damaged.add_request(PROMPT, greedy(max_tokens=9, logit_bias={BROKEN: -100.0}))
    bad = damaged.add_request([*PROMPT[::-1], BROKEN, 9], greedy(n=3, max_tokens=9))
    events = run_all(damaged)
    [failed] = [event for event in events if isinstance(event, RequestFailed)]
    assert (failed.request_id, failed.code) == (bad, "invalid_logits")
    assert f"token 1 of the answer (position {len(PROMPT) + 2})" in failed.message
    assert "not numbers" in failed.message
    assert [e.token_ids for e in events if isinstance(e, SampleFinished) and e.request_id == good] == alone
    assert_whole(damaged)


def test_only_the_sample_that_overflowed_fails_and_its_siblings_are_whole(damaged: Engine) -> None:
    """One bad sample used to take the other seven with it, though each of them was fine."""
    params = greedy(n=8, max_tokens=40, temperature=1.0, seed=3, logit_bias={BROKEN: 1.0})
    request_id = damaged.add_request(PROMPT, params)
    events = run_all(damaged)
    ends = {event.sample: event for event in events if isinstance(event, SampleFinished)}
    hit = {sample for sample, event in ends.items() if BROKEN in event.token_ids[:39]}
    assert 0 < len(hit) < 8, "the seed shows nothing"
    for sample, event in ends.items():
        if sample in hit:
            assert event.finish_reason is FinishReason.ERROR
            assert event.token_ids[-1] == BROKEN
            assert f"token {len(event.token_ids) + 1} of the answer" in event.detail
        else:
            assert (event.finish_reason, len(event.token_ids)) == (FinishReason.LENGTH, 40)
    assert isinstance(events[-1], RequestFinished)
    assert events[-1].request_id == request_id
    assert_whole(damaged)


def test_keys_and_values_that_are_no_numbers_are_never_found_by_another_request(damaged: Engine) -> None:
    """A cached prefix with NaN in it would fail every later answer of that conversation, for no fault of theirs."""
    prompt = [*PROMPT, BROKEN]
    damaged.add_request(prompt, greedy(max_tokens=2))
    assert any(isinstance(event, RequestFailed) for event in run_all(damaged))
    assert damaged.prefix_cost(prompt).cached_tokens == 0
    assert damaged.prefix_blocks(PROMPT).num_tokens == 0
    assert len(generate(damaged, PROMPT, greedy(max_tokens=3, logit_bias={BROKEN: -100.0}))[0]) == 3


def test_parameters_that_rule_out_every_token_are_not_blamed_on_the_model(damaged: Engine) -> None:
    everything = tuple(range(damaged.info().vocab_size))
    damaged.add_request(PROMPT, greedy(max_tokens=5, min_tokens=3, stop_token_ids=everything))
    [failed] = [event for event in run_all(damaged) if isinstance(event, RequestFailed)]
    assert failed.code == "invalid_logits"
    assert "rule out every one" in failed.message


def test_parameters_that_rule_out_every_token_cost_nobody_the_prefix(damaged: Engine) -> None:
    """One request with an odd list of stop tokens made its user's every conversation be computed anew."""
    damaged.clear_cache()
    other = [*PROMPT[::-1], 3, 4]
    generate(damaged, other, greedy(max_tokens=3, logit_bias={BROKEN: -100.0}))
    cached = damaged.prefix_cost(other).cached_tokens
    assert cached >= len(other) - 1
    everything = tuple(range(damaged.info().vocab_size))
    for n in (1, 3):
        damaged.add_request(PROMPT, greedy(n=n, max_tokens=5, min_tokens=3, stop_token_ids=everything))
        assert any(isinstance(event, RequestFailed) for event in run_all(damaged))
    assert damaged.prefix_cost(other).cached_tokens == cached
    assert damaged.prefix_cost(PROMPT).cached_tokens >= len(PROMPT) - 1, "what failed was computed all the same"
    assert_whole(damaged)


PROGRAM = """
    import resource, sys
    from chatpage.events import RequestFailed, SampleFinished
    from tests.engine.engines import assert_whole, greedy, run_all, tiny_engine

    engine = tiny_engine(
        model=sys.argv[1], kv_memory=2**23, max_batched_tokens=2000, block_size=16, check_integrity=False, kept_tips=0
    )
    prompt = [5 + i % 200 for i in range(1900)]
    engine.add_request([1] * 40, greedy(max_tokens=2))
    run_all(engine)  # whatever is made once is made now
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**18, hard))
    engine.add_request(prompt, greedy(n=2, max_tokens=2))
    failed = [event for event in run_all(engine) if isinstance(event, RequestFailed)]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    assert_whole(engine)
    engine.add_request(prompt, greedy(max_tokens=2))
    ended = [event for event in run_all(engine) if isinstance(event, SampleFinished)]
    assert_whole(engine)
    print([(event.code, event.message) for event in failed], len(ended[0].token_ids))
"""


def run_program(program: str, arguments: Sequence[str]) -> str:
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'kernels')!r}]\n{textwrap.dedent(program)}"
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux does")
def test_a_step_without_memory_fails_its_requests_and_the_next_one_is_served(tmp_path: Path) -> None:
    """In a process of its own, which takes its memory away between two steps and then gives it back."""
    output = run_program(PROGRAM, [str(save_tiny_llama(tmp_path, intermediate_size=8192))])
    assert "engine_step_failed" in output
    assert "alloc" in output.lower() or "memory" in output.lower()
    assert output.rstrip().endswith(" 2")
