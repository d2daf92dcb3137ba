"""The straight path from what an earlier head adds to one later head, all between held fixed.

Wang et al. 2022 (Interpretability in the Wild, https://arxiv.org/abs/2211.00593, appendix B): a
sender's change reaches the reader's input through the residual stream alone; no head and no MLP
between the two sees it. Nothing has to be run again: the stream before the reader is the old one
plus the change.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import HeadId, Provenance
from wvprobe._writes import on_cpu, output_factor, output_map
from wvprobe.activations import read_sites
from wvprobe.adapters import Architecture, Norm
from wvprobe.heads import HeadWeights

ROUTES = ("q", "k", "v")


class StraightPath:
    """One reader in one text, with the query and key at which its score is watched."""

    def __init__(
        self, model: Any, arch: Architecture, text: str, reader: HeadId, at: tuple[int, int]
    ) -> None:
        """Read the text up to the reader's layer."""
        self.model, self.arch, self.reader = model, arch, reader
        self.query, self.key = at
        sites = ["resid_pre", "attn_out", "attn_added", "mlp_out"]
        seen = read_sites(model, text, [*sites, "pattern"], layers=range(reader.layer + 1))
        self.seen = {site: seen[site][0].double() for site in sites}  # [pos, layer, d_model]
        self.row = seen["pattern"][0, -1, reader.head, self.query].double()
        parts = adapters.head_parts(model, arch, [reader.layer], tables=False)
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            parts[name] = parts[name].double()
        self.heads = HeadWeights(**parts, provenance=Provenance.of("path", ""))
        self.x = self._here(self.seen["resid_pre"][:, reader.layer])
        self.x_hat = self.heads.normalize(self.x, 0)

    def effects(
        self, route: str, layer: int, written: Float[Tensor, "sender pos d_model"]
    ) -> tuple[Float[Tensor, " sender"], Float[Tensor, " sender"]]:
        """Return what changes of a layer's W_O output do through the reader's q, k or v.

        For ``q`` and ``k`` the change of the raw score between query and key. For ``v``, the
        pattern held, ‖Δ(z W_O)‖ / ‖z W_O‖ of the reader at the query.

        Args:
            route: ``q``, ``k`` or ``v``.
            layer: the senders' layer, before the reader's.
            written: the change that each sender makes, before a second norm.

        Returns:
            Twice the effects: with the scales of all norms frozen, which is linear in the change,
            and with every norm on the way evaluated anew.
        """
        linear, anew = (self._here(t) for t in self._carried(layer, written))
        norm = self.heads.norms[0]
        read = linear if norm is None else norm.linear(linear, norm.scale(self.x))
        new = self.heads.normalize(self.x + anew, 0)
        if route == "v":
            return self._output(read, new)
        which, place = ("Q", self.query) if route == "q" else ("K", self.key)
        project = self.heads.queries if route == "q" else self.heads.keys
        at = self.reader.head if route == "q" else self.heads.kv_head(self.reader.head)
        frozen = self._frozen(which, read[:, place], self.x_hat[place])[:, at]
        measured = (project(new[:, place], 0) - project(self.x_hat[place], 0))[:, at]
        return self._scores(route, frozen), self._scores(route, measured)

    def _here(self, x: Tensor) -> Tensor:
        return x.to(self.heads.device)

    def _carried(self, layer: int, written: Tensor) -> tuple[Tensor, Tensor]:
        """Carry changes from W_O's output to the stream before the reader."""
        after = on_cpu(adapters.post_attention_norm(self.model, self.arch, layer))
        linear = anew = written
        if after is not None:
            linear, anew = _through(after, self.seen["attn_out"][:, layer], linear, anew)
        for block in range(layer, self.reader.layer):
            norms = adapters.stream_norms(self.model, self.arch, block)
            if norms is None:
                break
            x = self.seen["resid_pre"][:, block]
            for norm, site in zip(map(on_cpu, norms), ("attn_added", "mlp_out"), strict=True):
                x = x + self.seen[site][:, block]
                linear, anew = _through(norm, x, linear, anew)
                x = norm(x)
        return linear, anew

    def _frozen(self, which: str, read: Tensor, x_hat: Tensor) -> Float[Tensor, "sender head d"]:
        """Project changes of x̂ at one position, scales of latents and of qk-norms held."""
        weight, bias = (getattr(self.heads, f"{kind}_{which}")[0] for kind in "Wb")
        out = torch.einsum("sd,hde->she", read, weight)
        if self.heads.latent is not None:
            return self.heads.latent[0].scaled(which, out, x_hat)
        norms = self.heads.qk_norms[0]
        if norms is None:
            return out
        norm = norms["QK".index(which)]
        before = torch.einsum("d,hde->he", x_hat, weight) + bias
        return norm.linear(out, norm.scale(before))

    def _scores(self, route: str, change: Float[Tensor, "sender d_head"]) -> Tensor:
        """Return what changes of the query, or of the key, do to the score, which is linear."""
        head = self.reader.head
        if route == "q":
            query, key = change, self.heads.keys(self.x_hat[self.key], 0)
            key = key[self.heads.kv_head(head)]
        else:
            query, key = self.heads.queries(self.x_hat[self.query], 0)[head], change
        rotary = self.heads.rotary[0]
        if rotary is not None:
            query = rotary.relative(query, self.query - self.key, len(self.x))
        return (self.heads.scale[0] * (query * key).sum(dim=-1)).cpu()

    def _output(self, read: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much the reader's output at the query changes, pattern held."""
        head = self.heads.kv_head(self.reader.head)
        old = self.heads.values(self.x_hat, 0)[:, head]
        weight, latent = self.heads.W_V[0, head], self.heads.latent
        frozen = read @ weight
        if latent is not None:
            frozen = latent[0].scaled("V", frozen[:, :, None], self.x_hat)[:, :, 0]
        measured = self.heads.values(new, 0)[:, :, head] - old
        factor = output_factor(output_map(self.model, self.arch, self.reader.layer))
        factor = factor[self.reader.head]

        def length(values: Tensor) -> Tensor:
            return (torch.einsum("j,...jr->...r", self.row, values.cpu()) @ factor).norm(dim=-1)

        return length(frozen) / length(old), length(measured) / length(old)


def _through(norm: Norm, x: Tensor, linear: Tensor, anew: Tensor) -> tuple[Tensor, Tensor]:
    """Carry changes of a norm's input x through it: with its scale held, and evaluated anew."""
    return norm.linear(linear, norm.scale(x)), norm(x + anew) - norm(x)
