"""The arithmetic of a model's heads: pure numbers, no model and no tensor."""

from dataclasses import dataclass
from typing import Any

from wvprobe._validate import at_least, length, listed, message, one_of
from wvprobe.budget._rest import Rest
from wvprobe.errors import InputError, UnsupportedError

__all__ = ["BYTES", "HeadBudget", "Rest"]

# Bytes of one number.
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}


@dataclass(frozen=True)
class HeadBudget:
    """The sizes of a model's attention, and what follows from them.

    A layer has matrices W_Q [d_model, n_heads · d_head], W_K [d_model, n_kv_heads · d_head],
    W_V [d_model, n_kv_heads · d_head_v] and W_O [n_heads · d_head_v, d_model]; under latent
    attention (`kv_rank` given) those of DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434,
    eqs. 9 to 19, in that paper's names. All layers have the same sizes.

    Attributes:
        d_model: width of the stream.
        n_heads: query heads of a layer.
        d_head: width of a query and of a key, rotated dimensions included; None for
            d_model / n_heads.
        n_kv_heads: key-value heads of a layer; None for as many as query heads.
        d_head_v: width of a value; None for that of a query.
        n_layers: layers of attention of one stack.
        kv_rank: width of the latent that keys and values come from; None where there is none.
        q_rank: width of the latent that queries come from; None where there is none.
        d_shared_key: under latent attention, the dimensions of a key that are rotated, come
            through no latent and are one for all heads.
        biases: which matrices have a bias: letters of "QKVO", or names such as
            ("DQ", "DKV", "KR", "O") under latent attention.
        qk_norm: whether queries and keys have a norm with d_head gains each, for all heads.
        causal: whether a token sees only what comes before it; only then is there a cache.
        rest: what the model has beside its attention: a Rest, a bare number of parameters, or
            None where it is not told.
        name: the model's name, or "".
        family: the line of models it belongs to, or "".
        year: year of publication, or None.
        published_parameters: parameters of the whole model as its publication counts them.
        note: what the numbers do not show.
        source: where they are published.

    Raises:
        InputError: sizes that no model can have; the message says which.

    Examples:
        >>> budget = wvprobe.HeadBudget(d_model=12288, n_heads=96, n_layers=96)
        >>> budget.d_head, budget.n_attention == 96 * 4 * 12288**2
        (128, True)
        >>> budget.kv_cache_bytes("bfloat16")  # a token
        4718592
    """

    d_model: int
    n_heads: int
    d_head: int | None = None
    n_kv_heads: int | None = None
    d_head_v: int | None = None
    n_layers: int = 1
    kv_rank: int | None = None
    q_rank: int | None = None
    d_shared_key: int = 0
    biases: str | tuple[str, ...] = ()
    qk_norm: bool = False
    causal: bool = True
    rest: Rest | int | None = None
    name: str = ""
    family: str = ""
    year: int | None = None
    published_parameters: float | int | None = None
    note: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Fill in what is left out, and check that the sizes can be those of a model."""
        for name in ("d_model", "n_heads", "n_layers"):
            length(name, getattr(self, name))
        for name, default in (
            ("d_head", self._even_width),
            ("n_kv_heads", lambda: self.n_heads),
            ("d_head_v", lambda: self.d_head),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default())
            length(name, getattr(self, name))
        named = isinstance(self.biases, str)
        biases = self.biases if named else listed("biases", self.biases, "names")
        object.__setattr__(self, "biases", tuple(biases))
        if self.n_heads % self.kv_heads:
            raise InputError(
                message("n_kv_heads", f"a divisor of n_heads = {self.n_heads}", self.n_kv_heads)
            )
        self._check_latents()
        for bias in self.biases:
            one_of("biases", bias, [name.removeprefix("W_") for name in self.matrices])
        if not (self.rest is None or isinstance(self.rest, Rest)):
            at_least("rest", self.rest)

    def _even_width(self) -> int:
        if self.d_model % self.n_heads:
            expected = f"given, since n_heads = {self.n_heads} does not divide {self.d_model}"
            raise InputError(message("d_head", expected, None))
        return self.d_model // self.n_heads

    def _check_latents(self) -> None:
        if self.kv_rank is None:
            for name in ("q_rank", "d_shared_key"):
                if getattr(self, name):
                    hint = "It belongs to latent attention: give kv_rank too."
                    raise InputError(message(name, "left out", getattr(self, name), hint))
            return
        length("kv_rank", self.kv_rank)
        if self.q_rank is not None:
            length("q_rank", self.q_rank)
        if self.kv_heads != self.n_heads:
            hint = "Under latent attention every head has keys and values of its own."
            raise InputError(message("n_kv_heads", f"{self.n_heads}", self.n_kv_heads, hint))
        if at_least("d_shared_key", self.d_shared_key) >= self.width:
            expected = f"from 0 to d_head - 1 = {self.width - 1}"
            raise InputError(message("d_shared_key", expected, self.d_shared_key))
        if self.qk_norm:
            raise InputError(message("qk_norm", "False under latent attention", self.qk_norm))

    # The three sizes that may be left out, as the ints that they are once filled in.
    @property
    def width(self) -> int:
        """Width of a query and of a key."""
        return int(self.d_head or 0)

    @property
    def width_v(self) -> int:
        """Width of a value."""
        return int(self.d_head_v or 0)

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return int(self.n_kv_heads or 0)

    @property
    def kind(self) -> str:
        """How keys and values are shared: MHA, GQA, MQA, or MLA (through a latent)."""
        if self.kv_rank is not None:
            return "MLA"
        if self.kv_heads == self.n_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def concat_width(self) -> int:
        """Width of the heads' outputs side by side: the rows of W_O."""
        return self.n_heads * self.width_v

    @property
    def fills_d_model(self) -> bool:
        """Whether n_heads · d_head is d_model, as an even split of d_model would have it."""
        return self.n_heads * self.width == self.d_model

    @property
    def divides_d_model(self) -> bool:
        """Whether n_heads divides d_model at all."""
        return self.d_model % self.n_heads == 0

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """A layer's matrices: name -> rows and columns."""
        d, h = self.d_model, self.n_heads
        output = {"W_O": (self.concat_width, d)}
        if self.kv_rank is None:
            return {
                "W_Q": (d, h * self.width),
                "W_K": (d, self.kv_heads * self.width),
                "W_V": (d, self.kv_heads * self.width_v),
            } | output
        through = self.width - self.d_shared_key  # of a key, what comes from the latent
        queries = {"W_Q": (d, h * self.width)}
        if self.q_rank is not None:
            queries = {"W_DQ": (d, self.q_rank), "W_UQ": (self.q_rank, h * self.width)}
        shared = {"W_KR": (d, self.d_shared_key)} if self.d_shared_key else {}
        down = {"W_DKV": (d, self.kv_rank)} | shared
        up = {"W_UK": (self.kv_rank, h * through), "W_UV": (self.kv_rank, h * self.width_v)}
        return queries | down | up | output

    @property
    def layer_parameters(self) -> dict[str, int]:
        """Parameters of one layer's attention by matrix, bias (b_) and gain of a norm (g_)."""
        matrices = self.matrices
        counts = {name: rows * columns for name, (rows, columns) in matrices.items()}
        counts |= {f"b_{letter}": matrices[f"W_{letter}"][1] for letter in self.biases}
        if self.qk_norm:
            counts |= {"g_Q": self.width, "g_K": self.width}
        # A latent is normed before it is expanded.
        latents = {"g_DQ": self.q_rank, "g_DKV": self.kv_rank}
        return counts | {name: rank for name, rank in latents.items() if rank is not None}

    @property
    def n_attention(self) -> int:
        """Parameters of all layers' attention."""
        return self.n_layers * sum(self.layer_parameters.values())

    @property
    def rest_parameters(self) -> dict[str, int]:
        """Parameters outside attention by part; empty where `rest` is not told."""
        if isinstance(self.rest, Rest):
            return self.rest.parameters(self.d_model, self.n_layers)
        return {} if self.rest is None else {"outside attention": self.rest}

    @property
    def n_parameters(self) -> int:
        """Parameters of the whole model, a tied table counted once.

        Raises:
            InputError: `rest` is not told.
        """
        if self.rest is None:
            hint = "Give rest=Rest(...), or ask for n_attention."
            raise InputError(message("rest", "told, to count the whole model", None, hint))
        return self.n_attention + sum(self.rest_parameters.values())

    @property
    def kv_cache_numbers(self) -> int:
        """Numbers that one token leaves in the cache, all layers together.

        Keys and values of every key-value head; under latent attention the latent and the shared
        part of the key. A sliding window bounds how many tokens are kept, not what one costs.

        Raises:
            UnsupportedError: attention looks both ways, so that nothing can be kept.
        """
        if not self.causal:
            raise UnsupportedError(
                f"{self.name or 'a model'} that looks both ways keeps no keys and values: each "
                "new token changes all the others. Use a causal model's budget."
            )
        if self.kv_rank is not None:
            return self.n_layers * (self.kv_rank + self.d_shared_key)
        return self.n_layers * self.kv_heads * (self.width + self.width_v)

    def kv_cache_bytes(self, dtype: str = "bfloat16") -> int:
        """Return the bytes that one token leaves in the cache, all layers together.

        Args:
            dtype: float64, float32, bfloat16, float16, float8 or int8.

        Raises:
            InputError: another dtype.
            UnsupportedError: attention looks both ways, so that nothing can be kept.
        """
        return self.kv_cache_numbers * BYTES[one_of("dtype", dtype, tuple(BYTES))]

    def flops(self, context: int, *, absorbed: bool = False) -> dict[str, int]:
        """Return the FLOPs of one token's forward by part, all layers together.

        A multiplication with its addition counts as 2, so a matrix costs twice its weights
        (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, table 1). Biases, norms, softmax and
        rotation are left out. Over a whole causal sequence the mean context is about half of it;
        a backward costs twice a forward.

        Args:
            context: how many tokens the token looks at, itself included.
            absorbed: under latent attention, score against the cached latents themselves (W_UK
                moves to the query, W_UV to the output), as decoding does. The projections cost the
                same, scores and values more, and no keys are expanded.

        Returns:
            ``projections``, ``scores`` (q·k), ``values`` (pattern · v), and with a Rest ``mlp``
            and ``unembedding``.

        Raises:
            InputError: a context below 1, or `absorbed` without latent attention.
        """
        length("context", context)
        if absorbed and self.kv_rank is None:
            raise InputError(message("absorbed", "False without latent attention", absorbed))
        latent = (int(self.kv_rank or 0) + self.d_shared_key, int(self.kv_rank or 0))
        of_key, of_value = latent if absorbed else (self.width, self.width_v)
        weights = sum(rows * columns for rows, columns in self.matrices.values())
        a_layer = {
            "projections": 2 * weights,
            "scores": 2 * context * self.n_heads * of_key,
            "values": 2 * context * self.n_heads * of_value,
        }
        counts = {name: self.n_layers * count for name, count in a_layer.items()}
        if isinstance(self.rest, Rest):
            counts |= self.rest.flops(self.d_model, self.n_layers)
        return counts

    def to_frame(self) -> Any:
        """Return one row a matrix, bias, gain or part outside attention.

        Columns: part layer_parameters parameters share. `layer_parameters` is blank outside
        attention; `share` is of what is listed.
        """
        import pandas

        inside = self.layer_parameters
        rows = [(part, count, self.n_layers * count) for part, count in inside.items()]
        rows += [(part, None, count) for part, count in self.rest_parameters.items()]
        total = sum(count for _, _, count in rows)
        table = [(*row, row[-1] / total) for row in rows]
        columns = ["part", "layer_parameters", "parameters", "share"]
        frame = pandas.DataFrame(table, columns=columns)
        return frame.astype({"layer_parameters": "Int64"})  # whole numbers, blanks among them

    @classmethod
    def from_config(cls, config: Any) -> "HeadBudget":
        """Read the sizes from a transformers config, with no download and no weights.

        The model is built without memory besides (on torch's meta device), and the arithmetic held
        against its count: sizes that do not explain every parameter are refused.

        Args:
            config: a transformers PreTrainedConfig, or its dictionary with ``model_type``.

        Raises:
            InputError: `config` is neither.
            UnsupportedError: a family, or an option of one, that is not known here.
        """
        from wvprobe.budget._configs import from_config

        return from_config(config)

    @classmethod
    def from_model(cls, model: Any) -> "HeadBudget":
        """Read the sizes from a loaded model, held against its own parameters.

        The attention's parameters are counted one by one and must be what the arithmetic says.
        What stands outside is taken apart for families known to :meth:`from_config`, and counted
        for others. A head that the checkpoint lacks is not counted.

        Args:
            model: a TransformerBridge.

        Raises:
            InputError: `model` is none.
            UnsupportedError: attention whose sizes do not explain its parameters.
        """
        from wvprobe.budget._configs import from_model

        return from_model(model)
