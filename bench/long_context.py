"""What a rank holds of a long sequence, predicted, beside an n-th of what one device holds: the table of docs/long-context.md.

    python bench/long_context.py --write          # and docs/long-context.md carries it

A training step of a Llama of two narrow layers, one sequence, float32, SGD, on eight ranks; what lies between steps lies split over them.
*both*: heads over two ranks, and a ring of four.
Nothing is allocated: weights and tokens are on the meta device.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's

import torch  # noqa: E402
import transformers  # noqa: E402
from carried import carry  # noqa: E402
from tabulate import tabulate  # noqa: E402

import meshc  # noqa: E402
from meshc.cost import peak_memory  # noqa: E402

RANKS = 8
LENGTHS = (8_192, 32_768, 131_072, 524_288, 1_048_576)
STORED = "store params, grads, state"
WHOLE = f"cp={RANKS}"
WAYS = {
    "ring": (WHOLE, f"cp: seq; {STORED}", meshc.Options(sequence=meshc.SplitSequence(attention="ring"))),
    "gather": (WHOLE, f"cp: seq; {STORED}", meshc.Options(sequence=meshc.SplitSequence(attention="gather"))),
    "Ulysses": (WHOLE, f"cp: heads@attention > seq; {STORED}", meshc.Options()),
    "both": (
        "cp=4,hp=2",
        f"cp: seq; {STORED}\nhp: heads@attention > seq; {STORED}",
        meshc.Options(sequence=meshc.SplitSequence(attention="ring")),
    ),
}


def held(length: int, mesh: str, plan: str, options: meshc.Options) -> int:
    """Bytes of a rank when most is there."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        max_position_embeddings=length,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(1, length, dtype=torch.int64)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    program = meshc.compile(step, meshc.Mesh(mesh), plan=plan, kwargs={"input_ids": ids, "labels": ids}, options=options)
    return peak_memory.peak_rank(program.compiled).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/long-context.md")
    options = parser.parse_args()
    rows = []
    for length in LENGTHS:
        alone = held(length, "cp=1", "cp: seq", meshc.Options())
        found = {name: held(length, *way) for name, way in WAYS.items()}
        rows.append([f"{length:,}", f"{alone / 1e6:,.0f}"])
        rows[-1] += [text for value in found.values() for text in (f"{value / 1e6:,.0f}", f"{value * RANKS / alone:.3f}")]
        print(rows[-1], flush=True)
    heads = ["positions", "one device, MB", *(head for name in WAYS for head in (f"{name}, MB", "of an eighth"))]
    shown = tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)
    print(shown)
    if options.write:
        carry("long-context.md", "bench/long_context.py", shown)


if __name__ == "__main__":
    main()
