"""Model and tokenizer out of a folder, a GGUF file or a hub, with nothing random unnoticed."""

import contextlib
import io
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from wvprobe._shards import Shards
from wvprobe._validate import file_path, message
from wvprobe.errors import ModelFileError, TokenizerError, UnsupportedError, WvprobeError


@dataclass(frozen=True)
class Checkpoint:
    """What was read.

    Attributes:
        model: a transformers model with a head for tokens.
        tokenizer: its tokenizer, loaded from a folder that stays.
        missing_head: why that head is not to be used, or "".
    """

    model: Any
    tokenizer: Any
    missing_head: str


def read_checkpoint(
    where: str | Path,
    name: str,
    *,
    dtype: torch.dtype,
    tokenizer: Any,
    options: Mapping[str, Any],
    placement: Mapping[str, Any],
) -> Checkpoint:
    """Read a model and its tokenizer with transformers, and look at what the checkpoint lacked.

    Args:
        where: a folder, or a hub's name.
        name: what messages call the model.
        dtype: the dtype of its weights.
        tokenizer: a tokenizer, or its folder, to use instead of the model's own, or None.
        options: further arguments of ``from_pretrained``.
        placement: those of them that say on which devices the model's weights go; {} for the CPU.

    Raises:
        ModelFileError: unreadable, or weights other than the head's are missing.
        TokenizerError: there is no tokenizer.
        UnsupportedError: neither a decoder nor an encoder, or quantised; or a weight is not held in
            memory.
    """
    try:
        model, report = read(
            _auto_class(where, name, options),
            where,
            dtype=dtype,
            output_loading_info=True,
            **options,
            **placement,
        )
    except (WvprobeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a file can be broken in as many ways as there are readers
        _refuse_foreign_code(error, name)
        raise ModelFileError(
            f"{name} is broken, or not of a kind that transformers reads: {_one_line(error)}"
        ) from error
    missing_head = _missing_head(model, report, name)
    _warn_of_unused(report, name)
    refuse_quantised(model, name)
    refuse_offloaded(model, name)
    # Not what the checkpoint was saved as: booting goes by this.
    model.config.architectures = [type(model).__name__]
    if tokenizer is not None:
        return Checkpoint(model, settled_tokenizer(tokenizer), missing_head)
    return Checkpoint(model, _own_tokenizer(where, name, options), missing_head)


@dataclass(frozen=True)
class SkeletonRead:
    """A model without weights, and its tokenizer.

    Attributes:
        model: a transformers model on the meta device.
        tokenizer: its tokenizer, or None where the folder has none.
        boot_tokenizer: the same, or a small one to boot with.
    """

    model: Any
    tokenizer: Any
    boot_tokenizer: Any


def read_skeleton(folder: str | Path) -> SkeletonRead:
    """Build a model of a folder's config on the meta device, where it takes no memory.

    Raises:
        ModelFileError: there is no config that transformers reads.
        UnsupportedError: neither a decoder nor an encoder.
    """
    where, name, options = file_path("folder", folder), str(folder), {"local_files_only": True}
    try:
        auto = _auto_class(where, name, options)
        config = read(AutoConfig, where, **options)
    except WvprobeError:
        raise
    except Exception as error:  # see read_checkpoint
        _refuse_foreign_code(error, name)
        raise ModelFileError(
            f"{name} has no config that transformers reads: {_one_line(error)}"
        ) from error
    with quiet_transformers(), torch.device("meta"):
        model = auto.from_config(config)
    refuse_quantised(model, name)
    model.config.architectures = [type(model).__name__]
    try:
        tokenizer = _own_tokenizer(where, name, options)
    except TokenizerError:
        tokenizer = None
    return SkeletonRead(model, tokenizer, tokenizer or _placeholder_tokenizer())


def _placeholder_tokenizer() -> Any:
    """Return a tokenizer of one word: a bridge is not booted without any."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return settled_tokenizer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))


def read(auto: Any, where: str | Path, **options: Any) -> Any:
    """Return ``auto.from_pretrained(where, **options)`` without transformers' bars and reports.

    Downloads from a hub keep their bars.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_transformers(bars=not options.get("local_files_only")))
        if "gguf_file" in options:
            # The bar of GGUF files does not heed transformers' switch.
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        # Code that comes with a checkpoint is not run, and nobody is asked whether it should be.
        return auto.from_pretrained(where, trust_remote_code=False, **options)


@contextlib.contextmanager
def quiet_transformers(*, bars: bool = False) -> Iterator[None]:
    """Keep transformers' reports and (unless `bars`) progress bars from the terminal."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars and not bars:
            logging.enable_progress_bar()


def settled_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer, or the one in a folder, as loaded from a folder that stays.

    A bridge reads its tokenizer a second time, from where it came from: one made or changed in
    memory is lost there, and one from a hub asks the hub again.
    """
    if isinstance(tokenizer, (str, Path)):
        if not Path(tokenizer).is_dir():
            raise TokenizerError(message("tokenizer", "a tokenizer or its folder", str(tokenizer)))
        return _own_tokenizer(Path(tokenizer), str(tokenizer), {"local_files_only": True})
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TokenizerError(message("tokenizer", "a transformers tokenizer", tokenizer))
    folder = tempfile.mkdtemp(dir=_tokenizers_folder().name)
    tokenizer.save_pretrained(folder)
    return read(AutoTokenizer, folder, local_files_only=True)


