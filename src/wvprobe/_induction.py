"""An attention-only model of two layers with weights written by hand.

The circuit of Olsson et al. 2022 (In-context Learning and Induction Heads): a head of layer 0
copies each token's code one position on; a head of layer 1 looks for the place whose previous
token is the current one, and says what stood there. The model is a Llama whose MLPs write
nothing, so that every tool meets it as it meets any other model.
"""

from typing import Any

import torch

# Coordinates of the stream: a constant, the token's code, the code of the token before.
_CODE = 42
_CONSTANT, _TOKEN, _BEFORE = 0, slice(1, 1 + _CODE), slice(1 + _CODE, 1 + 2 * _CODE)
D_MODEL, D_HEAD, HEADS = 86, 54, 2
# Frequencies fall by 10^(12/27) a plane: the first few tell neighbours apart, and from plane 6
# on a whole context turns by less than a tenth of a radian, so that content can be matched.
_BASE, _PLANES = 1.0e12, 27
_POSITION_PLANES = (0, 1, 2)
_CONTENT_DIMS = tuple(range(6, 27)) + tuple(range(_PLANES + 6, _PLANES + 27))


def induction_config(vocabulary: int) -> dict[str, Any]:
    """Return the Llama config keys of the model."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": D_MODEL,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": D_HEAD,
        "num_hidden_layers": 2,
        "intermediate_size": 1,
        "max_position_embeddings": 257,
        "rope_theta": _BASE,
        "tie_word_embeddings": False,
    }


def write_induction_weights(model: torch.nn.Module, seed: int) -> None:
    """Overwrite a Llama of :func:`induction_config` with the hand-made weights.

    Previous-token head: L0H0. Induction head: L1H1. The other two write little noise.
    """
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    vocabulary = state["model.embed_tokens.weight"].shape[0]
    codes = torch.randn(vocabulary, _CODE, generator=generator)
    codes = codes / codes.norm(dim=1, keepdim=True)
    embedding = state["model.embed_tokens.weight"]
    embedding[:, _CONSTANT] = 1.0
    embedding[:, _TOKEN] = codes
    state["lm_head.weight"][:, _TOKEN] = codes
    for name, value in state.items():
        if name.endswith("norm.weight"):
            value.fill_(1.0)
    for layer in (0, 1):
        for letter in "qkvo":
            weight = state[f"model.layers.{layer}.self_attn.{letter}_proj.weight"]
            weight.copy_(1e-3 * torch.randn(weight.shape, generator=generator))
    _previous_token_head(state, "model.layers.0.self_attn.", head=0)
    _induction_head(state, "model.layers.1.self_attn.", head=1)
    model.load_state_dict(state)


def _previous_token_head(state: dict[str, torch.Tensor], at: str, head: int) -> None:
    """Queries are turned by one position against keys, so that scores peak at offset 1."""
    rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
    query, key = torch.zeros(D_HEAD, D_MODEL), torch.zeros(D_HEAD, D_MODEL)
    for plane in _POSITION_PLANES:
        angle = torch.tensor(_BASE ** (-plane / _PLANES))
        key[plane, _CONSTANT] = 2.0
        # R(Δ) turns q forward by Δ; starting one step behind, it meets k at Δ = 1.
        query[plane, _CONSTANT] = 2.0 * torch.cos(-angle)
        query[_PLANES + plane, _CONSTANT] = 2.0 * torch.sin(-angle)
    value, output = torch.zeros(D_HEAD, D_MODEL), torch.zeros(D_MODEL, D_HEAD)
    value[:_CODE, _TOKEN] = torch.eye(_CODE)
    output[_BEFORE, :_CODE] = 0.1 * torch.eye(_CODE)
    _place(state, at, rows, query, key, value, output)


def _induction_head(state: dict[str, torch.Tensor], at: str, head: int) -> None:
    """The query holds the current token's code, the key the code of the token before it."""
    rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
    query, key = torch.zeros(D_HEAD, D_MODEL), torch.zeros(D_HEAD, D_MODEL)
    query[_CONTENT_DIMS, _TOKEN] = 3.0 * torch.eye(_CODE)
    key[_CONTENT_DIMS, _BEFORE] = 3.0 * torch.eye(_CODE)
    value, output = torch.zeros(D_HEAD, D_MODEL), torch.zeros(D_MODEL, D_HEAD)
    value[:_CODE, _TOKEN] = torch.eye(_CODE)
    output[_TOKEN, :_CODE] = 3.0 * torch.eye(_CODE)
    _place(state, at, rows, query, key, value, output)


def _place(
    state: dict[str, torch.Tensor],
    at: str,
    rows: slice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
) -> None:
    state[f"{at}q_proj.weight"][rows] = query
    state[f"{at}k_proj.weight"][rows] = key
    state[f"{at}v_proj.weight"][rows] = value
    state[f"{at}o_proj.weight"][:, rows] = output
