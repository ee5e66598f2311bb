"""Which conversation a cache holds, and which model made it: what goes on from neither is refused.

`listen` lets a model tell its compressed caches what it reads. A hook before its decoder sees the ids of every pass.
An attribute of the instance stands before `generate`, which alone sees the ids of a whole conversation: transformers
cuts off as many as the cache holds, whichever they are. No class is patched.

The ids of a plain forward pass are by definition the next ones, and of embeddings only the number is checked. A pass of
one token does not look at every weight, only at the adapters that the model had when the cache was new.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leank.data_gen.amount import amount
from leank.eval.cache.fingerprint import adapter_state, model_digest, stamp, tuners
from leank.eval.cache.storage.upload import capturing
from leank.shape import scaled_positions
from leank.versions import CHECKPOINTING_KEEPS_CACHE, CHUNKS_GO_ON

ANEW = "call cache.reset() first"
ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")  # settings that draft


class Conversation:
    """Ids that a cache has read, and the model that read them."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._passes: list[Tensor] | None = []  # ids [B, n] of each pass, None = some came as embeddings
        self._columns = 0
        self._positioned = False  # whether a pass came with position_ids
        self._virtual = 0  # columns held beyond those of the ids
        self.given: Tensor | None = None  # ids [B, n] of the coming pass, which the decoder may get as embeddings
        self.heard = False  # whether the pass that the layers are about to take was read
        self._begins = False  # whether that pass is the first of a call of generate()
        self._decoder: weakref.ref[nn.Module] | None = None
        self._stamp: dict[str, object] = {}
        self._tuners: list[Any] = []
        self._adapters: list[tuple[object, ...]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversation:
        new = Conversation()
        vars(new).update(vars(self))
        new._passes = None if self._passes is None else list(self._passes)
        memo[id(self)] = new
        return new

    @property
    def ids(self) -> Tensor | None:
        """Ids [B, columns] of everything that was read, None = not known."""
        if not self._passes:
            return None
        self._passes = [torch.cat(self._passes, 1)]
        return self._passes[0]

    def begin(self, decoder: nn.Module, ids: Tensor | None = None) -> None:
        """Note what makes the keys from now on, and the ids [B, columns] that are held already."""
        self._decoder, self._stamp = weakref.ref(decoder), stamp(decoder)
        self._tuners = list(tuners(decoder).values())
        self._adapters = [adapter_state(layer) for layer in self._tuners]
        if ids is not None:
            self._passes, self._columns = [ids], ids.shape[1]

    def read(self, decoder: nn.Module, held: int, ids: Tensor | None) -> None:
        """Take in a pass over ids [B, n], None = embeddings, behind `held` columns.

        Raises ValueError if the model is not as it was when the cache's first tokens came.
        """
        if not held:
            self.clear()
            self.begin(decoder)
        elif self._decoder is not None:
            self._check_model(decoder, every=self._begins or ids is None or ids.shape[1] > 1)
        self.cut(held)
        if ids is None or self._columns < held:
            self._passes = None
        if self._passes is not None and ids is not None:
            self._passes.append(ids.detach().clone())  # a caller may write its next ids into the same tensor
            self._columns += ids.shape[1]

    def _check_model(self, decoder: nn.Module, every: bool) -> None:
        assert self._decoder is not None
        mine = self._decoder()
        if mine is not decoder:
            if not self.made_by(decoder):
                raise ValueError(
                    f"another model made what this cache holds: go on with that model, or {ANEW}; CompressedCache.load "
                    "takes a saved cache to a copy of its model"
                )
            self.begin(decoder)
        elif every and (now := stamp(decoder)) != self._stamp:
            changed = next(what for what in now if now[what] != self._stamp[what])
            raise ValueError(
                f"{changed} changed after the first tokens of this cache had come, and its keys and values would be of "
                f"two models: change it back, or {ANEW}"
            )
        elif not every and [adapter_state(layer) for layer in self._tuners] != self._adapters:  # of a decoding step
            raise ValueError(f"its adapters changed after the first tokens of this cache had come: {ANEW}")

    def check_saved(self) -> None:
        """Raise ValueError if a file could not tell what made the keys."""
        if self._virtual:
            raise ValueError("a cache whose model puts tokens of its own before the ids (prompt tuning) is not saved")
        if any(of_rows for *_, of_rows in self._adapters):
            raise ValueError("a cache whose rows have adapters of their own (adapter_names) is not saved")

    def made_by(self, decoder: nn.Module) -> bool:
        """Whether this decoder, or an equal copy, has read what is held; also True where nothing is known."""
        mine: Any = decoder if self._decoder is None else self._decoder()
        return mine is decoder or (mine is not None and model_digest(mine) == model_digest(decoder))  # type: ignore[arg-type]

    def cut(self, columns: int) -> None:
        """Keep the first columns, as after crop()."""
        if columns < self._columns:
            ids = self.ids
            self._passes = None if ids is None else [ids[:, :columns]]
            self._columns = columns

    def select(self, rows: Tensor) -> None:
        """Keep these rows in this order, as beams do."""
        ids = self.ids
        if ids is not None:
            self._passes = [ids[rows.to(ids.device)]]

    def repeat(self, repeats: int) -> None:
        """Give each row `repeats` times, side by side."""
        ids = self.ids
        if ids is not None:
            self._passes = [ids.repeat_interleave(repeats, 0)]

    def check_rows(self, taken: np.ndarray | None, held: int, new: int, mask: object, positioned: bool) -> None:
        """Raise ValueError if a pass of `new` columns counts the tokens of what is held otherwise than the cache does.

        taken: [B], tokens of each row among the `held` columns, None = not known; mask: attention_mask of the pass
        positioned: whether it comes with position_ids. Masks of decoding steps are not read, nor waited for
        """
        begins, self._begins = self._begins, False
        if not held:
            self._positioned = positioned
        if not held or taken is None:
            return
        padded = bool((taken < held).any())
        if padded and self._positioned and not positioned:
            raise ValueError(
                "the cache holds padding, and its tokens came with position_ids: give those of the new tokens, too"
            )
        if padded and begins and mask is None:
            raise ValueError(
                f"the cache holds padding that attention_mask does not name: give that of all tokens so far, or {ANEW}"
            )
        of_held = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == (len(taken), held + new)
        if not of_held or (new == 1 and not begins):
            return
        counted = mask[:, :held].bool().sum(1).cpu().numpy()  # type: ignore[index]
        if (counted != taken).any():
            row = int((counted != taken).argmax())
            raise ValueError(
                f"attention_mask says that row {row} has {amount(int(counted[row]), 'token')} in the {held} columns "
                f"that the cache holds, and {taken[row]} came (what generate() fills a row with after its end counts): "
                f"give the mask with which they came, or {ANEW}"
            )

    def check(self, held: int, given: dict[str, Any], drafts: bool = False) -> None:
        """Raise ValueError unless what generate() was given goes on from the `held` columns of a cache.

        given: the arguments of generate(); its attention_mask tells new ids from those of a whole conversation
        drafts: whether decoding is assisted
        """
        ids: Any = given.get("input_ids")
        embeds: Any = given.get("inputs_embeds")
        mask = given.get("attention_mask")
        ids = given.get("inputs") if ids is None else ids
        coming: Any = embeds if isinstance(embeds, Tensor) else ids
        if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, -1].all()):
            row = int((mask[:, -1] == 0).nonzero()[0])
            raise ValueError(
                f"row {row} ends in padding, and generate() would go on from there: pad on the left "
                '(tokenizer.padding_side="left")'
            )
        if held and drafts:
            raise ValueError(
                f"assisted decoding of transformers reads the whole conversation again, of which the cache holds "
                f"{amount(held, 'token')}: leave it out in a later turn, or {ANEW}"
            )
        if held and self._virtual:
            raise ValueError(
                f"the model put {amount(self._virtual, 'token')} of its own before the ids (prompt tuning), by which "
                f"transformers would cut off too many of them: {ANEW}, and give the whole conversation"
            )
        self._begins = True
        if not held or not isinstance(coming, Tensor) or coming.ndim < 2:
            return
        what, came = "embedding" if coming is embeds else "id", coming.shape[1]
        if coming is ids and isinstance(mask, Tensor) and mask.shape[1] > came:  # the mask alone is of everything
            if mask.shape[1] != held + came:
                raise ValueError(
                    f"the cache holds {amount(held, 'token')} and {amount(came, 'id')} came, but attention_mask has "
                    f"{mask.shape[1]} columns: give it {held + came}, or {ANEW}"
                )
            return
        if came <= held:
            raise ValueError(
                f"the cache holds {amount(held, 'token')} and {amount(came, what)} came: give the {what}s of the whole "
                f"conversation, or call cache.reset() first"
            )
        mine = self.ids
        if coming is not ids or mine is None or mine.shape != (len(coming), held):
            return
        differs = mine.to(coming.device) != coming[:, :held]
        if isinstance(mask, Tensor) and mask.shape[1] == came:
            differs &= mask[:, :held].bool()  # padding may have any id
        if bool(differs.any()):
            row, column = differs.nonzero()[0].tolist()
            raise ValueError(
                f"the ids do not go on from the {amount(held, 'token')} that the cache holds: row {row} differs from "
                f"column {column} on; give the whole conversation, or {ANEW}"
            )

    def fill(self, before: int, held: int, given: dict[str, Any], result: Any) -> None:
        """Take in what replayed steps have read, which no hook saw: the ids that generate() returned."""
        sequences = getattr(result, "sequences", result)
        ids = given.get("input_ids", given.get("inputs"))
        mine = self.ids
        if given.get("inputs_embeds") is None and isinstance(ids, Tensor) and not before:
            # embeddings came for ids; the last id is not read. Of ids, beams leave out what ends behind the best one
            self._virtual = held + 1 - sequences.shape[1] if mine is None and held > sequences.shape[1] else 0
        if held == self._columns or mine is None or not isinstance(ids, Tensor):
            return
        whole = not before or ids.shape[1] > before
        kept = sequences[:, :held] if whole else torch.cat([mine[:, :before], sequences[:, : held - before]], 1)
        alike = len(sequences) == len(mine) and kept.shape[1] == held
        self._passes, self._columns = ([kept], held) if alike else (None, held)


