"""The inputs for sampling parameters, which the canvas reads and writes.

Invariant: `PARAMETERS` here and in `static/params.js` are the same list; a test compares them.
"""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from chatpage.sampling_params import MAX_SAMPLES


@dataclass(frozen=True, slots=True)
class Parameter:
    """One input. `low`, `high`, `step`: of a slider; without them it is a text field."""

    name: str
    label: str
    neutral: float | str
    info: str
    low: float | None = None
    high: float | None = None
    step: float | None = None


PARAMETERS = (
    Parameter("n", "Samples", 1, "answers to each message, side by side", 1, min(16, MAX_SAMPLES), 1),
    Parameter("temperature", "Temperature", 1.0, "0 takes the most likely token", 0, 2, 0.01),
    Parameter("top_p", "Top P", 1.0, "smallest set of tokens that reaches this probability", 0.01, 1, 0.01),
    Parameter("top_k", "Top K", 0, "the k most likely tokens; 0 keeps all", 0, 200, 1),
    Parameter("min_p", "Min P", 0.0, "share of the most likely token's probability", 0, 1, 0.01),
    Parameter("repetition_penalty", "Repetition penalty", 1.0, "above 1 repeats less", 0.5, 2, 0.01),
    Parameter("presence_penalty", "Presence penalty", 0.0, "once per token already written", -2, 2, 0.05),
    Parameter("frequency_penalty", "Frequency penalty", 0.0, "per time a token was written", -2, 2, 0.05),
    Parameter("max_tokens", "Max tokens", 1024, "per answer", 1, 8192, 1),
    Parameter("seed", "Seed", "", "a number repeats an answer; empty draws one"),
    Parameter("stop", "Stop strings", "", "one per line"),
)


def make_inputs() -> list[Any]:
    """Make the inputs, in order."""
    with gr.Accordion("Sampling", open=True):
        return [_make(parameter) for parameter in PARAMETERS]


def _make(parameter: Parameter) -> Any:
    name = f"cp-param-{parameter.name}"
    if parameter.low is None or parameter.high is None:
        lines = 2 if parameter.name == "stop" else 1
        return gr.Textbox("", label=parameter.label, info=parameter.info, lines=lines, max_lines=lines, elem_id=name)
    return gr.Slider(
        parameter.low,
        parameter.high,
        value=float(parameter.neutral),
        step=parameter.step,
        label=parameter.label,
        info=parameter.info,
        elem_id=name,
    )
