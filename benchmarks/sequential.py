"""Heads one after another on SmolLM2, against hooks by hand: ``python -m benchmarks.sequential``.

Every block alone and all together, in the natural order, over some 2,000 tokens of held-out prose:
six minutes on two cores. By hand, as a user would with TransformerLens's hooks: head after head a
forward pass of its own, with what the heads before it wrote added to the block's input, and one
more with the heads' outputs put in place; on one text and some blocks, held against the same here.
"""

from typing import Any

import torch

import wvprobe
from benchmarks import finish, grown, seconds
from wvprobe.datasets import load_prose

SECONDS, TOKENS, BLOCKS, TOLERANCE = 360.0, 2_000, (0, 14, 25), 1e-4


def prose(model: Any) -> list[str]:
    """Return paragraphs of held-out prose until there are tokens enough."""
    texts, count = [], 0
    for text in load_prose("held-out"):
        if count >= TOKENS:
            break
        texts.append(text)
        count += model.to_tokens(text).shape[1]
    return texts


@torch.no_grad()
def by_hand(model: Any, text: str, block: int) -> float:
    """Return the change of the loss when a block's heads run in sequence, a forward a head."""
    w_o = model.blocks[block].attn.W_O
    stream, z = f"blocks.{block}.hook_resid_pre", f"blocks.{block}.attn.hook_z"
    written: Any = 0.0
    kept: list[torch.Tensor] = []
    for head in range(model.cfg.n_heads):
        seen: dict[str, torch.Tensor] = {}

        def add(x: torch.Tensor, hook: Any, written: Any = written) -> torch.Tensor:
            return x + written

        def see(x: torch.Tensor, hook: Any, seen: Any = seen) -> None:
            seen["z"] = x

        model.run_with_hooks(text, fwd_hooks=[(stream, add), (z, see)])
        kept.append(seen["z"].reshape(1, -1, model.cfg.n_heads, model.cfg.d_head)[:, :, head])
        written = written + kept[-1] @ w_o[head]
    together = torch.stack(kept, dim=2).flatten(2)
    put = [(z, lambda x, hook: together.reshape(x.shape))]
    changed = model.run_with_hooks(text, return_type="loss", fwd_hooks=put)
    return float(changed) - float(model(text, return_type="loss"))


def main() -> None:
    """Measure, compare on one text, and print time against its limit."""
    model = wvprobe.load("smollm2-135m")
    texts = prose(model)
    blocks = [[block] for block in BLOCKS]
    ours: list[Any] = []
    fast = seconds(lambda: ours.append(wvprobe.sequential_heads(model, texts[0], layers=blocks)))
    theirs: list[float] = []
    slow = seconds(lambda: theirs.extend(by_hand(model, texts[0], block) for block in BLOCKS))
    error = float((ours[0].loss_delta[:-1, 0] - torch.tensor(theirs)).abs().max())
    print(
        f"one text, blocks {BLOCKS}: {fast:.1f} s, by hand {slow:.1f} s, differing by {error:.1e}"
    )
    found, took, extra = grown(lambda: wvprobe.sequential_heads(model, texts))
    print(found.to_frame()[["setting", "kl", "loss_delta", "low", "high"]].to_string(index=False))
    print(f"{int(found.n_tokens.sum())} tokens, {len(found.settings)} settings: {took:.0f} s")
    ratios = {
        "by hand / sequential_heads": slow / fast,
        "six minutes / time": SECONDS / took,
        "difference / tolerance": error / TOLERANCE,
    }
    finish(
        "sequential",
        ratios=ratios,
        extra_mb={"sequential_heads": extra},
        thresholds={
            "by hand / sequential_heads": ">= 1",
            "six minutes / time": ">= 1",
            "difference / tolerance": "<= 1",
        },
        ok=slow >= fast and took <= SECONDS and error <= TOLERANCE,
    )


if __name__ == "__main__":
    main()
