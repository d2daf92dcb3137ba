"""What a model has beside its attention, as sizes from which parameters and FLOPs follow."""

from dataclasses import dataclass

from wvprobe._validate import message
from wvprobe.errors import InputError


@dataclass(frozen=True)
class Rest:
    """The sizes of everything outside attention.

    Attributes:
        d_vocab: rows of the token embedding.
        d_mlp: hidden width of the MLP (of the dense layers', where others have experts).
        gated: whether the MLP has a gate beside its first matrix.
        mlp_biases: whether its matrices have biases.
        norms_per_layer: norms of a block that are d_model wide.
        outer_norms: such norms outside the blocks: the final one, one on the embedding.
        norm_biases: whether norms have a bias (LayerNorm) or only a gain (RMSNorm).
        n_positions: rows of a learned position table; 0 for none.
        n_token_types: rows of BERT's token-type table; 0 for none.
        head: how logits come about: ``tied`` to the embedding, ``untied``, or ``none``.
        head_bias: whether logits have a bias.
        head_transform: whether a dense layer with bias and norm stands before the logits (BERT).
        n_experts: experts of a layer; 0 for none.
        d_expert: hidden width of an expert.
        n_active_experts: routed experts that a token passes through.
        d_shared_expert: hidden width of the experts that every token passes through, together.
        n_dense_layers: layers with a plain MLP though others have experts.

    Raises:
        InputError: a negative size, an unknown `head`, or experts without a width.

    Examples:
        >>> from wvprobe.budget import Rest
        >>> Rest(d_vocab=10, d_mlp=8, gated=False, norms_per_layer=0, outer_norms=0).d_mlp
        8
    """

    d_vocab: int
    d_mlp: int = 0
    gated: bool = False
    mlp_biases: bool = False
    norms_per_layer: int = 2
    outer_norms: int = 1
    norm_biases: bool = False
    n_positions: int = 0
    n_token_types: int = 0
    head: str = "tied"
    head_bias: bool = False
    head_transform: bool = False
    n_experts: int = 0
    d_expert: int = 0
    n_active_experts: int = 0
    d_shared_expert: int = 0
    n_dense_layers: int = 0

    def __post_init__(self) -> None:
        """Check what can be checked without the width of the stream."""
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 0:
                raise InputError(message(name, "at least 0", value))
        if self.head not in ("tied", "untied", "none"):
            raise InputError(message("head", "'tied', 'untied' or 'none'", self.head))
        if self.n_experts and not 0 < self.n_active_experts <= self.n_experts:
            expected = f"from 1 to n_experts = {self.n_experts}"
            raise InputError(message("n_active_experts", expected, self.n_active_experts))
        if self.n_experts and not self.d_expert:
            raise InputError(message("d_expert", "at least 1 where there are experts", 0))

    def parameters(self, d_model: int, n_layers: int) -> dict[str, int]:
        """Return the parameters by part: embedding, positions, norms, mlp, head.

        Args:
            d_model: width of the stream.
            n_layers: number of blocks.
        """
        norm = d_model * (2 if self.norm_biases else 1)
        parts = {
            "embedding": self.d_vocab * d_model,
            "positions": (self.n_positions + self.n_token_types) * d_model,
            "norms": (n_layers * self.norms_per_layer + self.outer_norms) * norm,
            "mlp": self._mlp(d_model, n_layers, self.n_experts),
            "head": self._head(d_model, norm),
        }
        return {part: count for part, count in parts.items() if count}

    def flops(self, d_model: int, n_layers: int) -> dict[str, int]:
        """Return one token's FLOPs in the MLPs it passes through and in the logits.

        Args:
            d_model: width of the stream.
            n_layers: number of blocks.
        """
        weights = self._mlp(d_model, n_layers, self.n_active_experts, biases=False)
        logits = 0 if self.head == "none" else self.d_vocab * d_model
        transform = d_model**2 if self.head_transform and logits else 0
        return {"mlp": 2 * weights, "unembedding": 2 * (logits + transform)}

    def _mlp(self, d: int, n_layers: int, experts: int, *, biases: bool = True) -> int:
        """Count all layers' MLPs with `experts` of a layer's experts, and its whole router."""
        first = 2 if self.gated else 1  # matrices into the hidden width
        dense = (first + 1) * d * self.d_mlp
        if biases and self.mlp_biases:
            dense += first * self.d_mlp + d
        if not self.n_experts:
            return n_layers * dense
        width = experts * self.d_expert + self.d_shared_expert
        sparse = (first + 1) * d * width + d * self.n_experts
        return self.n_dense_layers * dense + (n_layers - self.n_dense_layers) * sparse

    def _head(self, d_model: int, norm: int) -> int:
        if self.head == "none":
            return 0
        untied = self.d_vocab * d_model if self.head == "untied" else 0
        transform = d_model**2 + d_model + norm if self.head_transform else 0
        return untied + transform + (self.d_vocab if self.head_bias else 0)