class _Generate:
    """`model.generate` that lets a compressed cache check its ids; a copied or unpickled model has the plain one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """See transformers' `generate`."""
        model: Any = self._model()
        given = kwargs if inputs is None else {"inputs": inputs, **kwargs}
        cache = _compressed(kwargs)
        if cache is None:
            return type(model).generate(model, inputs, *args, **kwargs)
        before = cache.held
        cache.conversation.check(before, given, drafts(model, given))
        if before and not CHUNKS_GO_ON:  # then a later turn comes in one pass
            kwargs["prefill_chunk_size"] = None
        result = type(model).generate(model, inputs, *args, **kwargs)
        cache.conversation.fill(before, cache.held, given, result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        model: Any = self._model()
        return getattr, (model, "generate")  # before the copy has attributes of its own, the method of its class


def drafts(model: nn.Module, given: dict[str, Any]) -> bool:
    """Whether generate() with these arguments is assisted decoding."""
    config: Any = given.get("generation_config") or model.generation_config
    return any(given.get(name, getattr(config, name, None)) for name in ASSISTED)


def _compressed(kwargs: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
    """The compressed cache among the arguments of a call, by either of their names or by position; None = none."""
    caches = (kwargs.get("past_key_values"), kwargs.get("cache"), *args)
    return next((cache for cache in caches if hasattr(cache, "conversation")), None)


def _before_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a model whose decoder may get embeddings alone (of images and text)."""
    cache = _compressed(kwargs, args)
    if cache is not None:
        cache.conversation.given = kwargs.get("input_ids", args[0] if args else None)


def _before_pass(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the decoder of a model."""
    cache = _compressed(kwargs, args)
    if cache is None:
        return
    dropped = torch.is_grad_enabled() or not CHECKPOINTING_KEEPS_CACHE
    if dropped and decoder.training and getattr(decoder, "gradient_checkpointing", False):
        warnings.warn(
            "transformers drops the cache while gradient checkpointing is on in training mode, so nothing is "
            "compressed: call model.eval() or model.gradient_checkpointing_disable()",
            RuntimeWarning,
            stacklevel=2,
        )
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None and capturing(ids):  # the ids of a captured step are a buffer; `fill` takes in what it reads
        cache.conversation.heard = True
        return
    coming = kwargs.get("inputs_embeds") if ids is None else ids
    given, cache.conversation.given = cache.conversation.given, None
    if ids is None and given is not None and coming is not None and given.shape == coming.shape[:2]:
        ids = given
    limit = scaled_positions(decoder.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    new = 0 if limit is None or coming is None else coming.shape[1]
    # a reply may go on past them, of which transformers warns, and so may a draft of it
    drafted = cache.held and any(getattr(layer, "record_past", False) for layer in cache.layers)
    if new > 1 and cache.held + new > limit and not drafted:
        said = f"{amount(new, 'token')}" + (f" after the {cache.held} that are held" if cache.held else "")
        raise ValueError(
            f"{said}: more than the model's max_position_embeddings={limit}; shorten the prompt, or extend the model's "
            "RoPE (rope_parameters) before it is loaded"
        )
    cache.conversation.read(decoder, cache.held, ids)
    if coming is not None:
        mask, positioned = kwargs.get("attention_mask"), kwargs.get("position_ids") is not None
        cache.conversation.check_rows(cache.taken, cache.held, coming.shape[1], mask, positioned)
    cache.conversation.heard = True


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a model that reads ids and fills the cache."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    return model if found is None else found


def listen(model: nn.Module) -> None:
    """Let a model tell its compressed caches what it reads; once a model.

    A `generate` that another library has put on the instance stays; then `CompressedCache.generate` alone checks ids.
    """
    decoder = decoder_of(model)
    if _before_pass not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before_pass, with_kwargs=True)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    for one in (model, base):
        if one is not decoder and _before_model not in one._forward_pre_hooks.values():
            one.register_forward_pre_hook(_before_model, with_kwargs=True)
        plain = getattr(type(one), "generate", None)
        if plain is not None and getattr(vars(one).get("generate", one.generate), "__func__", None) is plain:
            vars(one)["generate"] = _Generate(one)