def refuse_quantised(model: Any, name: str) -> None:
    """Raise UnsupportedError where weights are packed into whole numbers."""
    for key, weight in model.named_parameters():
        if not weight.is_floating_point():
            raise UnsupportedError(
                f"{name} holds quantised weights ({key} is {weight.dtype}), which have no exact "
                "W_Q, W_K, W_V, W_O. Load an unquantised checkpoint of it."
            )


def refuse_offloaded(model: Any, name: str) -> None:
    """Raise UnsupportedError where a weight is not in memory between the calls that use it."""
    for key, weight in model.named_parameters():
        if weight.is_meta:
            raise UnsupportedError(
                f"{key} of {name} is not in memory: its device map puts it on a disk, or there is "
                "no room for it. Weights are read and hashed as they are, so each must be on a "
                "GPU or in the CPU's memory. Use HeadWeights.from_safetensors(folder), which reads "
                "a layer at a time, or a machine with more memory."
            )


def _auto_class(where: str | Path, name: str, options: Mapping[str, Any]) -> Any:
    """Return the class that gives the model the head its checkpoint was trained with."""
    if "gguf_file" in options:
        return AutoModelForCausalLM  # GGUF files hold decoders; reading one's config takes seconds
    config = read(AutoConfig, where, **options)
    _refuse_sizes_without_weights(config, where, name)
    stated = (config.architectures or [""])[0]
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder or not (masked or causal):
        raise UnsupportedError(
            f"{name} is a {stated or config.model_type}: neither a decoder nor an encoder of text "
            "alone, which is what wvprobe reads."
        )
    if masked and causal:  # BERT and its like come in both kinds
        decoder: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        masked = stated != decoder.__name__ and not getattr(config, "is_decoder", False)
    return AutoModelForMaskedLM if masked else AutoModelForCausalLM


def _refuse_foreign_code(error: Exception, name: str) -> None:
    if "trust_remote_code" in str(error):
        raise UnsupportedError(
            f"{name} runs on code of its own, which wvprobe does not run for you. Look at the "
            "code, load the model with transformers and trust_remote_code=True, and pass it to "
            "load with its tokenizer."
        ) from error


def _refuse_sizes_without_weights(config: Any, where: str | Path, name: str) -> None:
    """Raise where a config wants more than its files can hold, before that much is built."""
    if not isinstance(where, Path) or not list(where.glob("*.safetensors*")):
        return
    if list(where.glob("pytorch_model*.bin*")) and not list(where.glob("model*.safetensors*")):
        return  # the weights are in these, and safetensors files beside them something else's
    files = Shards(where, "").files
    n_bytes = sum(path.stat().st_size for path in set(files.values()))
    text = config.get_text_config()
    for size, unit, most in (
        ("num_hidden_layers", "tensors", len(files)),
        ("vocab_size", "bytes", n_bytes),
        ("hidden_size", "bytes", n_bytes),
    ):
        asked = getattr(text, size, 0)
        if asked > most:
            raise ModelFileError(
                f"{name} is broken: {size} is {asked:,} in its config, and its files hold {most:,} "
                f"{unit}. Get the checkpoint again; or its config does not belong to it."
            )


def _missing_head(model: Any, report: Mapping[str, Any], name: str) -> str:
    """Return why the model has no head, or ""; refuse it where anything else is missing."""
    body = model.base_model_prefix
    missing = sorted(report["missing_keys"])
    # What lies outside the base model is the head. A class without one has no such inside.
    inside = f"{body}." if body and hasattr(model, body) else ""
    random = [key for key in missing if key.startswith(inside)]
    if random:
        raise ModelFileError(
            f"{name} is incomplete: its checkpoint lacks {_listing(random)}, which would be "
            "random. Get the checkpoint again; or its config does not belong to it."
        )
    return f"the checkpoint lacks {_listing(missing)}, its head would be random" if missing else ""


def _warn_of_unused(report: Mapping[str, Any], name: str) -> None:
    # Poolers and other heads go unused as a matter of course; weights of a layer do not.
    unused = [key for key in sorted(report["unexpected_keys"]) if re.search(r"\.\d+\.", key)]
    if unused:
        warnings.warn(
            f"{name}: the checkpoint holds weights that its architecture has no place for: "
            f"{_listing(unused)}. They are not used.",
            stacklevel=2,
        )


def _own_tokenizer(where: str | Path, name: str, options: Mapping[str, Any]) -> Any:
    try:
        tokenizer = read(AutoTokenizer, where, **options)
    except Exception as error:  # see read_checkpoint
        raise TokenizerError(
            f"{name} has no tokenizer that can be read: {_one_line(error)}. Pass tokenizer=."
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # Where the files are not there, transformers makes up one that knows no word.
        raise TokenizerError(f"{name} has no tokenizer files. Pass tokenizer=.")
    in_a_folder = isinstance(where, Path) and "gguf_file" not in options
    return tokenizer if in_a_folder else settled_tokenizer(tokenizer)


@cache
def _tokenizers_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="wvprobe-tokenizers-")


def _listing(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
