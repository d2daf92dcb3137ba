"""The attention weights of a whole model, head by head, with everything a score depends on.

Where TransformerLens's own ``W_Q … b_V`` leave out rotation, scale, norms of queries and keys,
soft cap and the norm before attention, and refuse latent attention, these weights carry them, so
that scores, patterns and head outputs follow from them exactly; :func:`wvprobe.audit` holds them
against the model.

Methods read weights a layer at a time (``W_Q[layer]``, ``W_Q[layer, head]``), so that fields may
be read from disk when they are asked for; only :meth:`HeadWeights.fold` touches all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._rotary import Rotary
from wvprobe.heads._forward import HeadForward, LatentScales
from wvprobe.heads._own import own_fields
from wvprobe.heads._streamed import streamed_fields

__all__ = ["HeadWeights", "LatentScales"]


class HeadWeights(HeadForward):
    """Weights of all attention heads of a model, as it uses them.

    The fields, their shapes and conventions are those of
    :class:`wvprobe.heads._fields.HeadFields`. Circuits (:meth:`ov`, :meth:`qk`) and what attention
    computes from vectors (:meth:`scores`, :meth:`pattern`) are methods.

    Examples:
        >>> heads = wvprobe.HeadWeights.from_model(model)
        >>> heads.W_V.shape, heads.kv_head(4)
        (torch.Size([3, 2, 42, 14]), 1)
        >>> heads.qk(1, 4, offset=3).rank
        14
    """

    @classmethod
    def from_model(
        cls, model: Any, *, fold_norm: bool = True, effective_embedding: bool = False
    ) -> "HeadWeights":
        """Read the weights of a TransformerBridge.

        Half precision is upcast to float32, float64 stays.

        Args:
            model: the bridge; its weights are copied, it is left as it is.
            fold_norm: fold the norm before attention into the weights. A post-norm model
                (BERT) has none there, so nothing is folded and `folded` is False.
            effective_embedding: also store `effective_W_E`, the embedding after layer 0's MLP.

        Raises:
            UnsupportedError: the architecture has parts that are not modelled exactly, or no
                effective embedding.
            InputError: a weight holds NaN or infinity; the message says which, and where.
        """
        arch = adapters.architecture(model)
        parts = adapters.head_parts(model, arch, range(arch.n_layers))
        if effective_embedding:
            effective = adapters.effective_embedding(model, arch, parts["W_E"])
            parts["effective_W_E"] = effective
        heads = cls(**parts, provenance=adapters.provenance(model))
        return heads.fold() if fold_norm else heads

    @classmethod
    def from_tensors(
        cls,
        *,
        W_Q: Tensor,
        W_K: Tensor,
        W_V: Tensor,
        W_O: Tensor,
        b_Q: Tensor | None = None,
        b_K: Tensor | None = None,
        b_V: Tensor | None = None,
        b_O: Tensor | None = None,
        scale: float | int | Sequence[float | int] | None = None,
        rotary: Rotary | None = None,
        soft_cap: float | int | None = None,
        causal: bool = True,
        W_E: Tensor | None = None,
        W_pos: Tensor | None = None,
        W_U: Tensor | None = None,
        tokenizer: Any = None,
        name: str = "tensors",
    ) -> "HeadWeights":
        """Build from tensors of any model of one's own, in the shapes of the attributes above.

        The norm before attention is taken as folded already, or absent. `scale` is 1/√d_head
        where it is not given; `W_U` is [d_model, d_vocab], the final norm folded.

        Raises:
            ShapeError: a tensor does not fit; the message says which, and on which axis.
            InputError: a tensor holds NaN or infinity; the message says which, and where.
        """
        given = dict(
            W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O, b_Q=b_Q, b_K=b_K, b_V=b_V, b_O=b_O,
            W_E=W_E, W_pos=W_pos,
        )  # fmt: skip
        fields = own_fields(
            given,
            scale=scale,
            rotary=rotary,
            soft_cap=soft_cap,
            causal=causal,
            W_U=W_U,
            tokenizer=tokenizer,
            name=name,
        )
        return cls(**fields)

    @classmethod
    def from_safetensors(cls, folder: str | Path, *, fold_norm: bool = True) -> "HeadWeights":
        """Read weights from a checkpoint's shards, a layer at a time, with no model in memory.

        ``W_Q``, ``W_K``, ``W_V``, ``W_O``, their biases and `latent` are then read when a layer is
        asked for (``heads.W_Q[3]``, ``heads.ov(3, 0)``), upcast to float32 and folded; the last
        two layers are kept. W_E stays in the dtype of the file where the model does not change it.
        Spectra, composition and overlap run on such weights as on any others. The numbers are
        those of :meth:`from_model`.

        Args:
            folder: a folder with a Hugging Face ``config.json`` and safetensors files, of a
                family that `load` reads.
            fold_norm: see :meth:`from_model`.

        Raises:
            InputError: no such folder; a weight holds NaN or infinity (said when it is read).
            ModelFileError: a file or a tensor is missing, broken, or of another shape.
            UnsupportedError: the architecture is none that wvprobe models exactly, or quantised.
        """
        return cls(**streamed_fields(folder, cls, fold_norm=fold_norm))

    def fold(self) -> "HeadWeights":
        """Return the same heads with the norm before attention folded into the weights.

        LayerNorm: W′ = (I − 11ᵀ/d) diag(γ) W, b′ = b + βW; RMSNorm: W′ = diag(g) W. The maps
        down to latents are folded likewise.
        """
        if self.folded or all(found is None for found in self.norms):
            return self
        new: dict[str, list[Tensor]] = {f"{kind}_{x}": [] for kind in "Wb" for x in "QKV"}
        for layer, found in enumerate(self.norms):
            for x in "QKV":
                weight = getattr(self, f"W_{x}")[layer]
                bias = getattr(self, f"b_{x}")[layer]
                if found is not None and found.bias is not None:
                    shift = torch.einsum("d,hde->he", found.bias.to(weight.dtype), weight)
                    bias = bias + shift
                new[f"W_{x}"].append(weight if found is None else found.fold(weight))
                new[f"b_{x}"].append(bias)
        latent = self.latent
        if latent is not None:
            pairs = zip(latent, self.norms, strict=True)
            latent = tuple(here.folded(found) for here, found in pairs)
        stacked = {name: torch.stack(each) for name, each in new.items()}
        return replace(self, folded=True, latent=latent, **stacked)
