"""The identities of an audit: what must equal what, recomputed and held against hooks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import Provenance
from wvprobe.activations import PADDED_DTYPES, Activations, read_sites
from wvprobe.adapters import Architecture
from wvprobe.components import Carried, Component
from wvprobe.heads import HeadWeights

# Relative to a vector's norm. transformers casts norms and softmax to float32 in any dtype.
_TOLERANCE = {
    torch.float64: 2e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_WEIGHT_SITES = ("attn_in", "q", "k", "v", "z", "scores", "pattern")
_STREAM_SITES = ("resid_pre", "attn_out", "attn_added", "mlp_out", "resid_post")


@dataclass(frozen=True)
class Identity:
    """One row of an audit.

    Attributes:
        identity: what must equal what.
        status: ``ok``, ``failed`` or ``not applicable``.
        error: largest error, relative to the vector's norm (scores: to c‖q‖‖k‖; patterns:
            absolute); NaN where not applicable.
        tolerance: the error above which the identity fails.
        reason: why it does not apply, or where the largest error lies.
    """

    identity: str
    status: str
    error: float
    tolerance: float
    reason: str


class _Worst:
    """The largest error over layers, and where it was met."""

    def __init__(self) -> None:
        self.error, self.where = 0.0, ""

    def see(self, error: Tensor, where: str) -> None:
        worst = float(error.max()) if error.numel() else 0.0
        if worst != worst or worst > self.error:
            self.error, self.where = (worst if worst == worst else float("inf")), where


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    """Return ‖found − expected‖ / ‖expected‖ of every vector along the last axis."""
    wide = torch.float64
    expected = expected.to(wide)
    size = expected.norm(dim=-1)
    # A vector that is zero up to rounding is measured against the others of its kind.
    floor = 1e-3 * size.max() if size.numel() else size
    return (found.to(wide) - expected).norm(dim=-1) / size.clamp(min=floor).clamp(min=1e-30)


class Audit:
    """Identities of a model on some texts and layers."""

    def __init__(
        self, model: Any, arch: Architecture, texts: list[str], layers: Sequence[int]
    ) -> None:
        self.model, self.arch, self.layers = model, arch, list(layers)
        self.whole = self.layers == list(range(arch.n_layers))
        sites = (*_WEIGHT_SITES, *_STREAM_SITES)
        seen = read_sites(model, texts, sites, layers=self.layers)
        self.items = [_Item(seen, item) for item in range(len(texts))]
        self.tolerance = _TOLERANCE[model.cfg.dtype]
        self.last = None
        # A quick audit reads each of its layers once; a whole one keeps the last few.
        self.heads = lru_cache(maxsize=4)(self._read_heads)
        if self.whole:
            self.last = read_sites(
                model, texts, ("head_out", "attn_added"), layers=self.layers, positions="last"
            )

    def identities(self) -> list[Identity]:
        """Return every identity that the layers and texts allow."""
        checks = {
            "norm(x) from the formula = what attention reads": self.norm_formula,
            "x̂ W + b = q, k, v": self.projections,
            "folding the norm changes no q, k, v": self.folding,
            "q·k, rotated and scaled = scores": self.scores,
            "x̂ QK(Δ) x̂ᵀ + biases = scores": self.circuit_scores,
            "softmax of masked scores = pattern": self.pattern,
            "Σ pattern x̂ OV + biases = head output": self.ov,
            "Σ z W_O + b_O = attn_out": self.head_sum,
            "Σ head_out + b_O's share = attn_added": self.head_out_sum,
        }
        if self.whole:
            checks["embedding + Σ attn_added + Σ mlp_out = stream"] = self.components
            checks["final stream W_U + b_U = logits"] = self.logits
        else:
            checks["resid_pre + attn_added + mlp_out = resid_post"] = self.block_sum
        return [self.row(name, check) for name, check in checks.items()]

    def row(self, name: str, check: Callable[[_Worst], str | None]) -> Identity:
        """Run one check; it returns a reason where it does not apply."""
        worst = _Worst()
        skipped = check(worst)
        if skipped:
            return Identity(name, "not applicable", float("nan"), self.tolerance, skipped)
        return _judged(name, worst, self.tolerance)

    def _read_heads(self, row: int) -> HeadWeights:
        """Return one layer's weights; a layer at a time, so that a large model fits."""
        layer = [self.layers[row]]
        parts = adapters.head_parts(self.model, self.arch, layer, tables=False)
        return HeadWeights(**parts, provenance=Provenance.of("audit", ""))

    def each(self) -> "Iterator[tuple[int, _Item, str]]":
        """Yield (row, text, place) for every layer and text."""
        for row, layer in enumerate(self.layers):
            for number, item in enumerate(self.items):
                yield row, item, f"layer {layer}, text {number}"

    def norm_formula(self, worst: _Worst) -> str | None:
        """norm(x) as a formula."""
        if self.arch.wiring == "post_norm":
            return "a post-norm block's attention reads the stream itself"
        for row, item, where in self.each():
            found = self.heads(row).normalize(item("resid_pre", row), 0)
            worst.see(_relative(found, item("attn_in", row)), where)
        return None

    def projections(self, worst: _Worst) -> str | None:
        """Queries, keys and values from weights."""
        for row, item, where in self.each():
            heads, x_hat = self.heads(row), item("attn_in", row)
            for site, project in zip("qkv", _projections(heads), strict=True):
                worst.see(_relative(project(x_hat, 0), item(site, row)), f"{where}, {site}")
        return None

    def folding(self, worst: _Worst) -> str | None:
        """Folded weights on x / σ against unfolded ones on norm(x)."""
        if self.arch.wiring == "post_norm":
            return "a post-norm block has no norm before attention to fold"
        for row, item, where in self.each():
            heads = self.heads(row)
            folded, x = heads.fold(), item("resid_pre", row)
            pairs = zip("qkv", _projections(heads), _projections(folded), strict=True)
            for site, plain, merged in pairs:
                expected = plain(heads.normalize(x, 0), 0)
                found = merged(folded.normalize(x, 0), 0)
                worst.see(_relative(found, expected), f"{where}, {site}")
        return None

    def scores(self, worst: _Worst) -> str | None:
        """All raw scores from weights against those from the model's q, k, cos and sin."""
        for row, item, where in self.each():
            heads = self.heads(row)
            found = heads.scores(item("attn_in", row), 0)
            error = (found - item("scores", row)).abs() / self.score_size(heads, item, row)
            worst.see(error, where)
        return None

    def score_size(self, heads: HeadWeights, item: "_Item", row: int) -> Tensor:
        """Return c‖q_i‖‖k_j‖, [head, query, key]: a score may cancel to nearly nothing."""
        queries, keys = item("q", row).norm(dim=-1), item("k", row).norm(dim=-1)
        group = self.arch.n_heads // self.arch.n_kv_heads
        keys = keys.repeat_interleave(group, dim=-1)
        return heads.scale[0] * queries.T[:, :, None] * keys.T[:, None, :]

    def circuit_scores(self, worst: _Worst) -> str | None:
        """QK circuits at the offsets of the last query and three keys (quickly: one key)."""
        for row, item, where in self.each():
            heads, x_hat = self.heads(row), item("attn_in", row)
            size = self.score_size(heads, item, row)
            last = x_hat.shape[0] - 1
            for key in sorted({0, last // 2, last}) if self.whole else (last // 2,):
                for head in range(heads.n_heads):
                    found = self.circuit_score(heads, x_hat, head, last, key)
                    error = (found - item("scores", row)[head, last, key]).abs()
                    worst.see(error / size[head, last, key], f"{where}, head {head}, key {key}")
        return None

    def circuit_score(
        self, heads: HeadWeights, x_hat: Tensor, head: int, query: int, key: int
    ) -> Tensor:
        """Return one score by its circuits, with scales of latents, norms and ALiBi's slope."""
        here: dict[str, Any] = {"offset": query - key, "seq_len": x_hat.shape[0]}
        if heads.latent is not None:
            r_q, r_kv = heads.latent_scales(x_hat, 0)
            content, rotary = (
                heads.qk(0, head, **here, part=part).bilinear(x_hat[query], x_hat[key])
                for part in ("content", "rotary")
            )
            return r_q[query] * (r_kv[key] * content + rotary)
        score = heads.qk(0, head, **here).bilinear(x_hat[query], x_hat[key])
        norms = heads.qk_norms[0]
        if norms is not None:
            kv = heads.kv_head(head)
            q = x_hat[query] @ heads.W_Q[0, head] + heads.b_Q[0, head]
            k = x_hat[key] @ heads.W_K[0, kv] + heads.b_K[0, kv]
            score = score / (norms[0].scale(q) * norms[1].scale(k)).squeeze(-1)
        return score if heads.slopes is None else score + heads.slopes[head] * key

    def pattern(self, worst: _Worst) -> str | None:
        """Soft cap, mask and softmax of the recomputed scores against the model's pattern."""
        for row, item, where in self.each():
            heads = self.heads(row)
            found = heads.pattern(heads.scores(item("attn_in", row), 0), 0)
            worst.see((found - item("pattern", row)).abs(), where)
        return None

    def ov(self, worst: _Worst) -> str | None:
        """Attention-weighted OV outputs against z W_O."""
        for row, item, where in self.each():
            heads, x_hat = self.heads(row), item("attn_in", row)
            r_kv = 1.0 if heads.latent is None else heads.latent_scales(x_hat, 0)[1][:, None]
            for head in range(heads.n_heads):
                written = r_kv * heads.ov(0, head).apply(x_hat)
                found = item("pattern", row)[head] @ written
                expected = item("z", row)[:, head] @ heads.W_O[0, head]
                worst.see(_relative(found, expected), f"{where}, head {head}")
        return None

    def head_sum(self, worst: _Worst) -> str | None:
        """All heads' outputs and b_O against what W_O gives."""
        for row, item, where in self.each():
            layer = self.layers[row]
            w_o = adapters.output_weight(self.model, self.arch, layer).to(item("z", row).dtype)
            found = torch.einsum("phe,hed->pd", item("z", row), w_o)
            bias = adapters.output_bias(self.model, layer)
            found = found if bias is None else found + bias
            worst.see(_relative(found, item("attn_out", row)), where)
        return None

    def head_out_sum(self, worst: _Worst) -> str | None:
        """The site head_out, and b_O's share, against what is added."""
        if self.last is None:
            return "asked for at all layers only"
        for row, layer in enumerate(self.layers):
            found = _wide(self.last["head_out"][:, row]).sum(dim=1)
            bias = adapters.output_bias(self.model, layer)
            if bias is not None:
                norm = adapters.post_attention_norm(self.model, self.arch, layer)
                if norm is not None:
                    out = torch.stack([item("attn_out", row)[-1] for item in self.items])
                    bias = norm.linear(bias, norm.scale(out))
                found = found + bias
            expected = self.last["attn_added"][:, row]
            worst.see(_relative(found, expected), f"layer {layer}")
        return None

    def block_sum(self, worst: _Worst) -> str | None:
        """One block's stream from what enters and what is added."""
        for row, item, where in self.each():
            norms = adapters.stream_norms(self.model, self.arch, self.layers[row])
            found = item("resid_pre", row) + item("attn_added", row)
            found = found if norms is None else norms[0](found)
            found = found + item("mlp_out", row)
            found = found if norms is None else norms[1](found)
            worst.see(_relative(found, item("resid_post", row)), where)
        return None

    def components(self, worst: _Worst) -> str | None:
        """Every component carried by itself through all later norms, scales frozen."""
        for number, item in enumerate(self.items):
            carried = Carried()
            carried.add(Component("token"), item("resid_pre", 0))
            for row, layer in enumerate(self.layers):
                norms = adapters.stream_norms(self.model, self.arch, layer)
                stream = item("resid_pre", row)
                for step, site in enumerate(("attn_added", "mlp_out")):
                    carried.add(Component(site, layer), item(site, row))
                    if norms is not None:
                        stream = stream + item(site, row)
                        carried.through(norms[step], stream, Component("bias", layer))
                        stream = norms[step](stream)
                where = f"layer {layer}, text {number}"
                worst.see(_relative(carried.total(), item("resid_post", row)), where)
        return None

    def logits(self, worst: _Worst) -> str | None:
        """The head, its norm folded, against the model's own logits."""
        head = adapters.unembedding(self.model, self.arch)
        if isinstance(head, str):
            return head
        for number, item in enumerate(self.items):
            tokens = torch.tensor([item.tokens], device=self.model.cfg.device)
            adapters.fresh_rotation(self.model)
            with torch.no_grad():
                expected = self.model(tokens, return_type="logits")[0].cpu()
            found = _logits(head, item("resid_post", len(self.layers) - 1))
            worst.see(_relative(found, expected), f"text {number}")
        return None


class _Item:
    """One text's activations: ``item(site, row)`` without padding."""

    def __init__(self, seen: Activations, item: int) -> None:
        self.seen, self.item = seen, item
        self.tokens = seen.tokens[item]

    def __call__(self, site: str, row: int) -> Tensor:
        """Return a site of the row-th audited layer: [pos, ...], pairs [head, query, key]."""
        value, size = self.seen[site][self.item], len(self.tokens)
        found = value[row, :, :size, :size] if site in adapters.PAIR_SITES else value[:size, row]
        return _wide(found)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _projections(heads: HeadWeights) -> tuple[Callable[[Tensor, int], Tensor], ...]:
    return heads.queries, heads.keys, heads.values


def _logits(head: adapters.Unembedding, x: Tensor) -> Tensor:
    x_hat = x if head.norm is None else head.norm(x)
    logits = x_hat @ _wide(head.weight).T
    logits = head.scale * (logits if head.bias is None else logits + head.bias)
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


def invariances(model: Any, arch: Architecture, texts: list[str]) -> list[Identity]:
    """Return the identities that hold a batch against its sentences alone."""
    tolerance = _TOLERANCE[model.cfg.dtype]
    singles = read_sites(model, texts, "resid_post", layers=[arch.n_layers - 1], batch_size=1)
    together = read_sites(
        model, texts, "resid_post", layers=[arch.n_layers - 1], batch_size=len(texts)
    )
    checks: dict[str, Callable[[int], Tensor]] = {
        "a batch = its sentences alone": lambda item: _Item(together, item)("resid_post", 0)
    }
    padded = "a left-padded batch = its sentences alone"
    reasons = {padded: ""}
    if model.cfg.dtype in PADDED_DTYPES:
        checks[padded] = _last_stream(model, arch, list(singles.tokens))
    else:
        reasons[padded] = f"padding overflows transformers' softmax in {model.cfg.dtype}"
    regime = adapters.length_regime(model, arch)
    if len({regime(len(tokens)) for tokens in singles.tokens}) > 1:
        reasons[padded] = "a batch is turned by the frequencies of its longest text"
    if len(texts) == 1:
        reasons = dict.fromkeys([*checks, padded], "one text makes no batch")
    rows = []
    for name in dict.fromkeys([*checks, padded]):
        if reasons.get(name):
            rows.append(Identity(name, "not applicable", float("nan"), tolerance, reasons[name]))
            continue
        worst = _Worst()
        for item in range(len(texts)):
            expected = _Item(singles, item)("resid_post", 0)
            worst.see(_relative(checks[name](item), expected), f"text {item}")
        rows.append(_judged(name, worst, tolerance))
    return rows


def _judged(name: str, worst: _Worst, tolerance: float) -> Identity:
    status = "ok" if worst.error <= tolerance else "failed"
    return Identity(name, status, worst.error, tolerance, worst.where)


def _last_stream(
    model: Any, arch: Architecture, tokens: list[tuple[int, ...]]
) -> Callable[[int], Tensor]:
    """Run one batch padded on the left; return the last stream of an item."""
    longest = max(map(len, tokens))
    padded = torch.tensor([[0] * (longest - len(t)) + list(t) for t in tokens])
    mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in tokens])
    kept: list[Tensor] = []
    wanted = [("resid_post", arch.n_layers - 1)]
    with adapters.reading(model, arch, wanted, lambda _s, _l, value: kept.append(value)):
        adapters.run_backbone(model, padded.to(model.cfg.device), mask.to(model.cfg.device))
    stream = adapters.shaped(arch, "resid_post", kept[0], len(tokens), longest).cpu()
    return lambda item: _wide(stream[item, longest - len(tokens[item]) :])
