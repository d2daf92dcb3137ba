"""Heads of a model larger than memory, from shards on disk: ``python -m benchmarks.streamed``.

Random bfloat16 shards of Llama-3-8B's attention (32 layers, 32 heads, 8 key-value heads, d_model
4096, a vocabulary of 128,256), written here and removed after. A process of its own reads them with
``HeadWeights.from_safetensors`` and computes all OV and QK spectra and K-composition of all pairs,
with p-values; its peak memory is the operating system's own count. Beside it, dense singular
values of one OV, d_model × d_model, which a user would have to compute 1,024 times.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import finish

MINUTES, MEGABYTES = 10.0, 6000.0
LAYERS, HEADS, KV_HEADS, D_MODEL, D_HEAD, VOCABULARY = 32, 32, 8, 4096, 128, 128_256


def tensors(layer: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one layer's attention under the names of a checkpoint."""
    prefix = f"model.layers.{layer}."
    widths = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    for letter, heads in widths.items():
        shape = (heads * D_HEAD, D_MODEL)
        yield f"{prefix}self_attn.{letter}_proj.weight", normal(shape, generator)
    yield f"{prefix}self_attn.o_proj.weight", normal((D_MODEL, HEADS * D_HEAD), generator)
    gain = 1 + 0.2 * torch.randn(D_MODEL, generator=generator)
    yield f"{prefix}input_layernorm.weight", gain.to(torch.bfloat16)


def normal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Return a random matrix of about unit singular values."""
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(torch.bfloat16)


def write(folder: Path) -> None:
    """Write config and shards, four layers a file."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=D_MODEL,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=14_336,
        vocab_size=VOCABULARY,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}

    def shard(name: str, content: dict[str, torch.Tensor]) -> None:
        save_file(content, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(content, name))

    for start in range(0, LAYERS, 4):
        several = (tensors(layer, generator) for layer in range(start, start + 4))
        shard(f"layers-{start:02}.safetensors", {k: v for one in several for k, v in one})
    table = (VOCABULARY, D_MODEL)
    shard("embed.safetensors", {"model.embed_tokens.weight": normal(table, generator)})
    ones = torch.ones(D_MODEL, dtype=torch.bfloat16)
    head = {"lm_head.weight": normal(table, generator), "model.norm.weight": ones}
    shard("head.safetensors", head)
    document = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(document)


def measure(folder: str) -> None:
    """Read and measure, and print seconds of each step and peak megabytes."""
    from wvprobe import HeadWeights, composition, spectra

    took: dict[str, float] = {}
    start = time.perf_counter()

    def step(name: str) -> None:
        nonlocal start
        took[name] = time.perf_counter() - start
        print(f"{name}: {took[name]:.0f} s", file=sys.stderr)
        start = time.perf_counter()

    heads = HeadWeights.from_safetensors(folder)
    step("open")
    values = spectra(heads, "OV", vocabulary=False).singular_values
    step("OV spectra")
    spectra(heads, "QK")
    step("QK spectra")
    found = composition(heads, "K", progress=True)
    step("K-composition")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    head = heads.ov(3, 5)
    start = time.perf_counter()
    dense = torch.linalg.svdvals(head.matrix())[: heads.d_head]
    step("dense singular values of one head")
    error = float((dense - values[3, 5]).abs().max() / dense[0])
    calm = float(found.q_values.nan_to_num(1.0).min())
    print(json.dumps({"seconds": took, "peak_mb": peak, "error": error, "least_q": calm}))


def main() -> None:
    """Write the shards, measure in another process, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        print("writing shards", flush=True)
        write(Path(folder))
        command = [sys.executable, "-m", "benchmarks.streamed", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    took, dense = found["seconds"], found["seconds"].pop("dense singular values of one head")
    minutes = sum(took.values()) / 60
    spectra_of_ov = took["open"] + took["OV spectra"]
    finish(
        "streamed",
        ratios={
            "minutes / 10": minutes / MINUTES,
            "peak / 6000 MB": found["peak_mb"] / MEGABYTES,
            "dense OV of one head × 1024 / OV spectra": LAYERS * HEADS * dense / spectra_of_ov,
            "error / 1e-4": found["error"] / 1e-4,
        },
        extra_mb={"peak": found["peak_mb"]},
        thresholds={
            "minutes / 10": "<= 1",
            "peak / 6000 MB": "<= 1",
            "dense OV of one head × 1024 / OV spectra": ">= 10",
            "error / 1e-4": "<= 1",
        },
        ok=minutes <= MINUTES
        and found["peak_mb"] <= MEGABYTES
        and LAYERS * HEADS * dense >= 10 * spectra_of_ov
        and found["error"] <= 1e-4,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()
