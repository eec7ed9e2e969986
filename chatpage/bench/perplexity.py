"""What small weights cost in quality: perplexity on a fixed text, `python -m chatpage.bench.perplexity [--model FILE.gguf]`.

The text is the beginning of Alice's Adventures in Wonderland (Lewis Carroll, 1865; in the public domain). The model that is
served is held against its own weights dequantised to fp32 and computed by transformers: what differs is how we compute. Exits
with status 1 if the perplexity is more than 1 % higher.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

from chatpage.config import DEFAULT_MODEL, EngineConfig
from chatpage.engine.models.guards import paged_logits
from chatpage.engine.models.loading import LoadedModel, load_model
from chatpage_kernels.cpu import build

TEXT = Path(__file__).with_suffix(".txt")
MOST_WORSE = 0.01


def perplexity(model: LoadedModel, text: str) -> float:
    """Return exp of the mean negative log likelihood of the tokens of a text, after the first."""
    ids = torch.tensor(model.tokenizer(text)["input_ids"])
    runner = model.runner
    [logits] = paged_logits(
        runner.forward, runner.layer_specs, [ids], cuts=[len(ids) // 2], dtype=model.dtype, device=model.device
    )
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:].to(logits.device)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chatpage.bench.perplexity", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", choices=["auto", "int8", "int4"], default="auto")
    options = parser.parse_args()
    build.start()
    build.wait()
    text = TEXT.read_text()
    served = load_model(EngineConfig.load(model=options.model, quantization=options.quantization))
    ours = perplexity(served, text)
    exact = load_model(EngineConfig.load(model=options.model, quantization="none", dtype="float32"))
    reference = perplexity(exact, text)
    worse = ours / reference - 1
    print(f"{served.description}: {ours:.3f}\n{exact.description}: {reference:.3f}\ndifference: {worse:+.2%}")
    sys.exit(1 if worse > MOST_WORSE else 0)


if __name__ == "__main__":
    main()
